# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel's PTX in the interpreter: equal to the oracle, quiet when sound, loud when a fault is planted.

tests/data/ptx holds the PTX of three small builds (README there), so that no compiler is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from tools.ptxsim import OrderError, SimError
from tools.ptxsim.layers import KernelFile, LayerRun
from tools.ptxsim.mutate import Mutant, abort_seen_at_entry, mutants
from tools.ptxsim.ranks import run_one_rank
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward
from vendored_kernels.common.sites import SITE_PEER

DATA = Path(__file__).parent.parent / "data" / "ptx"


class Case:
    """One kernel with a layer, tokens and the oracle's answer."""

    def __init__(self, build: str, kind: RoutingKind, count: int) -> None:
        self.kernel = KernelFile.load(DATA / f"sm90_{build}.ptx")
        layer = self.kernel.facts["layer"]
        hidden, experts = layer["hidden_size"], layer["num_local_experts"]
        generator = seeded(3)
        self.tensors = make_layer_tensors(generator, hidden, layer["intermediate_size"], experts)
        self.x = make_tokens(generator, count, hidden)
        self.routing = make_routing(generator, kind, count, experts, layer["top_k"])
        options = OracleOptions.product(ActivationMode(layer["activation_mode"]))
        weights = OracleWeights.from_tensors(self.tensors)
        self.expected = oracle_forward(weights, self.x, self.routing.topk_ids, self.routing.topk_weights, options)

    def run(self, text: str | None = None, *, seed: int = 0, launches: int = 1, **extra: Any) -> LayerRun:
        """Run the kernel, or another text of it."""
        kernel = self.kernel if text is None else KernelFile(text, self.kernel.facts)
        routing = self.routing
        return run_one_rank(
            kernel,
            self.tensors,
            self.x,
            routing.topk_ids,
            routing.topk_weights,
            seed=seed,
            launches=launches,
            **extra,
        )


@pytest.mark.parametrize(
    ("build", "kind", "count", "launches"),
    [
        ("nvfp4", RoutingKind.MASKED_30, 11, 1),
        ("nvfp4", RoutingKind.DUPLICATES, 5, 2),
        ("nvfp4", RoutingKind.ALL_MASKED, 3, 1),
        ("bf16", RoutingKind.HOT_EXPERT, 9, 1),
        ("bf16", RoutingKind.MASKED_30, 0, 1),
        ("wide", RoutingKind.MASKED_30, 13, 1),  # a token is more than one strip of each warp; six or seven a CTA
    ],
)
def test_hopper_kernel_ptx_equals_the_oracle(build: str, kind: RoutingKind, count: int, launches: int) -> None:
    """Bit for bit: sums of this size are exact in fp32, or round to the same bf16."""
    case = Case(build, kind, count)
    run = case.run(seed=count, launches=launches)
    assert torch.equal(run.y.view(torch.int16), case.expected.view(torch.int16))
    assert run.error[0] == 0
    assert run.report.counts.get("wgmma", 0) > 0 or kind is RoutingKind.ALL_MASKED or count == 0


@pytest.fixture(scope="module")
def case() -> Case:
    """The case of the planted faults: two token blocks of one expert, two launches of two CTAs."""
    return Case("nvfp4", RoutingKind.HOT_EXPERT, 9)


def planted(case: Case, kind: str, needle: str, which: int) -> Mutant:
    """The `which`-th fault of a kind whose statement contains `needle`."""
    return [m for m in mutants(case.kernel.text, (kind,)) if needle in m.before][which]


@pytest.mark.parametrize(
    ("kind", "needle", "which"),
    [
        ("wait removed", "", -1),
        ("arrival removed", "", 0),
        ("announced bytes removed", "", 0),
        ("barrier removed", "bar.sync 10", 0),
        ("fence removed", "fence.mbarrier_init", 0),
        ("release weakened", "red.release", 0),
        ("scope narrowed", "red.release", -1),
        ("wgmma wait loosened", "", -1),
    ],
)
def test_planted_fault_is_caught(case: Case, kind: str, needle: str, which: int) -> None:
    mutant = planted(case, kind, needle, which)
    with pytest.raises(SimError):
        case.run(mutant.text, launches=2, max_rounds=2000)


def test_no_proxy_fence_at_all_is_caught(case: Case) -> None:
    """Writer and reader both fence; the model is content with either, so only the absence of both is an error."""
    with pytest.raises(OrderError, match=r"no fence\.proxy\.async"):
        case.run(case.kernel.text.replace("fence.proxy.async;", ""), max_rounds=2000)


def test_wait_that_never_ends_is_recorded_and_the_launch_ends(case: Case) -> None:
    """The kernel's own time-out: tokens of a CTA that never stages."""
    run = case.run(fault_step=1, timeout_ns=20_000, check_order=False, patience=4000)
    assert run.error[0] == 1 and run.error[2] == 1
    assert (run.error[5], run.error[6]) == (3, 2)


def test_abort_that_goes_up_while_a_launch_begins_does_not_split_a_cta(case: Case) -> None:
    """The threads of a CTA meet the same barriers: one thread's view of the abort word holds for all."""
    run = case.run(abort_seen_at_entry(case.kernel.text, "others"))
    assert torch.equal(run.y.view(torch.int16), case.expected.view(torch.int16))
    assert run.error[0] == 0


def test_abort_that_only_some_ctas_see_at_entry_is_recorded(case: Case) -> None:
    """The others give up at their first wait without a record of their own, and nobody is the last one out."""
    run = case.run(abort_seen_at_entry(case.kernel.text, "other CTAs"), aborts=[1], check_order=False, patience=4000)
    assert run.error[0] == 1 and run.error[2] == SITE_PEER and run.error[3] == 0
