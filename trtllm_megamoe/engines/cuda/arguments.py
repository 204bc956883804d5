# SPDX-License-Identifier: Apache-2.0
"""Which region of the workspace each launch argument is. Pure; used by the engine and the kernel's own GPU checks."""

from __future__ import annotations

from trtllm_megamoe.regions import RegionTable

LOCAL_REGIONS = {
    "pool": "pool",
    "row_scale": "pool_row_scale",
    "row_weight": "pool_weight",
    "row_meta": "pool_meta",
    "route_rows": "route_rows",
    "h": "fc1_out",
    "counters": "launch_counters",
    "ready": "fc1_ready",
    "pool_ready": "pool_ready",
    "epoch": "epoch",
    "expected_returns": "expected_returns",
}
"""Launch argument -> region of the local space; the argument is an address."""

SHARED_REGIONS = {
    "abort_at": "abort",
    "header_at": "header",
    "cells_at": "size_cells",
    "returns_at": "return_counters",
    "index_at": "index_rows",
    "payload_at": "payload",
    "payload_scales_at": "payload_scales",
    "route_weights_at": "route_weights",
    "results_at": "result_data",
    "result_scales_at": "result_scales",
}
"""Launch argument -> region of the shared space; the argument is an offset, for one rank an address."""


def layout_numbers(table: RegionTable) -> dict[str, int]:
    """Capacities and strides that a launch takes from the region table."""
    g = table.geometry
    return {
        "pool_rows": g.max_pool_rows,
        "ready_words": g.max_token_blocks,
        "pool_ready_words": table["pool_ready"].shape[1],
        "index_row_words": g.routes_per_rank,
        "payload_row_bytes": g.payload_row_bytes,
        "payload_scale_row_bytes": g.payload_scale_row_bytes,
    }
