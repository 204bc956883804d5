# SPDX-License-Identifier: Apache-2.0
"""The region table: no overlap, no 32-bit assumption, room for the worst routing (pitfalls B01, B20)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.contract import judge
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.presets import PRESETS
from trtllm_megamoe.regions import REGION_ALIGN_BYTES, TOKEN_BLOCK_ROWS, Geometry, RegionTable, layout_digest


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    ep_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_experts = ep_size * draw(st.integers(1, 64))
    return Geometry(
        hidden_size=32 * draw(st.integers(1, 224)),
        intermediate_size=16 * draw(st.integers(1, 192)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(16, num_experts))),
        max_tokens_per_rank=draw(st.integers(1, 8192)),
        ep_size=ep_size,
        combine_format=draw(st.sampled_from(list(CombineFormat))),
        activations=draw(st.sampled_from(["auto", "nvfp4", "bf16"])),
        pool_layout=draw(st.sampled_from(["f16", "sm_100"])),
    )


@given(geometries())
def test_regions_any_geometry_never_overlap_and_stay_inside(geometry: Geometry) -> None:
    table = RegionTable(geometry)
    for space in ("shared", "local"):
        end = 0
        for region in table.regions(space):
            assert region.offset_bytes >= end
            if region.name != "payload_tags":
                assert region.offset_bytes % REGION_ALIGN_BYTES == 0
            end = region.end_bytes
        assert end <= table.total_bytes(space)


@given(geometries())
def test_payload_tags_lie_where_kernels_look_behind_both_banks_of_cells(geometry: Geometry) -> None:
    """A kernel gets one address for both and finds the tags 2 * 8 * E bytes behind it (`exchange.payload_tags`)."""
    table = RegionTable(geometry)
    cells, tags = table["size_cells"], table["payload_tags"]
    assert tags.offset_bytes == cells.offset_bytes + 2 * 8 * geometry.num_experts
    assert tags.num_bytes == 8 * geometry.ep_size and tags.zero_at_start


@given(geometries(), st.data())
def test_pool_any_routing_fits(geometry: Geometry, data: st.DataObject) -> None:
    """Counts of any routing, the most hostile ones included, fit the pool with every expert padded to a block.

    Blackwell kernels pad to as many rows as a scale atom has.
    """
    block = TOKEN_BLOCK_ROWS if geometry.pool_layout == "f16" else 128
    routes = geometry.ep_size * geometry.max_tokens_per_rank * geometry.top_k
    local = geometry.num_local_experts
    counts = [0] * local
    left = routes
    for expert in range(local):
        counts[expert] = data.draw(st.sampled_from([0, 1, min(left, block + 1), left // 2]), label="rows")
        counts[expert] = min(counts[expert], left)
        left -= counts[expert]
    counts[data.draw(st.integers(0, local - 1))] += left  # every route of every rank hits this rank
    assert sum(counts) == routes
    used = sum(-(-c // block) * block for c in counts)
    assert used <= geometry.max_pool_rows and geometry.max_pool_rows % block == 0


def test_pool_routes_repeating_one_expert_fit_when_experts_are_fewer_than_top_k() -> None:
    """A token may name an expert K times, so min(K, L) would be too few rows."""
    geometry = Geometry(64, 32, 8, 8, 100, 8, CombineFormat.BF16, "nvfp4")
    assert geometry.num_local_experts == 1
    assert geometry.max_pool_rows >= 8 * 100 * 8


def _sizes(ep_size: int, cap: int, fmt: str = "bf16") -> tuple[int, int]:
    shape = PRESETS["deepseek-v3"]
    table = RegionTable(
        Geometry(
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_experts,
            shape.top_k,
            cap,
            ep_size,
            CombineFormat(fmt),
            "nvfp4",
        )
    )
    return table.total_bytes("shared"), table.total_bytes("local")


def test_sizes_deepseek_v3_match_hand_computed_bytes() -> None:
    """Terms by hand for T=1024, K=8, R=8, H=7168."""
    shared, local = _sizes(8, 1024)
    results = 1024 * 8 * 14336
    payload = 1024 * 3584 + 1024 * 448
    index = 8 * 1024 * 8 * 4
    cells = 2 * 8 * 32 * 8
    weights = 1024 * 8 * 4
    assert shared == pytest.approx(results + payload + index + cells + weights, abs=10 * REGION_ALIGN_BYTES)
    rows = 8 * 1024 * 8 + 32 * 31
    ready = 2 * (8 * 1024 * 8 // 8 + 32) * 4  # two banks of counters, one per block of 8 routes
    route_rows = 1024 * 8 * 4
    pool_ready = 2 * (rows // 32) * 4
    pool = rows * (14336 + 4096 + 4 + 4 + 8)
    assert local == pytest.approx(pool + ready + pool_ready + route_rows, abs=12 * REGION_ALIGN_BYTES)


def test_sizes_of_packed_rows_match_hand_computed_bytes() -> None:
    """The Blackwell pool: half a byte a code, a byte of scale per 16 columns, in whole 128-row x 64-column atoms."""
    table = RegionTable(Geometry(416, 96, 16, 2, 10, 8, CombineFormat.BF16, "nvfp4", "sm_100"))
    rows = 512  # 160 routes and two experts with up to 127 rows of padding: 414, in whole atoms
    assert table.geometry.max_pool_rows == rows
    sizes = {name: table[name].num_bytes for name in ("pool", "pool_scales", "fc1_out", "fc1_scales", "pool_ready")}
    assert sizes == {
        "pool": rows * 208,
        "pool_scales": rows // 128 * 7 * 512,
        "fc1_out": rows * 48,
        "fc1_scales": rows // 128 * 2 * 512,
        "pool_ready": 2 * rows // 32 * 4,
    }
    assert "pool_row_scale" not in {region.name for region in table.regions()}


def test_layout_digest_tells_pool_layouts_apart() -> None:
    """Ranks with kernels of different architectures must not run one layer together."""
    one = Geometry(416, 96, 16, 2, 10, 8, CombineFormat.BF16, "nvfp4")
    assert layout_digest(RegionTable(one)) != layout_digest(RegionTable(replace(one, pool_layout="sm_100")))


def test_sizes_shared_bytes_do_not_grow_with_ep_size_beyond_index_and_cells() -> None:
    """B20: nothing is multiplied by the DP or EP size twice; results and payload depend on this rank's tokens alone."""
    one, _ = _sizes(1, 8192)
    eight, _ = _sizes(8, 8192)
    assert eight - one == pytest.approx(7 * 8192 * 8 * 4, abs=40_000)


