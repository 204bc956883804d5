# SPDX-License-Identifier: Apache-2.0
"""Facts about a whole delivery: how much host memory its order needs, and which layers a failure left old or new.

Pure bookkeeping for :mod:`trtllm_megamoe.weights.loader`; touches no tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Set

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.weights.spec import AuxFamily, ModuleSpec, TensorKey, parse_name


class DeliveryOrder(str, enum.Enum):
    """What the caller promises about the order of tensors."""

    ANY = "any"
    LAYER = "layer"
    """Everything of a layer comes before any bulk tensor of the next; only an aux tail may follow later."""

    @classmethod
    def parse(cls, order: DeliveryOrder | str) -> DeliveryOrder:
        """Accept a member or its value; anything else is an error that lists the values."""
        try:
            return cls(order)
        except ValueError:
            allowed = ", ".join(member.value for member in cls)
            raise MegaMoeConfigError(f"delivery order {order!r} is unknown; allowed: {allowed}") from None


def staging_peak(
    specs: Mapping[int, ModuleSpec],
    expected: Mapping[int, Set[AuxFamily]],
    order: DeliveryOrder,
    names: Iterable[str] | None,
) -> int:
    """Largest number of host bytes that staging holds at once.

    Args:
        specs: modules of the window by layer.
        expected: families each module waits for.
        order: the promise; without names, `LAYER` needs the largest module and `ANY`, at worst, all of them.
        names: tensor names in order of delivery, where known; the answer is then exact for `ANY`.
    """
    sizes = [spec.source_bytes for spec in specs.values()]
    if order is DeliveryOrder.LAYER:
        return max(sizes, default=0)
    if names is None:
        return sum(sizes)
    waiting: dict[int, set[TensorKey]] = {}
    for module, spec in specs.items():
        waiting[module] = set(spec.bulk_keys())
        for family in expected[module]:
            waiting[module].update(spec.family_keys(family))
    held = dict.fromkeys(specs, 0)
    peak = 0
    only = next(iter(specs)) if len(specs) == 1 else None
    for parsed in map(parse_name, names):
        if parsed is None:
            continue
        layer = parsed.layer if only is None else only
        if layer is None or layer not in waiting or parsed.key not in waiting[layer]:
            continue
        waiting[layer].discard(parsed.key)
        if parsed.key.component.is_bulk:
            rows, columns = specs[layer].shape.tensor_shape(parsed.key.projection, parsed.key.component)
            held[layer] += rows * columns
            peak = max(peak, sum(held.values()))
        if not waiting[layer]:
            held[layer] = 0
    return peak


class MixLedger:
    """Which layers differ after a failed window: those still old and those already new.

    The mix ends when one successful window replaces all layers of either side (the rest of the new model, or the old
    model again), when the caller accepts it, or when everything involved is reloaded.
    """

    def __init__(self) -> None:
        self.old: frozenset[int] = frozenset()
        self.new: frozenset[int] = frozenset()

    @property
    def layers(self) -> frozenset[int]:
        """All layers that `forward` may not use."""
        return self.old | self.new

    def clear(self) -> None:
        """No layer differs any more."""
        self.old = self.new = frozenset()

    def failed(self, old: Set[int], new: Set[int]) -> None:
        """A window ended in an error with these layers not replaced and replaced."""
        if self.layers:
            # Nobody can tell which layers agree after a failed retry: only a reload of all of them does.
            self.old = self.new = self.layers | old | new
        elif new:
            self.old, self.new = frozenset(old), frozenset(new)

    def succeeded(self, replaced: Set[int]) -> None:
        """A window completed and replaced these layers."""
        if replaced >= self.old or replaced >= self.new:
            self.clear()
        elif replaced <= self.old:
            self.old, self.new = self.old - replaced, self.new | replaced
        elif replaced <= self.new:
            self.old, self.new = self.old | replaced, self.new - replaced
        else:
            self.old = self.new = self.layers | replaced
