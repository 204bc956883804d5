# SPDX-License-Identifier: Apache-2.0
"""Decode-step blocks against plain Python oracles with host branches, and the toy decoder as two captured regions."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError, MegaMoeStateError
from trtllm_megamoe.graph import Region, selfcheck
from trtllm_megamoe.graph.blocks import (
    Compressor,
    DecodeIO,
    Sampler,
    TopKSelector,
    counter_uniform,
    doubly_stochastic,
    gather_rows,
    remap_to_local,
    route_top_k,
)
from trtllm_megamoe.graph.dynamic.backends import RehearsalBackend
from trtllm_megamoe.graph.layercheck import check_layers, layer_step
from trtllm_megamoe.graph.region import BucketedRegions
from trtllm_megamoe.graph.static.findings import Level
from trtllm_megamoe.graph.static.scan import scan
from trtllm_megamoe.graph.toy_decoder import RegionDecoder, ToyDecoder, ToyShape

CPU = torch.device("cpu")
I32_MAX = 2**31 - 1


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- compressor ------------------------------------------------------------------------------------------------------


def _pooled(window: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """Softmax-weighted mean of one window in float64, token by token."""
    top = max(gate for _, gate in window)
    weights = [math.exp(gate - top) for _, gate in window]
    total = sum(weights)
    return sum((token.double() * (w / total) for (token, _), w in zip(window, weights, strict=True)), torch.zeros(()))


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_compressor_emits_each_window_once_at_its_last_token(ratio: int) -> None:
    rows, width, slots, steps = 3, 5, 4, 2 * ratio + 3
    generator = _generator(ratio)
    compressor = Compressor(rows, ratio, width, slots, CPU)
    compressor.entries.fill_(float("nan"))  # what was not emitted must not look like an entry
    starts = [0, 0, -1]  # the last row stays idle
    windows: list[list[list[tuple[torch.Tensor, float]]]] = [[[]] for _ in range(rows)]
    for step in range(steps):
        # Heavy-tailed tokens and gates: a wrong weight or a stale token shows.
        values = torch.randn(rows, width, generator=generator).exp() * torch.randn(rows, 1, generator=generator)
        gates = 3 * torch.randn(rows, generator=generator)
        positions = torch.tensor([start + step if start >= 0 else -1 for start in starts])
        if step < ratio // 2:
            positions[1] = -1  # the second row joins later
        else:
            positions[1] = step - ratio // 2
        compressor.step(values, gates, positions)
        for row in range(rows):
            if positions[row] >= 0:
                if len(windows[row][-1]) == ratio:
                    windows[row].append([])
                windows[row][-1].append((values[row].clone(), float(gates[row])))
        complete = [min(sum(len(w) == ratio for w in windows[row]), slots) for row in range(rows)]
        assert compressor.num_entries(positions).tolist()[:1] == complete[:1]
        for row in range(rows):
            for slot in range(slots):
                entry = compressor.entries[row, slot]
                if slot < complete[row]:
                    # float32 softmax and sum of `ratio` terms against float64
                    torch.testing.assert_close(entry.double(), _pooled(windows[row][slot]), rtol=1e-5, atol=1e-5)
                else:
                    assert entry.isnan().all()


def test_compressor_windows_beyond_the_last_slot_leave_earlier_entries_alone() -> None:
    compressor = Compressor(1, 2, 1, 2, CPU)
    for position in range(12):
        compressor.step(torch.full((1, 1), float(position)), torch.zeros(1), torch.tensor([position]))
    assert compressor.entries[0, :, 0].tolist() == [0.5, 2.5]
    assert compressor.num_entries(torch.tensor([11, -1])).tolist() == [2, 0]


def test_compressor_idle_row_changes_nothing_that_is_read() -> None:
    compressor = Compressor(2, 4, 3, 2, CPU)
    for position in range(3):
        compressor.step(torch.ones(2, 3), torch.zeros(2), torch.tensor([position, position]))
    before = [t.clone() for t in (compressor.ring, compressor.gates, compressor.entries)]
    compressor.step(torch.full((2, 3), float("inf")), torch.full((2,), float("inf")), torch.tensor([-1, -1]))
    for old, new in zip(before, (compressor.ring, compressor.gates, compressor.entries), strict=True):
        assert torch.equal(old, new)


def test_compressor_sizes_must_be_positive() -> None:
    with pytest.raises(MegaMoeConfigError, match="ratio=0"):
        Compressor(1, 0, 1, 1, CPU)


# --- selection, routing ----------------------------------------------------------------------------------------------


def test_top_k_selector_is_always_k_wide_and_never_names_missing_columns() -> None:
    scores = torch.randn(5, 7, generator=_generator()) * 100
    num_valid = torch.tensor([0, 1, 3, 7, 2])
    chosen = TopKSelector(7, 3, CPU)(scores, num_valid)
    for row, count in enumerate(num_valid.tolist()):
        best = sorted(range(count), key=lambda c, row=row: -float(scores[row, c]))[:3]
        assert chosen[row].tolist() == best + [-1] * (3 - len(best))
    assert TopKSelector(2, 9, CPU)(scores[:, :2], num_valid.clamp(max=2)).shape == (5, 2)


def test_gather_rows_masks_every_index_outside() -> None:
    entries = torch.arange(24.0).view(2, 4, 3) + 1
    entries[:, 0] = float("nan")  # what masked indices are redirected to must not leak
    picked, valid = gather_rows(entries, torch.tensor([[1, -1, 4], [3, I32_MAX, -5]]))
    assert valid.tolist() == [[True, False, False], [True, False, False]]
    assert torch.equal(picked[:, 0], torch.stack((entries[0, 1], entries[1, 3])))
    assert torch.equal(picked[:, 1:], torch.zeros(2, 2, 3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_remap_to_local_masks_foreign_padding_and_garbage_ids(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 3], [4, 7], [-1, 8], [I32_MAX, -(2**31)]], dtype=dtype)
    local = remap_to_local(ids, 4, 4)
    assert local.dtype is dtype
    assert local.tolist() == [[-1, -1], [0, 3], [-1, -1], [-1, -1]]
    every = torch.stack([remap_to_local(ids, first, 2) for first in range(0, 8, 2)])
    assert (every >= 0).sum(0).tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]], "each real id has exactly one home"


def test_route_top_k_weights_sum_to_one_and_idle_rows_are_masked() -> None:
    logits = torch.randn(4, 6, generator=_generator()) * 5
    ids, weights = route_top_k(logits, 3, torch.tensor([True, False, True, True]))
    assert ids[1].tolist() == [-1, -1, -1] and weights[1].tolist() == [0, 0, 0]
    for row in (0, 2, 3):
        assert ids[row].tolist() == sorted(range(6), key=lambda e, row=row: -float(logits[row, e]))[:3]
        expected = torch.softmax(logits[row].double()[ids[row]], 0)
        torch.testing.assert_close(weights[row].double(), expected, rtol=1e-6, atol=1e-6)  # float32 softmax of 3 terms


# --- normalisation ---------------------------------------------------------------------------------------------------


def test_doubly_stochastic_rows_and_columns_sum_to_one() -> None:
    logits = torch.randn(6, 4, 4, generator=_generator()) * 2
    matrix = doubly_stochastic(logits, iterations=100)
    # float32 rounding and the epsilon of 1e-6 for columns; rows also carry what is left of convergence
    torch.testing.assert_close(matrix.sum(-2), torch.ones(6, 4), rtol=0, atol=5e-6)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(6, 4), rtol=0, atol=1e-3)
    assert (matrix >= 0).all()


def test_doubly_stochastic_fixed_iterations_match_a_scalar_loop() -> None:
    logits = torch.randn(1, 3, 3, generator=_generator(3))
    top = float(logits.max())
    m = [[math.exp(float(logits[0, i, j]) - top) for j in range(3)] for i in range(3)]
    for _ in range(5):
        m = [[v / (sum(row) + 1e-6) for v in row] for row in m]
        sums = [sum(m[i][j] for i in range(3)) + 1e-6 for j in range(3)]
        m = [[m[i][j] / sums[j] for j in range(3)] for i in range(3)]
    # ten float32 divisions in a row against float64
    torch.testing.assert_close(doubly_stochastic(logits, 5)[0].double(), torch.tensor(m).double(), rtol=1e-5, atol=1e-6)


# --- sampler ---------------------------------------------------------------------------------------------------------


def _uniform_in_python(seed: int, position: int, column: int) -> float:
    def mix(word: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = ((word ^ (word >> shift)) * factor) % 2**32
        return word ^ (word >> 16)

    key = mix((mix(seed % 2**32) + position * 0x9E3779B9) % 2**32)
    return ((mix((key + column * 0x9E3779B9) % 2**32) >> 9) * 2 + 1) / 2**24


def test_counter_uniform_equals_integer_arithmetic_and_stays_inside() -> None:
    seeds, positions = torch.tensor([0, 1, 2**40 + 7, -3]), torch.tensor([0, 5, 131071, -1])
    noise = counter_uniform(seeds, positions, torch.arange(50))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        assert noise[row].tolist() == [_uniform_in_python(seed, position, c) for c in range(50)]
    many = counter_uniform(torch.arange(16), torch.arange(16), torch.arange(4096))
    assert float(many.min()) > 0 and float(many.max()) < 1
    # 65536 uniform numbers: standard error of the mean 0.0011, of a tenth's share 0.0012; five of them allowed
    assert abs(float(many.mean()) - 0.5) < 0.006
    shares = torch.histc(many, bins=10, min=0, max=1) / many.numel()
    assert float((shares - 0.1).abs().max()) < 0.006
    assert abs(float(torch.corrcoef(torch.stack((many[:-1].flatten(), many[1:].flatten())))[0, 1])) < 0.02


def test_sampler_greedy_rows_ignore_noise_and_random_rows_follow_the_distribution() -> None:
    rows = 4000
    sampler = Sampler(rows, 3, 2, CPU)
    sampler.temperature[1:] = 0.5
    sampler.seeds.copy_(torch.arange(rows))
    logits = torch.tensor([0.3, 0.0, -0.4]).expand(rows, 3)
    tokens = sampler(logits, torch.zeros(rows, dtype=torch.int64))
    assert int(tokens[0]) == 0
    shares = torch.bincount(tokens[1:], minlength=3) / (rows - 1)
    expected = torch.softmax(torch.tensor([0.3, 0.0, -0.4]) / 0.5, 0)
    # binomial standard error with 4000 draws is at most 0.008; four of them allowed
    assert float((shares - expected).abs().max()) < 0.032
    again = Sampler(rows, 3, 2, CPU)
    again.temperature.copy_(sampler.temperature)
    again.seeds.copy_(sampler.seeds)
    assert torch.equal(again(logits, torch.zeros(rows, dtype=torch.int64)), tokens)
    assert not torch.equal(again(logits, torch.ones(rows, dtype=torch.int64)), tokens)


def test_sampler_penalty_looks_at_the_last_window_of_each_row_only() -> None:
    sampler = Sampler(2, 4, 2, CPU)
    sampler.penalty[0] = 4.0
    logits = torch.tensor([[8.0, 4.0, 3.0, 2.5], [8.0, 4.0, 3.0, 2.5]])
    first = [sampler(logits, torch.tensor([p, p]))[0].item() for p in range(4)]
    # 8 is seen: 2; then 4 is seen: 1; best unseen 3 (token 2); then token 0 has left the window of 2 and wins again
    assert first == [0, 1, 2, 0]
    assert sampler.recent[1].tolist() == [0, 0]
    before = sampler.recent.clone()
    sampler(logits, torch.tensor([-1, -1]))
    assert torch.equal(sampler.recent, before), "idle rows remember nothing"


def test_sampler_penalty_of_negative_logits_makes_them_smaller() -> None:
    sampler = Sampler(1, 2, 1, CPU)
    sampler.penalty[0] = 3.0
    logits = torch.tensor([[-1.0, -2.0]])
    assert [sampler(logits, torch.tensor([p])).item() for p in range(2)] == [0, 1]


# --- static inputs ---------------------------------------------------------------------------------------------------


def test_decode_io_upload_advance_and_idle_rows() -> None:
    io = DecodeIO(3, CPU)
    addresses = [t.data_ptr() for t in io.state()]
    io.upload([7, 9], [4, 0])
    assert io.tokens.tolist() == [7, 9, 0] and io.positions.tolist() == [4, 0, -1]
    io.advance(torch.tensor([1, 2, 3]))
    assert io.tokens.tolist() == [1, 2, 0] and io.positions.tolist() == [5, 1, -1]
    io.upload([], [])
    assert io.positions.tolist() == [-1, -1, -1]
    assert [t.data_ptr() for t in io.state()] == addresses
    with pytest.raises(MegaMoeCapacityError, match="4 rows exceed the bucket of 3"):
        io.upload([1] * 4, [0] * 4)
    with pytest.raises(MegaMoeConfigError, match="2 tokens and 1 positions"):
        io.upload([1, 2], [0])


# --- regions ---------------------------------------------------------------------------------------------------------


def test_region_is_captured_once_and_runs_eagerly_before() -> None:
    x = torch.ones(2)
    region = Region(lambda: x * 2, CPU, backend=RehearsalBackend(), name="double")
    assert not region.is_captured and region.run().tolist() == [2, 2]
    region.capture()
    x.fill_(3)
    first = region.run()
    x.fill_(4)
    assert region.run() is first and first.tolist() == [8, 8]
    with pytest.raises(MegaMoeStateError, match="'double' is captured already"):
        region.capture()
    plain = Region(lambda: x * 2, CPU)
    plain.capture()
    assert not plain.is_captured and plain.run().tolist() == [8, 8]


def test_buckets_select_smallest_fit_and_refuse_more() -> None:
    regions = BucketedRegions([8, 1, 4], lambda bucket: Region(lambda: bucket, CPU))
    assert regions.buckets == (1, 4, 8)
    assert [regions.select(rows) for rows in (0, 1, 2, 4, 5, 8)] == [1, 1, 4, 4, 8, 8]
    assert regions.region(4).run() == 4
    with pytest.raises(MegaMoeCapacityError, match="9 rows exceed the largest bucket, 8"):
        regions.select(9)
    for bad in ([], [0, 2], [2, 2]):
        with pytest.raises(MegaMoeConfigError, match="distinct positive"):
            BucketedRegions(bad, lambda bucket: Region(lambda: bucket, CPU))


@pytest.mark.parametrize("backends", [None, RehearsalBackend], ids=["plain", "emulated"])
def test_bucketed_regions_share_scratch_and_replay_in_any_order(backends) -> None:
    assert selfcheck.check_buckets(CPU, backends)["passed"]


# --- the worked decode step ------------------------------------------------------------------------------------------


def test_toy_decoder_two_regions_are_bit_equal_to_eager_over_200_steps() -> None:
    result = selfcheck.check_decode(CPU, 200, RehearsalBackend)
    assert result["passed"], result
    assert result["captured"] == [True, True] and result["compressed_entries"] == [50, 1]


def test_toy_decoder_regions_as_plain_functions_are_bit_equal_too() -> None:
    assert selfcheck.check_decode(CPU, 60)["passed"]


def test_decode_check_notices_a_compressor_with_a_host_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classical fault: the boundary is decided in Python, so the graph keeps the decision of the capture."""
    honest = Compressor.step
    counts: dict[int, int] = {}

    def step(self: Compressor, values: torch.Tensor, gates: torch.Tensor, positions: torch.Tensor) -> None:
        count = counts[id(self)] = counts.get(id(self), -1) + 1
        spill = torch.where(positions >= 0, positions, -1)
        honest(self, values, gates, spill if count % self.ratio != 1 else torch.full_like(positions, -1))

    monkeypatch.setattr(Compressor, "step", step)
    assert not selfcheck.check_decode(CPU, 20, RehearsalBackend)["passed"]


