# SPDX-License-Identifier: Apache-2.0
"""Checks of a layer on one rank: the oracle, every bucket and tile, determinism, CUDA graphs, a wait that expires.

Called by :mod:`trtllm_megamoe.selftest.plan`. Everything goes through the public layer; the workspace and the memory
from which outputs are taken are poisoned before launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from trtllm_megamoe.errors import MegaMoeError, MegaMoeTimeoutError
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.reference.oracle import OracleWeights, oracle_forward
from trtllm_megamoe.selftest import inputs
from trtllm_megamoe.selftest.cases import Case
from trtllm_megamoe.selftest.checks import bits, compare, fault_of, oracle_options
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.tuning.tactic import Tactic

_POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check saw.

    Attributes:
        check: What was done, e.g. the routing and the bucket.
        fault: What is wrong; empty where nothing is.
        runs: Launches it stands for.
        rel_l2: Against the oracle, where that was asked.
    """

    check: str
    fault: str = ""
    runs: int = 1
    rel_l2: float | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """One launch's inputs: x (T, H) bf16, ids (T, K), weights (T, K) fp32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Given:
        """On a device."""
        return Given(self.x.to(device), self.ids.to(device), self.weights.to(device))

    def rows(self, count: int) -> Given:
        """The first tokens."""
        return Given(self.x[:count], self.ids[:count], self.weights[:count])


def make_given(case: Case, ids: torch.Tensor, seed: int) -> Given:
    """Tokens and weights for ids, on the CPU: the same on every machine."""
    x = inputs.tokens(case.config, ids.shape[0], seed, "cpu")
    return Given(x, ids, inputs.weights(case.config, ids, seed + 1))


def poison(workspace: Workspace) -> None:
    """NaN patterns into every region that a launch must write before it reads."""
    spaces = {"shared": workspace.shared.own, "local": workspace.local}
    for region in workspace.table.regions():
        if not region.zero_at_start:
            spaces[region.space][region.offset_bytes : region.end_bytes].fill_(_POISON)


def forward(layer: MegaMoELayer, given: Given, hint: int | None = None) -> torch.Tensor:
    """One launch whose output, taken from torch's allocator, most likely begins as NaN."""
    torch.full_like(given.x, float("nan"))
    return layer.forward(given.x, given.ids, given.weights, hint)


class Bench:
    """A layer on its own workspace with the oracle beside it."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.tensors = inputs.random_tensors(case.config, seed, input_scales=case.input_scales, device="cpu")
        self.workspace = build_workspace(case.config)
        self.layer = MegaMoELayer(case.config, workspace=self.workspace)
        self.layer.load_weights(self.tensors)
        on_device = {name: tensor.to(self.layer.device) for name, tensor in self.tensors.items()}
        self._oracle = OracleWeights.from_tensors(on_device)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.layer.close()
        self.workspace.close()

    def given(self, routing: str, seed: int, *, int32: bool = False) -> Given:
        """Inputs of a named routing, on the layer's device."""
        ids = inputs.named_ids(routing, self.case.config, seed, "cpu")
        given = make_given(self.case, ids, seed)
        return Given(given.x, ids.int() if int32 else ids, given.weights).to(self.layer.device)

    def truth(self, given: Given) -> torch.Tensor:
        """The oracle's output in bf16."""
        options = oracle_options(self.case.config, self.case.mode)
        return oracle_forward(self._oracle, given.x, given.ids.long(), given.weights, options).to(torch.bfloat16)

    def outcome(self, check: str, out: torch.Tensor, truth: torch.Tensor, twin: torch.Tensor | None) -> Outcome:
        """Judge an output by the oracle and, bit for bit, by another way to the same result."""
        measured = compare(out, truth)
        fault = fault_of(measured, self.case.config.combine_format.value)
        if twin is not None and not torch.equal(bits(out), bits(twin)):
            fault = ", ".join(filter(None, (fault, "other bits than the first way of launching it")))
        return Outcome(check, fault or self.launch_error(), 1, measured["rel_l2"])

    def launch_error(self) -> str:
        """What the latest launch reported, empty where nothing; known once the GPU has finished."""
        synchronize(self.layer)
        try:
            self.layer.raise_if_failed()
        except MegaMoeError as err:
            return str(err)
        return ""


def synchronize(layer: MegaMoELayer) -> None:
    """Wait for the layer's GPU, where there is one."""
    if layer.device.type == "cuda":
        torch.cuda.synchronize(layer.device)


Tactics = Callable[[int], list[Tactic]]
"""Bucket -> what it can run."""


