# SPDX-License-Identifier: Apache-2.0
"""One launch of a compiled kernel: its arguments by name, in the order the object expects. No DSL, no layout knowledge.

The caller owns all memory and passes addresses; workspace addresses are base + offset of the region table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

CALL = ("scales", "x", "ids", "route_weights", "num_tokens", "y")
ROUTE_FACTS = ("row_weight", "row_meta", "route_rows")
WORKSPACE = (
    "counters",
    "ready",
    "pool_ready",
    "epoch",
    "expected_returns",
    "error",
    "timeout_ns",
    "peers",
    "abort_at",
    "header_at",
    "cells_at",
    "returns_at",
    "index_at",
    "payload_at",
    "payload_scales_at",
    "route_weights_at",
    "results_at",
    "result_scales_at",
)
"""64-bit arguments of every kernel: addresses, the timeout in nanoseconds, and `*_at`: a shared region's offset behind
a rank's base in the table `peers`; for one rank they are addresses and the table says 0 or is not read."""

ADDRESSES = (
    *("w1", "w2", *CALL),
    *("pool", "row_scale", *ROUTE_FACTS, "h", *WORKSPACE),
    *("rank_operands", "local_stride", "timestamps"),
)
"""64-bit arguments of the Hopper kernels (operands in `sm90/kernel.py`). `timestamps`: the event buffer (`timeline.py`)
of a kernel compiled with it."""

LAYOUT_NUMBERS = (
    "pool_rows",
    "ready_words",
    "pool_ready_words",
    "index_row_words",
    "payload_row_bytes",
    "payload_scale_row_bytes",
    "ids_are_64",
    "fault_step",
    "dry",
    "lag",
    "rank",
)
"""32-bit arguments of every kernel: pool capacity (on Blackwell a multiple of 128); ready and pool-ready counters per
bank; routes of one source (T * K at the cap); strides of the staged rows; 1 for int64 ids; the step before which this
rank stops (0; a test's way to a timeout, see `common/sites.py`); 1 to load the code and do nothing; fc1 lag (in tiles
of one CTA, also where pairs run); this rank (the first one of an all-ranks launch)."""

NUMBERS = (*LAYOUT_NUMBERS, "ctas_per_rank", "grid")
"""32-bit arguments of the Hopper kernels: these, and the CTAs of a rank and of the launch."""

RANK_OPERANDS = ("x", "ids", "route_weights", "num_tokens", "y", "w1", "w2", "scales")
"""Words of one rank's row in the table `rank_operands` of an all-ranks launch; padded to 8."""

ERROR_FIELDS = ("set", "rank", "site", "index", "epoch", "expected", "seen", "reserved")
"""u64 words of the error record (zero before the first launch); an all-ranks launch has one per rank."""


class Launch:
    """A compiled function and its fixed arguments; calling it with the rest puts one launch on the current stream.

    Graph-safe: no allocation, no synchronisation. The first call loads the GPU code, so warm up before capture.
    """

    def __init__(
        self,
        function: Callable[..., None],
        anchor: Any,
        fixed: Mapping[str, int],
        names: Sequence[str] = (*ADDRESSES, *NUMBERS),
    ) -> None:
        """`names`: the object's arguments in order; those of the Hopper kernels where nothing is said."""
        unknown = set(fixed) - set(names)
        if unknown:
            raise KeyError(f"unknown launch arguments {sorted(unknown)}")
        self._function = function
        self._anchor = anchor
        self._values = [fixed.get(name, 0) for name in names]
        self._index = {name: i for i, name in enumerate(names)}

    def __call__(self, **changing: int) -> None:
        """Launch on torch's current stream."""
        import tvm_ffi

        values = list(self._values)
        for name, value in changing.items():
            values[self._index[name]] = value
        with tvm_ffi.use_torch_stream():
            self._function(self._anchor, *values)
