# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of the Hopper kernel between three virtual ranks, in the interpreter, memory order checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from tools.ptxsim import OrderError, SimError
from tools.ptxsim.layers import KernelFile
from tools.ptxsim.mutate import mutants
from tools.ptxsim.ranks import RankInput, RanksRun, run_sm90_ranks
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward

DATA = Path(__file__).parent.parent / "data" / "ptx"
KERNEL = KernelFile.load(DATA / "sm90_ranks3.ptx")
TWO_RANKS = KernelFile.load(DATA / "sm90_ranks2.ptx")


class Case:
    """Tokens of every rank and the oracle's answers."""

    def __init__(self, kind: RoutingKind, counts: tuple[int, ...], kernel: KernelFile = KERNEL) -> None:
        self.kernel, layer = kernel, kernel.facts["layer"]
        experts = layer["ep_size"] * layer["num_local_experts"]
        generator = seeded(9)
        self.tensors = make_layer_tensors(generator, layer["hidden_size"], layer["intermediate_size"], experts)
        self.inputs = []
        for count in counts:
            routing = make_routing(generator, kind, count, experts, layer["top_k"], ep_size=layer["ep_size"])
            x = make_tokens(generator, count, layer["hidden_size"])
            self.inputs.append(RankInput(x, routing.topk_ids, routing.topk_weights))
        weights = OracleWeights.from_tensors(self.tensors)
        options = OracleOptions.product(ActivationMode(layer["activation_mode"]))
        self.expected = [oracle_forward(weights, one.x, one.ids, one.weights, options) for one in self.inputs]

    def run(self, text: str | None = None, **extra: int) -> RanksRun:
        """All ranks, one CTA each unless `grid` says otherwise."""
        cap = max(len(one.x) for one in self.inputs) + 1
        options = {"grid": 1, **extra}
        kernel = self.kernel if text is None else KernelFile(text, self.kernel.facts)
        return run_sm90_ranks(kernel, self.tensors, self.inputs, max_tokens=cap, **options)


@pytest.mark.parametrize(
    ("kind", "counts", "grid", "launches"),
    [
        (RoutingKind.MASKED_30, (5, 0, 3), 2, 1),
        (RoutingKind.HOT_RANK, (2, 3, 1), 1, 2),
        (RoutingKind.ALL_MASKED, (1, 2, 0), 1, 1),
    ],
)
def test_ranks_outputs_equal_the_oracle_bit_for_bit(
    kind: RoutingKind, counts: tuple[int, ...], grid: int, launches: int
) -> None:
    case = Case(kind, counts)
    run = case.run(grid=grid, launches=launches, seed=sum(counts))
    for y, expected in zip(run.y, case.expected, strict=True):
        assert torch.equal(y.view(torch.int16), expected.view(torch.int16))
    assert [error[0] for error in run.errors] == [0, 0, 0]


@pytest.mark.parametrize(("kind", "counts"), [(RoutingKind.RANDOM, (3, 2)), (RoutingKind.HOT_RANK, (0, 4))])
def test_two_ranks_outputs_equal_the_oracle_bit_for_bit(kind: RoutingKind, counts: tuple[int, ...]) -> None:
    """The fewest ranks leave the least room between the tables in shared memory: two of them overlapped once."""
    case = Case(kind, counts, TWO_RANKS)
    run = case.run(launches=2, seed=sum(counts))
    for y, expected in zip(run.y, case.expected, strict=True):
        assert torch.equal(y.view(torch.int16), expected.view(torch.int16))
    assert [error[0] for error in run.errors] == [0, 0]


@pytest.fixture(scope="module")
def case() -> Case:
    """The case of the planted faults: every rank sends to every rank."""
    return Case(RoutingKind.RANDOM, (3, 2, 2))


@pytest.mark.parametrize(
    ("kind", "needle"),
    [
        ("fence removed", "fence.acq_rel.sys"),
        ("release weakened", "red.release.sys"),
        ("scope narrowed", "red.release.sys"),
        ("acquire weakened", "ld.acquire.sys.global.b64"),
    ],
)
def test_ranks_planted_fault_in_the_protocol_is_caught(case: Case, kind: str, needle: str) -> None:
    mutant = next(m for m in mutants(KERNEL.text, (kind,)) if needle in m.before)
    with pytest.raises(SimError):
        case.run(mutant.text, max_rounds=3000)


def test_ranks_gpu_scope_between_ranks_is_caught(case: Case) -> None:
    """What passes on one GPU and fails on two: every system-scope order made GPU-wide."""
    text = KERNEL.text
    for name in ("fence.acq_rel", "red.release", "ld.acquire", "st.release", "st.relaxed"):
        text = text.replace(f"{name}.sys", f"{name}.gpu")
    with pytest.raises(OrderError):
        case.run(text, max_rounds=3000)
