# SPDX-License-Identifier: Apache-2.0
"""The roofline's terms against numbers worked out by hand, and against a table of floors for every preset."""

from __future__ import annotations

import pytest
import torch

from microbench.peaks import Peaks, find_peaks
from microbench.roofline import (
    Floor,
    Traffic,
    Work,
    combine_row_bytes,
    dispatch_row_bytes,
    expected_traffic,
    expert_bytes,
    floor_of,
    measured_traffic,
    rank_work,
    route_flops,
)
from microbench.routing import Load, RoutingName, by_tokens, count_routes, route
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.presets import PRESETS

NVFP4, BF16 = ActivationMode.NVFP4, ActivationMode.BF16

# What the table below was computed with: copy bandwidth, not read bandwidth.
TABLE_PEAKS = Peaks("table", 4.3e12, {NVFP4: 790e12}, 450e9, "table")

# preset, T: routes, touched experts, weight MB, GFLOP, dispatch MB, combine MB bf16/fp8/fp4, us: HBM, MMA, link
# bf16/fp8/fp4, floor with bf16 wire. EP 8, random routing. Numbers as printed: each is right to half its last digit.
TABLE = """
deepseek-v3 1        8 7.2 178 0.70 0.03 0.10 0.05 0.03 41.4 0.9 0.3 0.2 0.1 41.4
deepseek-v3 8        64 27.8 689 5.64 0.23 0.80 0.41 0.25 160 7.1 2.3 1.4 1.1 160
deepseek-v3 256      2048 32.0 793 180.39 7.23 25.69 13.25 8.03 184 228 73.1 45.5 33.9 228
deepseek-v3 8192     65536 32.0 793 5772.44 231.21 822.08 423.89 256.90 184 7307 2341 1456 1085 7307
deepseek-v4-pro 1    6 5.7 211 0.79 0.02 0.08 0.04 0.02 49.1 1.0 0.2 0.1 0.1 49.1
deepseek-v4-pro 32   192 47.1 1752 25.37 0.68 2.41 1.24 0.75 407 32.1 6.9 4.3 3.2 407
deepseek-v4-pro 64   384 48.0 1783 50.73 1.35 4.82 2.48 1.51 415 64.2 13.7 8.5 6.4 415
deepseek-v4-pro 8192 49152 48.0 1784 6493.99 173.41 616.56 317.92 192.68 415 8220 1755 1092 814 8220
deepseek-v4-flash 8  48 25.0 354 2.42 0.10 0.34 0.18 0.11 82.3 3.1 1.0 0.6 0.5 82.3
deepseek-v4-flash 256 1536 32.0 453 77.31 3.10 11.01 5.68 3.44 105 97.9 31.3 19.5 14.5 105
kimi-k2 8            64 35.5 880 5.64 0.23 0.80 0.41 0.25 205 7.1 2.3 1.4 1.1 205
kimi-k2 8192         65536 48.0 1189 5772.44 231.21 822.08 423.89 256.90 277 7307 2341 1456 1085 7307
qwen3-235b 1         8 6.5 69 0.30 0.02 0.06 0.03 0.02 15.9 0.4 0.2 0.1 0.1 15.9
qwen3-235b 128       1024 16.0 170 38.65 2.06 7.34 3.78 2.29 39.5 48.9 20.9 13.0 9.7 48.9
qwen3-235b 8192      65536 16.0 170 2473.90 132.12 469.76 242.22 146.80 39.5 3132 1338 832 620 3132
gpt-oss-120b 1       4 3.6 50 0.20 0.01 0.02 0.01 0.01 11.7 0.3 0.1 0.0 0.0 11.7
gpt-oss-120b 128     512 16.0 224 25.48 0.73 2.58 1.33 0.81 52.1 32.3 7.3 4.6 3.4 52.1
gpt-oss-120b 8192    32768 16.0 224 1630.75 46.45 165.15 85.33 51.84 52.1 2064 470 293 218 2064
"""


def agrees(printed: str, value: float) -> bool:
    """Whether `value` rounds to the printed number, with 1 % of the last digit for ties."""
    digits = len(printed.split(".")[1]) if "." in printed else 0
    return abs(float(printed) - value) <= 0.51 * 10**-digits


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: "-".join(line.split()[:2]))
def test_expected_floor_preset_matches_table(line: str) -> None:
    name, tokens, routes, touched, weight_mb, gflop, dispatch_mb, *rest = line.split()
    combine_mb, (hbm_us, tensor_us, *link_us, sol_us) = rest[:3], rest[3:]
    shape = PRESETS[name]
    traffic = expected_traffic(int(tokens), num_experts=shape.num_experts, top_k=shape.top_k, ep_size=8)
    seen = {"routes": (routes, traffic.routes_received), "touched": (touched, traffic.experts_touched)}
    dispatch_bytes = traffic.routes_sent * dispatch_row_bytes(shape.hidden_size, NVFP4)
    seen["dispatch MB"] = (dispatch_mb, dispatch_bytes / 1e6)
    for index, combine_format in enumerate(CombineFormat):
        work = rank_work(
            traffic,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            combine_format=combine_format,
            activations=NVFP4,
        )
        floor = floor_of(work, TABLE_PEAKS, NVFP4)
        assert floor is not None
        returned = traffic.rows_returned * combine_row_bytes(shape.hidden_size, combine_format)
        seen[f"combine MB {combine_format.value}"] = (combine_mb[index], returned / 1e6)
        seen[f"link us {combine_format.value}"] = (link_us[index], floor.nvlink_us)
        seen["weight MB"], seen["GFLOP"] = (weight_mb, work.hbm_bytes / 1e6), (gflop, work.flops / 1e9)
        seen["hbm us"], seen["tensor us"] = (hbm_us, floor.hbm_us), (tensor_us, floor.tensor_us)
        if combine_format is CombineFormat.BF16:
            seen["sol us"] = (sol_us, floor.sol_us)
    assert {what: pair for what, pair in seen.items() if not agrees(*pair)} == {}


