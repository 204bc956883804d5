# SPDX-License-Identifier: Apache-2.0
"""A tactic: how a kernel cuts the work of one bucket. And the space of legal ones, which a kernel family provides.

Tuner, heuristic and table loader all ask the same predicate, `TacticSpace.why_illegal`; no other rule exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from trtllm_megamoe.errors import MegaMoeConfigError

DEFAULT_TACTIC = -1
"""Stands for "the heuristic's choice", which always works; the host's convention."""


@dataclass(frozen=True, slots=True)
class Tactic:
    """One configuration, as plain numbers: it survives `eval(repr(t))`, JSON and pickling, and hashes alike anywhere.

    Attributes:
        token_widths: Ascending tile widths in tokens; a tile takes the smallest that holds its rows.
        tile_rows: Weight rows of a tile.
        math_warpgroups: Warpgroups that multiply.
        math_registers: Registers per thread of those.
        producer_registers: Registers per thread of the warps that feed them.
        max_stages: Upper bound of pipeline stages; shared memory may allow fewer.
        fc1_lag: fc1 tiles per multiprocessor between the end of an expert's fc1 and its fc2.
    """

    token_widths: tuple[int, ...]
    tile_rows: int
    math_warpgroups: int
    math_registers: int
    producer_registers: int
    max_stages: int
    fc1_lag: int

    def __post_init__(self) -> None:
        numbers = [getattr(self, field.name) for field in fields(self)[1:]]
        is_tuple = isinstance(self.token_widths, tuple)
        if not is_tuple or not all(type(number) is int for number in (*self.token_widths, *numbers)):
            raise MegaMoeConfigError(f"a tactic holds a tuple of integers and integers, got {self!r}")

    def to_json(self) -> dict[str, Any]:
        """JSON form: every field by name."""
        return {**asdict(self), "token_widths": list(self.token_widths)}

    @classmethod
    def from_json(cls, value: object) -> Tactic:
        """Inverse of `to_json`.

        Raises:
            MegaMoeConfigError: Not an object with exactly this version's fields, or a field of another type.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise MegaMoeConfigError(f"a tactic is an object with the fields {sorted(names)}, got {value!r}")
        widths = value["token_widths"]
        return cls(**{**value, "token_widths": tuple(widths) if isinstance(widths, list) else widths})


@dataclass(frozen=True, slots=True)
class TacticSpace:
    """What one kernel family offers for one layer. Pure functions, the same on all ranks.

    Attributes:
        kernel: Name of the kernel family whose words tactics use, e.g. `sm90`.
        why_illegal: None where a tactic can run a bucket, else the broken rule. THE legality predicate.
        heuristic: The tactic of a bucket without tuning.
        candidates: Tactics of a bucket worth measuring; illegal ones are left out by `legal_candidates`.
    """

    kernel: str
    why_illegal: Callable[[Tactic, int], str | None]
    heuristic: Callable[[int], Tactic]
    candidates: Callable[[int], Sequence[Tactic]]

    def resolve(self, tactic: Tactic | int, bucket: int) -> Tactic:
        """A legal tactic from a request: -1 is the heuristic's.

        Raises:
            MegaMoeConfigError: An illegal tactic, or an integer other than -1; names the rule and the bucket.
        """
        if isinstance(tactic, int):
            if tactic != DEFAULT_TACTIC:
                raise MegaMoeConfigError(
                    f"tactic {tactic} is unknown; allowed: a Tactic, or {DEFAULT_TACTIC} (default)"
                )
            tactic = self.heuristic(bucket)
        reason = self.why_illegal(tactic, bucket)
        if reason is not None:
            raise MegaMoeConfigError(f"{tactic} cannot run bucket {bucket} of kernel '{self.kernel}': {reason}")
        return tactic

    def legal_candidates(self, bucket: int) -> list[Tactic]:
        """The heuristic's tactic first, then every other legal candidate once, in the kernel family's order."""
        first = self.resolve(DEFAULT_TACTIC, bucket)
        legal = (tactic for tactic in self.candidates(bucket) if self.why_illegal(tactic, bucket) is None)
        return list(dict.fromkeys((first, *legal)))
