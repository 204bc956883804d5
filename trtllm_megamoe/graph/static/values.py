# SPDX-License-Identifier: Apache-2.0
"""The scanner's abstract values: where a value lives and the little else that the rules need to know about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace


class Kind(enum.Enum):
    """Where a value lives, or what a name refers to."""

    UNKNOWN = "unknown"
    HOST = "host"
    DEVICE = "device tensor"
    PAGEABLE = "pageable host tensor"
    PINNED = "pinned host tensor"
    CONTAINER = "container"
    NAME = "external name"
    LOCAL = "function or class of the scanned files"
    INSTANCE = "instance"


class Dtype(enum.Enum):
    """Element class of a tensor as far as indexing cares."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"


@dataclass(frozen=True, slots=True)
class Value:
    """One abstract value.

    `scalar`: a tensor known to have no dimensions. `assumed`: a device tensor only by annotation or habit, so an
    explicit move to the device is news. `items`: elements of a container, None when only `element` is known. `target`:
    name a NAME, LOCAL or INSTANCE stands for. `literal`: constant behind a host value. `bound`: a method's receiver.
    """

    kind: Kind
    dtype: Dtype | None = None
    scalar: bool = False
    assumed: bool = False
    element: Value | None = None
    items: tuple[Value, ...] | None = None
    target: str = ""
    literal: object = None
    bound: Value | None = None

    @property
    def on_device(self) -> bool:
        """True for a device tensor."""
        return self.kind is Kind.DEVICE

    @property
    def is_host_tensor(self) -> bool:
        """True for a tensor in host memory, pinned or not."""
        return self.kind in (Kind.PAGEABLE, Kind.PINNED)

    @property
    def holds_device(self) -> bool:
        """True for a device tensor or a container with one."""
        if self.kind is Kind.CONTAINER:
            return any(v.holds_device for v in self.members())
        return self.on_device

    def members(self) -> tuple[Value, ...]:
        """Elements known of a container."""
        return self.items if self.items is not None else ((self.element,) if self.element is not None else ())

    def iterated(self) -> Value:
        """Value that a loop over this one yields."""
        if self.kind is Kind.CONTAINER:
            return join(self.members())
        if self.kind in (Kind.DEVICE, Kind.PAGEABLE, Kind.PINNED):
            return replace(self, scalar=False)
        return HOST if self.kind is Kind.HOST else UNKNOWN


UNKNOWN = Value(Kind.UNKNOWN)
HOST = Value(Kind.HOST)
DEVICE = Value(Kind.DEVICE)
DEVICE_BOOL = Value(Kind.DEVICE, Dtype.BOOL)
DEVICE_INT = Value(Kind.DEVICE, Dtype.INT)
PAGEABLE = Value(Kind.PAGEABLE)
PINNED = Value(Kind.PINNED)


def container(items: Iterable[Value]) -> Value:
    """A container with exactly these elements."""
    return Value(Kind.CONTAINER, items=tuple(items))


def container_of(element: Value) -> Value:
    """A container with any number of elements of one sort."""
    return Value(Kind.CONTAINER, element=element)


def is_none(value: Value) -> bool:
    """True for the constant None."""
    return value.kind is Kind.HOST and value.literal is NONE


class _NoneLiteral:
    """Marks the constant None, because `Value.literal` uses None for "no constant known"."""

    def __repr__(self) -> str:
        return "NONE"


NONE = _NoneLiteral()
HOST_NONE = Value(Kind.HOST, literal=NONE)

_STRENGTH = (
    Kind.DEVICE,
    Kind.PAGEABLE,
    Kind.PINNED,
    Kind.CONTAINER,
    Kind.INSTANCE,
    Kind.LOCAL,
    Kind.NAME,
    Kind.HOST,
    Kind.UNKNOWN,
)


def join(values: Iterable[Value]) -> Value:
    """Least informative value that still says "may be on the device" when any of `values` may.

    None gives way to everything: an optional tensor is a tensor. Facts on which the values differ are forgotten.
    """
    distinct = list(dict.fromkeys(values))
    real = [v for v in distinct if not is_none(v)] or distinct
    if not real:
        return UNKNOWN
    if len(real) == 1:
        return real[0]
    best = min((v.kind for v in real), key=_STRENGTH.index)
    same = [v for v in real if v.kind is best]
    if len(same) == 1:
        return same[0]
    if best is Kind.CONTAINER:
        rows = [v.items for v in same if v.items is not None]
        if len(rows) == len(same) and len({len(row) for row in rows}) == 1:
            return container(join(column) for column in zip(*rows, strict=True))
        members = [m for v in same for m in v.members()]
        return container_of(join(members)) if members else same[0]
    first = same[0]
    if best is Kind.LOCAL:  # one of several functions: nothing to follow
        return UNKNOWN
    return Value(
        best,
        dtype=first.dtype if all(v.dtype is first.dtype for v in same) else None,
        scalar=all(v.scalar for v in same),
        assumed=all(v.assumed for v in same),
        target=first.target if all(v.target == first.target for v in same) else "",
    )