def test_terms_deepseek_v4_pro_match_hand_computation() -> None:
    # 3 matrices of 7168 * 3072 = 22,020,096 values
    assert expert_bytes(7168, 3072) == 3 * 22_020_096 * 0.5625 == 37_158_912
    assert route_flops(7168, 3072) == 6 * 22_020_096 == 132_120_576
    assert dispatch_row_bytes(7168, NVFP4) == 3584 + 448
    assert dispatch_row_bytes(7168, BF16) == 14336
    # fp8: 7168 codes and 224 scales; fp4: 3584 bytes and 448 amax of 2 bytes
    assert [combine_row_bytes(7168, f) for f in CombineFormat] == [14336, 7168 + 224, 3584 + 896]
    # 2880 / 32 = 90 scale bytes are padded to 96, 2880 / 8 = 360 to 368
    assert [combine_row_bytes(2880, f) for f in CombineFormat] == [5760, 2880 + 96, 1440 + 368]


@pytest.mark.parametrize(("rows", "floor_ms"), [(1, 0.399), (16, 0.399), (64, 0.514), (256, 2.06), (1024, 8.22)])
def test_floor_v4_pro_share_on_h200_matches_stated_goal_floors(rows: int, floor_ms: float) -> None:
    """One rank's share: 48 experts, all touched, nothing on the link."""
    traffic = Traffic(routes_received=48 * rows, experts_touched=48, routes_sent=0, rows_returned=0)
    peaks = find_peaks("NVIDIA H200")
    assert peaks is not None
    for mode in (NVFP4, BF16):  # both run on 16-bit tensor cores there
        work = rank_work(
            traffic, hidden_size=7168, intermediate_size=3072, combine_format=CombineFormat.BF16, activations=mode
        )
        floor = floor_of(work, peaks, mode)
        assert floor is not None
        assert floor.sol_us / 1000 == pytest.approx(floor_ms, rel=0.003)  # stated to three digits
        assert floor.bound == ("hbm" if rows <= 16 else "tensor")


def test_measured_traffic_two_ranks_counts_by_hand() -> None:
    # rows: source rank, columns: experts 0, 1 (rank 0) and 2, 3 (rank 1)
    load = Load(torch.tensor([[3, 0, 2, 0], [1, 0, 4, 5]]))
    assert measured_traffic(load) == [
        Traffic(routes_received=4, experts_touched=1, routes_sent=2, rows_returned=1),
        Traffic(routes_received=11, experts_touched=2, routes_sent=1, rows_returned=2),
    ]


def test_measured_traffic_random_routing_agrees_with_expectation() -> None:
    workload = by_tokens(RoutingName.RANDOM, 256, num_experts=128, top_k=8, ep_size=8, seed=3)
    sent = torch.stack([count_routes(route(workload, rank).topk_ids, 128) for rank in range(8)])
    expected = expected_traffic(256, num_experts=128, top_k=8, ep_size=8)
    for seen in measured_traffic(Load(sent)):
        # 2048 routes on average, binomial: four standard deviations are 9 %
        assert seen.routes_received == pytest.approx(expected.routes_received, rel=0.09)
        assert seen.routes_sent == pytest.approx(expected.routes_sent, rel=0.09)
        assert seen.experts_touched == pytest.approx(expected.experts_touched, abs=0.1)


def test_floor_bound_names_the_highest_term() -> None:
    assert Floor(3.0, 2.0, 1.0).bound == "hbm"
    assert Floor(1.0, 2.0, 1.0).bound == "tensor"
    assert Floor(1.0, 2.0, 3.0).bound == "nvlink"
    assert Floor(1.0, 2.0, 3.0).sol_us == 3.0


@pytest.mark.parametrize("name", [None, "", "NVIDIA H100 80GB HBM3", "AMD EPYC", "NVIDIA B2000 Toy", "XH200"])
def test_find_peaks_unknown_device_is_none(name: str | None) -> None:
    assert find_peaks(name) is None


def test_find_peaks_h200_is_the_measured_one() -> None:
    peaks = find_peaks("NVIDIA H200")
    assert peaks is not None
    assert (peaks.hbm_bytes_per_s, peaks.mma_flops_per_s[BF16], peaks.link_bytes_per_s) == (4.47e12, 790e12, 450e9)


def test_floor_activation_mode_without_a_rate_is_none() -> None:
    blackwell = find_peaks("NVIDIA B200")
    assert blackwell is not None
    work = Work(hbm_bytes=8e6, flops=9e9, link_bytes=0)
    assert floor_of(work, blackwell, BF16) is None
    assert floor_of(work, blackwell, NVFP4) == Floor(pytest.approx(1.0), pytest.approx(1.0), 0.0)