def test_toy_decoder_capture_restores_the_state_it_ran_over() -> None:
    decoder = ToyDecoder(ToyShape(), CPU)
    decoder.io.upload([3], [0])
    for length in range(1, 6):
        decoder.step(length)
    before = [t.clone() for t in decoder.state()]
    RegionDecoder(decoder, RehearsalBackend).capture()
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.state(), strict=True))


class _DenseLayer:
    """Has a MoE layer's interface; `host_read` plants the classical fault."""

    def __init__(self, host_read: bool = False) -> None:
        self.config = MegaMoeConfig.create(
            hidden_size=32, intermediate_size=32, num_experts=6, top_k=2, max_tokens_per_rank=8, engine="cpu"
        )
        self.weight = torch.randn(6, 32, 32, generator=_generator(), dtype=torch.bfloat16)
        self.host_read = host_read

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens_over_ranks: int
    ) -> torch.Tensor:
        if self.host_read:
            topk_weights = topk_weights * int((topk_ids >= 0).all())  # graph-ok: the planted fault
        routes = torch.einsum("th,tkhi->tki", x, self.weight[topk_ids.clamp(min=0)])
        return (routes * (topk_weights * (topk_ids >= 0)).unsqueeze(-1)).sum(1).to(torch.bfloat16)