def test_offsets_beyond_two_gib_are_exact_integers() -> None:
    table = RegionTable(Geometry(7168, 3072, 384, 6, 8192, 8, CombineFormat.BF16, "bf16"))
    last = table.regions("local")[-1]
    assert last.offset_bytes > 1 << 32
    assert last.end_bytes <= table.total_bytes("local")


def test_geometry_counts_that_do_not_fit_a_cell_are_refused_by_name() -> None:
    with pytest.raises(MegaMoeConfigError, match="does not fit a size cell"):
        RegionTable(Geometry(64, 32, 8, 16, 1 << 20, 1, CombineFormat.BF16, "nvfp4"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 12}, "not divisible by ep_size 8"),
        ({"hidden_size": 72}, "hidden_size 72"),
        ({"intermediate_size": 40}, "intermediate_size 40"),
        ({"top_k": 17}, "top_k 17"),
        ({"max_tokens_per_rank": 1 << 23}, "size cell"),
    ],
)
def test_judge_illegal_layer_names_the_number(changes: dict[str, int], words: str) -> None:
    fields = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 32, "top_k": 4, "max_tokens_per_rank": 8}
    verdict = judge(MegaMoeConfig.create(**(fields | changes)), 8)
    assert not verdict.is_eligible
    assert words in verdict.describe()


def test_config_missing_and_unknown_fields_are_named_together() -> None:
    with pytest.raises(MegaMoeConfigError) as caught:
        MegaMoeConfig.create(hidden_size=64, intermediate_size=0, num_experts=8, max_tokens_per_rank=8, topk=2)
    assert all(name in str(caught.value) for name in ("intermediate_size", "top_k", "topk"))
