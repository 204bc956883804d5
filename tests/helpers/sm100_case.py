# SPDX-License-Identifier: Apache-2.0
"""One Blackwell kernel in the interpreter with a layer, tokens and the oracle's trace; compares everything exactly."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from tools.ptxsim.layers import KernelFile, LayerRun
from tools.ptxsim.ranks import run_one_rank
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
from trtllm_megamoe.reference.oracle import OracleOptions, OracleTrace, OracleWeights, oracle_trace

DATA = Path(__file__).parent.parent / "data" / "ptx"


class Sm100Case:
    """A kernel and a call of it."""

    def __init__(self, kernel: str | KernelFile, kind: RoutingKind, count: int, *, special: bool = False) -> None:
        """`kernel`: a build of tests/data/ptx, or one just compiled; `special`: rows with NaN, infinity, zeros."""
        self.kernel = KernelFile.load(DATA / f"sm100_{kernel}.ptx") if isinstance(kernel, str) else kernel
        layer = self.layer = self.kernel.facts["layer"]
        hidden, experts = layer["hidden_size"], layer["num_local_experts"]
        generator = seeded(5)
        self.tensors = make_layer_tensors(generator, hidden, layer["intermediate_size"], experts)
        self.x = make_tokens(generator, count, hidden)
        if special:
            self.x[0] = 0.0
            self.x[1, 7] = float("nan")
            self.x[2, 33] = float("inf")
            self.x[3, 5] = -3e38
            self.x[4, 16:32] = 1e-30
        self.routing = make_routing(generator, kind, count, experts, layer["top_k"])
        placement = ScorePlacement.BEFORE_REQUANT if layer["weigh_before_requant"] else ScorePlacement.AFTER_FC2
        options = OracleOptions.product(
            ActivationMode.NVFP4,
            combine_format=CombineFormat(layer["combine_format"]),
            score_placement=placement,
            swiglu_limit=layer["swiglu_limit"],
        )
        weights = OracleWeights.from_tensors(self.tensors)
        self.expected: OracleTrace = oracle_trace(
            weights, self.x, self.routing.topk_ids, self.routing.topk_weights, options
        )

    def run(self, text: str | None = None, *, seed: int = 0, ids: torch.Tensor | None = None, **extra: int) -> LayerRun:
        """Run the kernel, or another text of it."""
        kernel = self.kernel if text is None else KernelFile(text, self.kernel.facts)
        ids = self.routing.topk_ids if ids is None else ids
        return run_one_rank(kernel, self.tensors, self.x, ids, self.routing.topk_weights, seed=seed, **extra)

    def check(self, run: LayerRun) -> None:
        """Pool and fc1 output exactly, row by row; y bit for bit, NaN where the oracle has NaN."""
        want, live = self.expected, self.expected.live
        assert run.error[0] == 0
        assert torch.equal(run.route_rows >= 0, live)
        rows = run.route_rows[live].long()
        assert rows.unique().numel() == rows.numel()
        token = torch.arange(len(live))[:, None].expand(live.shape)[live]
        hidden, inter = self.layer["hidden_size"], self.layer["intermediate_size"]
        assert want.x_codes is not None and want.x_scales is not None
        assert want.hidden_codes is not None and want.hidden_scales is not None
        assert torch.equal(run.buffers["pool"][rows], want.x_codes[token])
        assert torch.equal(run.buffers["pool_scales"][rows][:, : hidden // 16], want.x_scales[token])
        assert torch.equal(run.buffers["h"][rows], want.hidden_codes[live])
        assert torch.equal(run.buffers["h_scales"][rows][:, : inter // 16], want.hidden_scales[live])
        nan = want.out.isnan()
        sound = ~nan[token].any(dim=1)  # a NaN token may leave NaN behind its last channel: nobody else reads it
        assert (run.buffers["pool_scales"][rows][:, hidden // 16 :] == 0).all()
        assert (run.buffers["h_scales"][rows][:, inter // 16 :][sound] == 0).all()
        assert torch.equal(run.y.isnan(), nan)
        assert torch.equal(run.y[~nan].view(torch.int16), want.out[~nan].view(torch.int16))