def test_check_layers_passes_clean_layers_and_lists_every_faulty_step() -> None:
    clean = check_layers([_DenseLayer(), _DenseLayer()], [1, 8], CPU)
    assert clean["passed"], clean["failures"]
    assert clean["steps"] == [f"layers: {n}, tokens: {t}" for t in (1, 8) for n in (1, 2)]
    faulty = check_layers([_DenseLayer(), _DenseLayer(host_read=True)], [8], CPU)
    assert len(faulty["failures"]) == 2 and all("in forward" in text for text in faulty["failures"])
    assert check_layers([_DenseLayer()], [8], CPU, [counter_uniform])["passed"]
    with pytest.raises(MegaMoeConfigError, match="no layers"):
        layer_step([], 8, CPU)


def test_own_layer_forward_has_no_static_errors() -> None:
    """The layer's hot path, its own engine on CUDA included; the CPU engine is never captured."""
    files = ["layer.py", "buckets.py", "regions.py", "engines/base.py", "engines/cuda"]
    forwards = ["layer:MegaMoELayer.forward", "engines.cuda.engine:CudaEngine.forward"]
    report = scan([f"trtllm_megamoe/{f}" for f in files], hot=[f"trtllm_megamoe.{f}" for f in forwards])
    assert report.at_least(Level.ERROR) == ()
    assert "trtllm_megamoe.layer:MegaMoELayer._validate_inputs" in report.functions


def test_own_decode_step_has_no_open_static_findings() -> None:
    """Blocks and toy decoder are held to the rules they teach; allocations from the graph's pool are warnings only."""
    report = scan(
        ["trtllm_megamoe/graph/blocks", "trtllm_megamoe/graph/toy_decoder.py"],
        hot=[f"trtllm_megamoe.graph.toy_decoder:ToyDecoder.{r}" for r in ("before_attention", "after_attention")],
    )
    assert report.at_least(Level.ERROR) == ()
    looked_at = {name.split(":")[1] for name in report.functions}
    assert {"Compressor.step", "TopKSelector.__call__", "gather_rows", "doubly_stochastic", "route_top_k"} <= looked_at
    assert {"Sampler.__call__", "counter_uniform", "DecodeIO.advance"} <= looked_at
