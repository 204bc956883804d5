# SPDX-License-Identifier: Apache-2.0
"""One launch of a compiled kernel: its arguments by name, in the order the object expects. No DSL, no layout knowledge.

The caller owns all memory and passes addresses; workspace addresses are base + offset of the region table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ADDRESSES = (
    "w1",
    "w2",
    "scales",
    "x",
    "ids",
    "route_weights",
    "num_tokens",
    "y",
    "pool",
    "row_scale",
    "row_weight",
    "row_meta",
    "route_rows",
    "h",
    "results",
    "result_scales",
    "counters",
    "ready",
    "epoch",
    "error",
    "abort",
    "timeout_ns",
)
"""64-bit arguments: addresses (operands in `sm90/kernel.py`) and the timeout in nanoseconds."""

NUMBERS = ("pool_rows", "ready_words", "ids_are_64", "fault_ctas", "lag", "grid")
"""32-bit arguments: pool capacity, ready counters per bank, 1 for int64 ids, CTAs that never stage
(0; a test's way to a timeout), fc1 lag, CTAs."""

COUNTER_WORDS = 96
"""u32 words of the launch counters (zero before the first launch)."""

ERROR_FIELDS = ("set", "rank", "site", "index", "epoch", "expected", "seen", "reserved")
"""u64 words of the error record (zero before the first launch)."""


def ready_words(max_routes: int, num_local_experts: int) -> int:
    """fc1 output blocks of the narrowest token width under the worst routing: ready counters of one bank."""
    return -(-max_routes // 8) + min(num_local_experts, max_routes)


class Launch:
    """A compiled function and its fixed arguments; calling it with the rest puts one launch on the current stream.

    Graph-safe: no allocation, no synchronisation. The first call loads the GPU code, so warm up before capture.
    """

    def __init__(self, function: Callable[..., None], anchor: Any, fixed: Mapping[str, int]) -> None:
        unknown = set(fixed) - set(ADDRESSES) - set(NUMBERS)
        if unknown:
            raise KeyError(f"unknown launch arguments {sorted(unknown)}")
        self._function = function
        self._anchor = anchor
        self._values = [fixed.get(name, 0) for name in (*ADDRESSES, *NUMBERS)]
        self._index = {name: i for i, name in enumerate((*ADDRESSES, *NUMBERS))}

    def __call__(self, **changing: int) -> None:
        """Launch on torch's current stream."""
        import tvm_ffi

        values = list(self._values)
        for name, value in changing.items():
            values[self._index[name]] = value
        with tvm_ffi.use_torch_stream():
            self._function(self._anchor, *values)
