# SPDX-License-Identifier: Apache-2.0
"""Rivals without a GPU: the weights they share, the check that lets nothing wrong be timed, reasons for every gap."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from microbench.check import Verdict
from microbench.rivals import base, catalog, unfused
from microbench.rivals.base import Mxfp4Matrix, Nvfp4Matrix, Rival, Rows, Weights
from microbench.rivals.humming_nvfp4 import HummingGrouped, HummingIndexed, blocks_by_expert
from microbench.rivals.row_kernels import swiglu, weighted_sum
from microbench.rivals.torch_grouped import TorchGrouped
from microbench.rivals.triton_mxfp4 import TritonMxfp4FourWarps
from trtllm_megamoe.comm import run_threads
from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment
from trtllm_megamoe.reference.codecs import nvfp4_decode, unpack_nibbles

CPU = torch.device("cpu")
COUNTS = (0, 5, 1, 9)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return base.make_weights(64, 32, 4, CPU)


class Loop(Rival):
    """An expert after the other in bf16: right."""

    name = "loop"
    distribution = "torch"

    @classmethod
    def why_not(cls) -> str | None:
        return None

    def __init__(self, weights: Weights, totals: Sequence[int]) -> None:
        self.weights, self.totals = weights, list(totals)

    def bind(self, rows: Rows) -> None:
        self.rows = rows

    def run(self) -> torch.Tensor:
        out = []
        for expert, x in enumerate(self.rows.x.split(self.rows.counts)):
            gate, up = (x @ self.gate_up(expert).to(torch.bfloat16).T).chunk(2, dim=1)
            hidden = torch.nn.functional.silu(gate) * up
            out.append(hidden @ self.weights.down.decode(expert).to(torch.bfloat16).T)
        return torch.cat(out)

    def gate_up(self, expert: int) -> torch.Tensor:
        return self.weights.gate_up.decode(expert)


class SwapsGateAndUp(Loop):
    name = "swaps"

    def gate_up(self, expert: int) -> torch.Tensor:
        return super().gate_up(expert).roll(self.weights.intermediate_size, dims=0)


class IgnoresGlobalScale(Loop):
    name = "ignores"

    def gate_up(self, expert: int) -> torch.Tensor:
        return super().gate_up(1)  # one expert's weights for all: what one scale for all would come to, and worse


class Raises(Loop):
    name = "raises"

    def run(self) -> torch.Tensor:
        raise RuntimeError("no such kernel")


class LeavesRows(Loop):
    name = "leaves rows"

    def run(self) -> torch.Tensor:
        out = super().run()
        out[-1] = float("nan")
        return out


class CannotBeBuilt(Loop):
    name = "cannot be built"

    def __init__(self, weights: Weights, totals: Sequence[int]) -> None:
        raise OSError("no compiler")


class Absent(Loop):
    name = "absent"

    @classmethod
    def why_not(cls) -> str | None:
        return "absent is not installed"


def measured(kinds: Sequence[type[Rival]], weight_sets: Sequence[Weights]) -> list[tuple[int, dict[str, Any]]]:
    def timer(index: int) -> catalog.Measure:
        def time(enqueue: Callable[[int], torch.Tensor]) -> dict[str, Any]:
            for call in range(len(weight_sets)):
                enqueue(call)
            return {"burst_ms": 1.0 + index}

        return time

    return list(catalog.measure_all(weight_sets, [COUNTS, (3, 0, 0, 0)], timer, kinds))


def test_weights_decode_as_the_reference_codec_and_fit_bf16(weights: Weights) -> None:
    for matrix in (weights.gate_up, weights.down):
        for expert in range(weights.num_experts):
            decoded = matrix.decode(expert)
            blocks = nvfp4_decode(unpack_nibbles(matrix.codes[expert]), matrix.block_scales[expert].view(torch.uint8))
            assert torch.equal(decoded.double(), blocks.double() * matrix.global_scales[expert].double())
            assert torch.equal(decoded.to(torch.bfloat16).float(), decoded), "rivals with bf16 weights get the same"
    assert len(set(weights.gate_up.global_scales.tolist())) > 1


def test_check_passes_a_right_rival_and_says_what_it_looked_at(weights: Weights) -> None:
    rows = base.make_rows(weights, COUNTS)
    rival = Loop(weights, [])
    rival.bind(rows)
    outcome = base.check(rival.run(), weights, rows)
    assert outcome.verdict is Verdict.VERIFIED
    assert outcome.rows_checked == 5 + 9, "first, fullest and last, each once"
    assert outcome.rel_l2 is not None and 0 < outcome.rel_l2 < base.TOLERANCE_REL_L2


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        (SwapsGateAndUp, "failed", "rel-L2"),
        (IgnoresGlobalScale, "failed", "rel-L2"),
        (LeavesRows, "failed", "not finite"),
        (Raises, "failed", "no such kernel"),
        (CannotBeBuilt, "skipped", "no compiler"),
        (Absent, "skipped", "not installed"),
    ],
)
def test_measure_all_never_times_what_is_not_verified(
    weights: Weights, kind: type[Rival], status: str, reason: str
) -> None:
    index, row = measured([kind], [weights])[0]
    assert (index, row["status"]) == (0, status)
    assert reason in row["skip_reason"]
    assert "burst_ms" not in row
    if kind is Raises:
        assert row["check"]["verdict"] == "not verified"


def test_measure_all_goes_on_after_a_rival_that_fails(weights: Weights) -> None:
    other = replace(weights, down=Nvfp4Matrix(*(t.clone() for t in _parts(weights.down))))
    rows = measured([CannotBeBuilt, Loop], [weights, other])
    assert [(index, row["rival"], row["status"]) for index, row in rows] == [
        (0, "cannot be built", "skipped"), (1, "cannot be built", "skipped"), (0, "loop", "ok"), (1, "loop", "ok"),
    ]  # fmt: skip
    assert [row["burst_ms"] for _, row in rows[2:]] == [1.0, 2.0]
    assert rows[2][1]["version"] is not None


def test_measure_all_survives_a_timer_that_fails(weights: Weights) -> None:
    def timer(index: int) -> catalog.Measure:
        def time(enqueue: Callable[[int], torch.Tensor]) -> dict[str, Any]:
            raise RuntimeError("operation not permitted when stream is capturing")

        return time

    (row,) = [row for _, row in catalog.measure_all([weights], [COUNTS], timer, [Loop])]
    assert row["status"] == "failed" and "cannot be timed" in row["skip_reason"]
    assert row["check"]["verdict"] == "verified"


def _parts(matrix: Nvfp4Matrix) -> Iterator[torch.Tensor]:
    yield from (matrix.codes, matrix.block_scales, matrix.global_scales)


def test_check_without_rows_is_not_verified(weights: Weights) -> None:
    rows = base.make_rows(weights, (0, 0, 0, 0))
    assert base.check(rows.x, weights, rows).verdict is Verdict.NOT_VERIFIED
    rows = base.make_rows(weights, COUNTS)
    assert base.check(rows.x[1:], weights, rows).verdict is Verdict.WRONG


@pytest.mark.parametrize("block", [1, 4, 8])
def test_blocks_by_expert_hold_every_row_once_and_one_expert_each(block: int) -> None:
    ids, experts = blocks_by_expert(COUNTS, block)
    total = sum(COUNTS)
    assert sorted(row for row in ids if row < total) == list(range(total))
    assert {row for row in ids if row >= total} <= {total}
    assert len(ids) == block * len(experts)
    owner = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
    for index, row in enumerate(ids):
        if row < total:
            assert owner[row] == experts[index // block]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where no GPU is")
@pytest.mark.parametrize("kind", [TorchGrouped, HummingGrouped, HummingIndexed])
def test_why_not_names_what_is_missing(kind: type[Rival]) -> None:
    reason = kind.why_not()
    assert reason is not None and ("GPU" in reason or "CUDA" in reason or "pip install" in reason)


def test_unfused_chain_over_two_processes_is_checked_and_stands_beside_the_layer(tmp_path: Path) -> None:
    """Two MPI ranks, gloo instead of NCCL, clamped SwiGLU, uneven routing; rows of both ranks against the oracle."""
    pytest.importorskip("mpi4py")
    output = tmp_path / "out.json"
    program = ["-m", "microbench", "--engine", "cpu", "--preset", "deepseek-v4-pro", "--scale-experts", "24"]
    program += ["--scale-channels", "64", "--tokens-per-rank", "5", "--routing", "zipf,hot-rank", "--iters", "1"]
    program += ["--warmup", "0", "--activations", "bf16", "--combine-format", "bf16,fp8", "--rivals", "--json"]
    command = mpirun_command(2, [*program, str(output)])
    done = subprocess.run(command, env=mpirun_environment(2), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = json.loads(output.read_text())["rows"]
    assert [len(row["rivals"]) for row in rows] == [1, 1, 0, 0], "the chain has a bf16 wire"
    for row in rows[:2]:
        (chain,) = row["rivals"]
        assert chain["rival"] == unfused.NAME and chain["status"] == "ok", chain
        assert chain["check"]["rows_checked"] == 10 and 0 < chain["check"]["rel_l2"] < unfused.TOLERANCE_REL_L2
        assert chain["us"]["p50"] > 0


def test_unfused_chain_says_why_it_does_not_run() -> None:
    reasons = run_threads(2, lambda comm: unfused.why_not(comm, CPU), 10.0)
    assert reasons == ["the ranks are threads of one process; it needs a process and a GPU a rank"] * 2


def test_row_steps_of_the_chain_weigh_clamp_and_leave_out_what_has_no_row() -> None:
    rows = torch.tensor([[1.0, 2.0], [4.0, -8.0], [math.inf, math.inf]], dtype=torch.bfloat16)
    slots = torch.tensor([[1, -1, 0], [-1, -1, -1]])
    weights = torch.tensor([[0.5, math.nan, 2.0], [math.nan] * 3])
    assert weighted_sum(rows, slots, weights).tolist() == [[4.0, 0.0], [0.0, 0.0]]
    gate_up = torch.tensor([[3.0, -1.0, 9.0, -9.0]], dtype=torch.bfloat16)
    expected = [2.0 / (1 + math.exp(-2.0)) * 3.0, -1.0 / (1 + math.exp(1.0)) * -1.0]
    assert swiglu(gate_up, 2.0, 1.0, 1.0).float().tolist()[0] == pytest.approx(expected, rel=2**-8)


class MxLoop(Loop):
    """Right in its own format, whose weights differ from those it was given."""

    name = "mx loop"

    @classmethod
    def in_own_format(cls, weights: Weights) -> Weights:
        return TritonMxfp4FourWarps.in_own_format(weights)


def test_rival_with_another_number_format_is_checked_against_its_own_weights(weights: Weights) -> None:
    own = MxLoop.in_own_format(weights)
    matrix = own.gate_up
    assert isinstance(matrix, Mxfp4Matrix) and matrix.exponents.shape == (4, 64, 2)
    values, scales = matrix.decode(1), torch.exp2(matrix.exponents[1].float() - 127)
    codes = unpack_nibbles(matrix.codes[1])
    expected = nvfp4_decode(codes, torch.full((64, 4), 0x38, dtype=torch.uint8))  # block scales of one
    assert torch.equal(values, expected.float() * scales.repeat_interleave(32, dim=1))
    ratio = values.norm() / weights.gate_up.decode(1).norm()
    assert 0.7 < float(ratio) < 1.8 and not torch.equal(values, weights.gate_up.decode(1))
    rows = [row for _, row in catalog.measure_all([weights], [COUNTS], lambda _: lambda _: {}, [MxLoop])]
    assert rows[0]["status"] == "ok", rows[0]


def test_every_implementation_that_is_not_timed_is_named_with_its_reason(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "RIVALS", (Loop,))
    rows = [row for _, row in catalog.measure_all([weights], [COUNTS, COUNTS], lambda _: lambda _: {})]
    skipped = [row for row in rows if row["status"] == "skipped"]
    assert [row["rival"] for row in skipped] == [name for name in catalog.NOT_RUN for _ in range(2)]
    assert len(rows) == 2 + len(skipped) and all(row["skip_reason"] for row in skipped)