def against_oracle(case: Case, every_tile: Tactics | None) -> Iterator[Outcome]:
    """Every routing: in the cap's bucket, in its own bucket, and with every tile where `every_tile` names them."""
    with Bench(case, 11) as bench:
        layer, cap = bench.layer, case.config.max_tokens_per_rank
        seen = []
        for index, routing in enumerate(case.routings):
            given = bench.given(routing, 100 + index, int32=bool(index % 2))
            truth, twin = bench.truth(given), None
            for name, hint in (("cap's bucket", None), ("own bucket", len(given.x) or 1)):
                poison(bench.workspace)
                out = forward(layer, given, hint)
                yield bench.outcome(f"{routing}, {name}", out, truth, twin)
                twin = out if twin is None else twin
            seen.append((routing, given, truth, twin))
        for tactic in every_tile(cap) if every_tile else ():
            layer.pin_tactic(cap, tactic)
            for routing, given, truth, twin in seen:
                poison(bench.workspace)
                check = f"{routing}, token widths {tactic.token_widths}, {tactic.tile_rows} rows"
                yield bench.outcome(check, forward(layer, given), truth, twin)


def token_counts(case: Case) -> Iterator[Outcome]:
    """Any T through every bucket, int32 and int64 ids: a token's row never changes."""
    with Bench(case, 21) as bench:
        routing = next(name for name in case.routings if name.startswith("edge"))
        given = bench.given(routing, 5)
        whole = forward(bench.layer, given)
        yield bench.outcome("all tokens", whole, bench.truth(given), None)
        counts = [count for count in (0, 1, 2, 7, 8, 9, 16, 17, 31, 33, 56) if count <= len(given.x)]
        for count in counts:
            part = given.rows(count)
            part = Given(part.x, part.ids.int() if count % 2 else part.ids, part.weights)
            poison(bench.workspace)
            same = torch.equal(bits(forward(bench.layer, part, count or 1)), bits(whole[:count]))
            yield Outcome(f"{count} tokens", "" if same else "rows differ from those of all tokens together")


def determinism(case: Case, launches: int) -> Iterator[Outcome]:
    """The same launch many times on a poisoned workspace: no bit differs."""
    with Bench(case, 31) as bench:
        given = bench.given("duplicates", 6)
        first = forward(bench.layer, given)
        differing = torch.zeros((), dtype=torch.int64, device=bench.layer.device)
        for _ in range(launches):
            poison(bench.workspace)
            differing += (bits(forward(bench.layer, given)) != bits(first)).any()
        bad = int(differing)
        fault = f"{bad} of {launches} launches differ from the first" if bad else bench.launch_error()
        yield Outcome(f"{launches} launches", fault, launches, compare(first, bench.truth(given))["rel_l2"])


def graphs(case: Case, replays: int) -> Iterator[Outcome]:
    """One capture a bucket, replayed with changed tokens, ids and weights, and over a reload: the bits of eager."""
    with Bench(case, 41) as bench, Bench(case, 42) as other:
        layer = bench.layer
        layer.prepare()
        routings = [bench.given(name, 50 + i) for i, name in enumerate(case.routings)]
        for bucket in layer.ladder.rungs:
            count = min(bucket, 57)
            static = Given(
                torch.zeros(count, case.config.hidden_size, dtype=torch.bfloat16, device=layer.device),
                torch.full((count, case.config.top_k), -1, dtype=torch.int64, device=layer.device),
                torch.zeros(count, case.config.top_k, device=layer.device),
            )
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer.forward(static.x, static.ids, static.weights, bucket)
            bad = 0
            for step in range(replays):
                fresh = routings[step % len(routings)].rows(count)
                used = len(fresh.x)
                static.ids.fill_(-1)
                for target, source in ((static.x, fresh.x), (static.ids, fresh.ids), (static.weights, fresh.weights)):
                    target[:used].copy_(source)
                out.fill_(float("nan"))
                graph.replay()
                eager = forward(layer, static, bucket)
                bad += not torch.equal(bits(out), bits(eager))
            yield Outcome(f"bucket {bucket}", f"{bad} of {replays} replays differ from eager" if bad else "", replays)
        layer.load_weights(other.tensors)
        graph.replay()
        same = torch.equal(bits(out), bits(forward(other.layer, static, bucket)))
        yield Outcome("replay after a reload", "" if same else "does not see the new weights")


def expired_wait(case: Case) -> Iterator[Outcome]:
    """A CTA that never comes: the launch ends in time, the next call names the site, a new layer works."""
    quick = Case(case.name, case.config.model_copy(update={"timeout_s": 0.2}), case.routings, case.input_scales)
    with Bench(quick, 51) as bench:
        given = bench.given("masked", 7)
        good = forward(bench.layer, given)
        bench.layer.engine.stop_before("staged tokens")
        forward(bench.layer, given)
        synchronize(bench.layer)
        fault = "the launch with a missing CTA was not reported"
        try:
            forward(bench.layer, given)
        except MegaMoeTimeoutError as err:
            # whoever misses the CTA first: its tokens, its part of an fc1 block, or its fc2 tiles
            named = any(site in str(err) for site in ("staged tokens", "fc1 output block", "fc2 tiles"))
            fault = "" if named else f"the error names no site of this launch: {err}"
        yield Outcome("missing CTA is named", fault)
    with Bench(case, 51) as fresh:
        same = torch.equal(bits(forward(fresh.layer, given)), bits(good))
        yield Outcome("a new layer works", "" if same else "other bits than before the failure")
