# SPDX-License-Identifier: Apache-2.0
"""Checks of a layer over virtual ranks: threads of this process, each with a stream of its own on the one GPU.

Called by :mod:`trtllm_megamoe.selftest.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.errors import MegaMoeAbortedError, MegaMoeError, MegaMoeTimeoutError
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.selftest import inputs
from trtllm_megamoe.selftest.cases import Case
from trtllm_megamoe.selftest.checks import bits
from trtllm_megamoe.selftest.one_rank import Bench, Given, Outcome, forward, make_given, poison

WATCHDOG_S = 120.0
SEED = 61
RANK_TOKENS = (0, 1, 7, 8, 48, 33, 3, 16)
"""T of the ranks, turned by one rank from routing to routing."""


def one_rank_twin(case: Case) -> Case:
    """The same layer on one rank, with room for the tokens of all."""
    config = case.config.model_copy(update={"max_tokens_per_rank": sum(RANK_TOKENS) * -(-case.ep_size // 8)})
    return replace(case, name=f"{case.name}, one rank", config=config, ep_size=1)


def _given_of_ranks(case: Case, routing: str, index: int) -> list[Given]:
    made = []
    for rank in range(case.ep_size):
        count = RANK_TOKENS[(rank * (2 * index + 1) + index) % len(RANK_TOKENS)]
        ids = inputs.rank_ids(case.config, case.ep_size, rank, count, routing, 3 + index, "cpu")
        made.append(make_given(case, ids.int() if index % 2 else ids, 31 * index + rank))
    return made


def _join(parts: Sequence[Given]) -> Given:
    return Given(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "ids", "weights")))


class _Member:
    """One rank's layer on its own workspace."""

    def __init__(self, case: Case, comm: Communicator, tensors: inputs.Tensors) -> None:
        self.comm = comm
        self.workspace = build_workspace(case.config, comm)
        self.layer = MegaMoELayer(case.config, comm, workspace=self.workspace)
        self.layer.load_weights(tensors)

    def settle(self) -> None:
        """All ranks' launches have ended."""
        if self.layer.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.comm.barrier(WATCHDOG_S)

    def poison(self) -> None:
        """Poison this rank's workspace while no rank computes."""
        self.settle()
        poison(self.workspace)
        self.settle()


def _device(engine: str) -> str | None:
    return None if engine == "cpu" else "cuda"


def against_one_rank(case: Case, launches: int) -> Iterator[Outcome]:
    """Every routing: bits of one rank, close to the oracle; then all of them in turns, `launches` times."""
    routings = [_given_of_ranks(case, name, index) for index, name in enumerate(case.routings)]
    with Bench(one_rank_twin(case), SEED) as twin:
        joined = [_join(parts).to(twin.layer.device) for parts in routings]
        expected = [forward(twin.layer, given) for given in joined]
        tensors = twin.tensors

        def body(comm: Communicator) -> tuple[list[torch.Tensor], int]:
            member = _Member(case, comm, tensors)
            own = [parts[comm.rank].to(member.layer.device) for parts in routings]
            first = []
            for given in own:
                member.poison()
                first.append(forward(member.layer, given))
            differing = torch.zeros((), dtype=torch.int64, device=member.layer.device)
            for launch in range(launches):
                turn = launch * 5 % len(own)
                differing += (bits(forward(member.layer, own[turn])) != bits(first[turn])).any()
            member.settle()
            return first, int(differing)

        results = run_threads(case.ep_size, body, WATCHDOG_S, _device(case.config.engine))
        for index, name in enumerate(case.routings):
            out = torch.cat([first[index] for first, _ in results])
            yield twin.outcome(f"{name}, {case.ep_size} ranks", out, twin.truth(joined[index]), expected[index])
        bad = [rank for rank, (_, count) in enumerate(results) if count]
        fault = f"outputs of ranks {bad} change from launch to launch" if bad else ""
        yield Outcome(f"{launches} launches in turns", fault, launches)


def missing_rank(case: Case) -> Iterator[Outcome]:
    """One rank does not do its part: every other rank ends in time, and those that waited name it."""
    culprit = case.ep_size - 1
    config = case.config.model_copy(update={"timeout_s": 1.0})
    quick = replace(case, config=config)
    given = _given_of_ranks(case, "random", 1)
    tensors = inputs.random_tensors(case.config, SEED, device="cpu")

    def body(comm: Communicator) -> str:
        member = _Member(quick, comm, tensors)
        own = given[comm.rank].to(member.layer.device)
        is_cpu = member.layer.engine_name == "cpu"
        member.settle()  # from here on nobody is late but the culprit
        try:
            if comm.rank == culprit:
                if is_cpu:  # a rank that never calls forward
                    return ""
                member.layer.engine.stop_before("publish")
            forward(member.layer, own)
            member.settle()
            forward(member.layer, own)
        except MegaMoeError as err:
            return f"{type(err).__name__}: {err}"
        return "no error"

    texts = run_threads(case.ep_size, body, WATCHDOG_S, _device(case.config.engine))
    others = [text for text in texts if text]
    kinds = (MegaMoeTimeoutError.__name__, MegaMoeAbortedError.__name__)
    unexpected = [text for text in others if not text.startswith(kinds)]
    waited = [text for text in others if text.startswith(kinds[0])]
    fault = f"unexpected: {unexpected[0]}" if unexpected else ""
    if not fault and not (waited and all(f"rank {culprit}" in text for text in waited)):
        fault = f"nobody, or not everybody who waited, names rank {culprit}: {(waited or others)[0]}"
    yield Outcome(f"rank {culprit} of {case.ep_size} stops", fault)
