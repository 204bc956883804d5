# SPDX-License-Identifier: Apache-2.0
"""Several virtual ranks of one kernel in the interpreter with tokens of each and the oracle's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from tools.ptxsim import OrderError, SimError
from tools.ptxsim.layers import KernelFile
from tools.ptxsim.mutate import mutants
from tools.ptxsim.ranks import RankInput, RanksRun, run_ranks, token_rows
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
from trtllm_megamoe.reference.oracle import OracleOptions, OracleTrace, OracleWeights, oracle_trace
from vendored_kernels.common.sites import SITE_PAYLOAD, SITE_PEER, SITE_RETURNS

DATA = Path(__file__).parent.parent / "data" / "ptx"


class RanksCase:
    """A kernel, tokens of every rank, and what the oracle makes of them."""

    def __init__(self, kernel: str | KernelFile, kind: RoutingKind, counts: tuple[int, ...]) -> None:
        """`kernel`: a build of tests/data/ptx, or one just compiled; `counts`: T of every rank."""
        self.kernel = KernelFile.load(DATA / f"{kernel}.ptx") if isinstance(kernel, str) else kernel
        layer = self.layer = self.kernel.facts["layer"]
        experts = layer["ep_size"] * layer["num_local_experts"]
        generator = seeded(9)
        self.tensors = make_layer_tensors(generator, layer["hidden_size"], layer["intermediate_size"], experts)
        self.inputs = []
        for count in counts:
            routing = make_routing(generator, kind, count, experts, layer["top_k"], ep_size=layer["ep_size"])
            x = make_tokens(generator, count, layer["hidden_size"])
            self.inputs.append(RankInput(x, routing.topk_ids, routing.topk_weights))
        weights = OracleWeights.from_tensors(self.tensors)
        placement = ScorePlacement.BEFORE_REQUANT if layer["weigh_before_requant"] else ScorePlacement.AFTER_FC2
        options = OracleOptions.product(
            ActivationMode(layer["activation_mode"]),
            combine_format=CombineFormat(layer["combine_format"]),
            score_placement=placement,
            swiglu_limit=layer["swiglu_limit"],
        )
        self.expected: list[OracleTrace] = [
            oracle_trace(weights, one.x, one.ids, one.weights, options) for one in self.inputs
        ]

    def run(self, text: str | None = None, **extra: Any) -> RanksRun:
        """All ranks, one CTA or one pair each unless `grid` says otherwise; of the kernel or another text of it."""
        cap = max(len(one.x) for one in self.inputs) + 1
        options = {"grid": self.kernel.facts["tile"].get("ctas", 1), **extra}
        kernel = self.kernel if text is None else KernelFile(text, self.kernel.facts)
        return run_ranks(kernel, self.tensors, self.inputs, max_tokens=cap, **options)

    def require_caught(self, kind: str, needle: str, which: int = 0) -> None:
        """The interpreter stops at the `which`-th planted fault of this kind whose instruction contains `needle`."""
        mutant = [m for m in mutants(self.kernel.text, (kind,)) if needle in m.before][which]
        with pytest.raises(SimError):
            self.run(mutant.text, max_rounds=3000)

    def require_system_scope(self) -> None:
        """What passes on one GPU and fails on two, every system-scope order made GPU-wide, is an error of order."""
        text = self.kernel.text
        for name in ("fence.acq_rel", "red.release", "ld.acquire", "st.release", "st.relaxed"):
            text = text.replace(f"{name}.sys", f"{name}.gpu")
        with pytest.raises(OrderError):
            self.run(text, max_rounds=3000)

    def require_stop(self, step: int, sites: set[int]) -> None:
        """Rank 0 stops before a step; every launch ends, records name a wait for that step or another rank's failure.

        What a wait for a peer names is rank 0.
        """
        faults = (step, *[0] * (len(self.inputs) - 1))
        run = self.run(fault_steps=faults, timeout_ns=20_000, check_order=False, patience=4000)
        assert all(error[0] == 1 for error in run.errors)
        found = {error[2] for error in run.errors}
        assert found & sites and found <= sites | {SITE_PEER}
        assert all(error[3] == 0 for error in run.errors if error[2] in (SITE_PAYLOAD, SITE_RETURNS))

    def check(self, run: RanksRun) -> None:
        """y of every rank bit for bit; on Blackwell every pulled row and every row of fc1 output, exactly."""
        assert [error[0] for error in run.errors] == [0] * len(self.inputs)
        for y, expected in zip(run.y, self.expected, strict=True):
            assert torch.equal(y.view(torch.int16), expected.out.view(torch.int16))
        if self.kernel.facts["arch"] != "sm_90a":
            assert sum(self._check_rows(run, rank) for rank in range(len(run.y))) == sum(
                int(expected.live.sum()) for expected in self.expected
            )

    def _check_rows(self, run: RanksRun, rank: int) -> int:
        """Compare the rows that this rank pulled; returns how many they are."""
        rows, hidden, inter = token_rows(run, rank), self.layer["hidden_size"], self.layer["intermediate_size"]
        meta = run.region(rank, "pool_meta").view(torch.int32).view(-1, 2)
        used = (meta[:, 0] >= 0).nonzero().flatten().tolist()
        for row in used:
            source, route = meta[row].tolist()
            token, slot = divmod(route, self.layer["top_k"])
            want = self.expected[source]
            assert want.x_codes is not None and want.x_scales is not None
            assert want.hidden_codes is not None and want.hidden_scales is not None
            assert torch.equal(rows["pool"][row], want.x_codes[token])
            assert torch.equal(rows["pool_scales"][row, : hidden // 16], want.x_scales[token])
            assert (rows["pool_scales"][row, hidden // 16 :] == 0).all()
            assert torch.equal(rows["h"][row], want.hidden_codes[token, slot])
            assert torch.equal(rows["h_scales"][row, : inter // 16], want.hidden_scales[token, slot])
        return len(used)
