# SPDX-License-Identifier: Apache-2.0
"""Which region of the workspace each launch argument is. Pure; used by the engine and the kernel's own GPU checks."""

from __future__ import annotations

from trtllm_megamoe.regions import PoolLayout, RegionTable

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

_ATOM_REGIONS = {"pool_scales": "pool_scales", "h_scales": "fc1_scales"}
"""The same, where token rows are packed NVFP4."""


def local_regions(table: RegionTable) -> dict[str, str]:
    """`LOCAL_REGIONS` of the table's pool layout."""
    everything = {**LOCAL_REGIONS, **_ATOM_REGIONS}
    present = {region.name for region in table.regions("local")}
    return {argument: region for argument, region in everything.items() if region in present}


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


WEIGHTS_OF: dict[PoolLayout, dict[str, str]] = {
    "f16": {"w1": "fc1_records", "w2": "fc2_records"},
    "sm_100": {
        "w1_codes": "fc1_codes",
        "w1_scales": "fc1_scales",
        "w2_codes": "fc2_codes",
        "w2_scales": "fc2_scales",
    },
}
"""Launch argument -> packed weight buffer."""


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
