# SPDX-License-Identifier: Apache-2.0
"""The device model of the fence sequences with a real engine behind it: every launch it allows is made, on all ranks.

Workspaces are slots of real memory that are used again and again: what a slot holds when it is lent anew is what its
last tenant left, or garbage. Every launch and replay must give the bits of the layer on a workspace of its own; a
launch on two sides out of phase would wait for ever and end with the engine's time-out, or give another launch's rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tests.helpers.fence_sequences import LOCALS, RULES, SHAREDS, FenceSequence, run_seeded
from tests.helpers.fences import Device, Graph
from tests.helpers.layer_cases import LayerCase, bits
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.errors import MegaMoeError
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.regions import RegionTable
from trtllm_megamoe.symmetric.base import initialise_shared, zero_at_start
from trtllm_megamoe.symmetric.local import VirtualRankMemory
from trtllm_megamoe.tuning.fences import Workspace, collective_reset

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

WAIT_S = 60.0
REASONS = (
    *("a captured graph launches", "it was never fenced", "a launch on it failed", "no tuning is open"),
    *("is not the profiling scratch", "is the profiling scratch", "capture after tuning"),
)
"""Why something is refused, one for each rule of the book."""

DEATH_S = 0.05
"""How long a launch waits for the rank that dies in it."""


@dataclass
class Pair:
    """What an engine needs of a workspace, made of any two sides; whoever launches has asked the book."""

    table: RegionTable
    comm: Communicator
    device: torch.device
    local: torch.Tensor
    shared: VirtualRankMemory

    def add_layer(self) -> int:
        return 0

    def require_open(self) -> None:
        pass

    def require_launchable(self) -> None:
        pass

    def invalidate(self) -> None:
        pass


class EngineDevice(Device):
    """One rank's device.

    Args:
        layer: A loaded layer of this rank; its weights are used, its own workspace is not touched.
        inputs: One step.
        expected: (T, H), what the step gives.
    """

    def __init__(self, comm: Communicator, layer: MegaMoELayer, inputs: Inputs, expected: torch.Tensor) -> None:
        super().__init__(local=LOCALS, shared=SHAREDS)
        self.comm, self.layer, self.inputs, self.expected = comm, layer, inputs, expected
        self.num_launches = 0
        table, device = layer.table, layer.device
        self.memory: dict[int, Any] = {
            at: torch.full((table.total_bytes("local"),), 0xFF, dtype=torch.uint8, device=device) for at in LOCALS
        }
        for at in SHAREDS:
            self.memory[at] = VirtualRankMemory(table, comm, device, WAIT_S)
        self._engines: dict[tuple[int, int], Any] = {}
        self._zero_both = collective_reset(self.synchronize, self.barrier, self._zero)

    def begin(self) -> None:
        """Another sequence, which must find every slot given back."""
        assert self.free == {"local": set(LOCALS), "shared": set(SHAREDS)}, self.free
        self.num_launches = self.num_resets = 0

    # -- what the model does, done

    def allocate(self, kind: str, *, keeps_old_words: bool) -> Workspace:
        made = super().allocate(kind, keeps_old_words=keeps_old_words)
        if not keeps_old_words:
            self.settle()  # no peer writes here any more
            self._bytes(made.address).fill_(0xFF)
            self.settle()
        return made

    def reset(self, local: Workspace, shared: Workspace, *, dies_half_way: bool = False) -> None:
        for (a, b), engine in self._engines.items():
            if a == local.address or b == shared.address:
                self.forgive(engine)
        if dies_half_way:
            self.settle()
            self._zero(local)
            self.settle()
        else:
            self._zero_both(local, shared)
        super().reset(local, shared, dies_half_way=dies_half_way)

    def launch(self, local: int, shared: int) -> None:
        super().launch(local, shared)
        out = self.engine(local, shared).forward(*self.inputs, self.layer.ladder.cap)
        self.require_right(out, f"launch on {local:#x}, {shared:#x}")

    def die_in_launch(self, local: int, shared: int) -> None:
        super().die_in_launch(local, shared)
        text = self.die(self.engine(local, shared), is_culprit=self.comm.rank == self.comm.size - 1)
        texts = self.comm.allgather(text, WAIT_S)
        assert any("size cells" in t or "size_cells" in t for t in texts), texts  # somebody waited, and said for what
        self.settle()

    # -- parts

    def engine(self, local: int, shared: int) -> Any:
        """This rank's engine on a pair, made at its first launch. Collective then."""
        if (local, shared) not in self._engines:
            pair = Pair(self.layer.table, self.comm, self.layer.device, self.memory[local], self.memory[shared])
            engine = self.make_engine(pair)
            engine.bind(self.layer.weights)
            self._engines[local, shared] = engine
        return self._engines[local, shared]

    def require_right(self, out: torch.Tensor, what: str) -> None:
        """Wait for all ranks' launches and compare this rank's."""
        self.settle()
        self.num_launches += 1
        assert torch.equal(bits(out), bits(self.expected)), f"rank {self.comm.rank}: {what}: wrong rows"

    def settle(self) -> None:
        """Nothing runs on any rank."""
        self.synchronize()
        self.barrier()

    def barrier(self) -> None:
        self.comm.barrier(WAIT_S)

    def check_guards(self) -> None:
        """Nothing was written beside a shared side."""
        for at in SHAREDS:
            self.memory[at].check_guards()

    def _bytes(self, address: int) -> torch.Tensor:
        memory = self.memory[address]
        return memory.own if isinstance(memory, VirtualRankMemory) else memory

    def _zero(self, side: Workspace) -> None:
        memory = self.memory[side.address]
        if isinstance(memory, VirtualRankMemory):
            initialise_shared(memory.own, self.layer.table, memory.generation)
        else:
            zero_at_start(memory, self.layer.table, "local")

    @abstractmethod
    def make_engine(self, pair: Pair) -> Any:
        """An engine on a pair."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for this rank's work."""

    @abstractmethod
    def die(self, engine: Any, *, is_culprit: bool) -> str:
        """Take part in a launch in which one rank stops; what the engine says of it."""

    @abstractmethod
    def forgive(self, engine: Any) -> None:
        """Let an engine launch again whose workspace is about to be reset."""


class CpuDevice(EngineDevice):
    """The CPU engine: a replay runs the engine again."""

    def make_engine(self, pair: Any) -> Any:
        from trtllm_megamoe.engines.cpu.engine import CpuEngine

        return CpuEngine(self.layer.config, pair)

    def synchronize(self) -> None:
        self.comm.fence()

    def die(self, engine: Any, *, is_culprit: bool) -> str:
        if is_culprit:
            return ""
        config = engine._config
        engine._config = config.model_copy(update={"timeout_s": DEATH_S})
        try:
            engine.forward(*self.inputs, self.layer.ladder.cap)
        except MegaMoeError as err:
            return str(err)
        finally:
            engine._config = config
        return ""

    def forgive(self, engine: Any) -> None:
        """All its state lies in the regions."""


class CudaDevice(EngineDevice):
    """The CUDA engine: captures and replays are CUDA graphs."""

    def make_engine(self, pair: Any) -> Any:
        from trtllm_megamoe.engines.cuda.engine import CudaEngine
        from trtllm_megamoe.kernels.family import family_here

        return CudaEngine(self.layer.config, pair, self.layer.ladder, family_here())

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    def capture(self, graph: Graph, local: int, shared: int) -> None:
        super().capture(graph, local, shared)
        engine, recorded = self.engine(local, shared), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        for turn in range(self.comm.size):  # while one thread captures, no other may capture or synchronise
            self.barrier()
            if turn == self.comm.rank:
                with torch.cuda.stream(stream):
                    recorded.capture_begin(capture_error_mode="thread_local")
                    out = engine.forward(*self.inputs, self.layer.ladder.cap)
                    recorded.capture_end()
        self.barrier()
        graph.recordings.append((recorded, out))

    def replay(self, graph: Graph) -> None:
        for (local, shared), (recorded, out) in zip(graph.launches, graph.recordings, strict=True):
            Device.launch(self, local, shared)  # the model's judgement
            out.fill_(float("nan"))
            self.comm.launch_together(recorded.replay, WAIT_S)
            self.require_right(out, f"replay on {local:#x}, {shared:#x}")

    def die(self, engine: Any, *, is_culprit: bool) -> str:
        from vendored_kernels.common.sites import FAULT_PUBLISH

        honest = dict(engine._launches)
        extra = {"timeout_ns": int(DEATH_S * 1e9), **({"fault_step": FAULT_PUBLISH} if is_culprit else {})}
        engine._launches = {b: replace(one, launch=partial(one.launch, **extra)) for b, one in honest.items()}
        engine.forward(*self.inputs, self.layer.ladder.cap)
        self.settle()
        engine._launches = honest
        try:
            engine.raise_if_failed()
        except MegaMoeError as err:
            return str(err)
        return ""

    def forgive(self, engine: Any) -> None:
        engine._workspace.error_record.zero_()


def _device_of(comm: Communicator, case: LayerCase, kind: type[EngineDevice]) -> EngineDevice:
    """A rank's device, over a layer of its own whose result is what every launch must give."""
    rows = case.rank_slice(comm.rank)
    parts = (case.x[rows], case.routing.topk_ids[rows], case.routing.topk_weights[rows])
    layer = MegaMoELayer(case.config, comm)
    layer.load_weights(case.weights)
    x, ids, weights = (part.to(layer.device) for part in parts)
    return kind(comm, layer, (x, ids, weights), layer.forward(x, ids, weights, layer.ladder.cap))


def launch_out_of_phase(case: LayerCase, kind: type[EngineDevice]) -> list[str]:
    """What each rank's engine says of a launch that no book would allow: the local side has counted more launches."""

    def body(comm: Communicator) -> str:
        device = _device_of(comm, case, kind)
        locals_, shareds = (
            [device.allocate(side, keeps_old_words=True) for _ in range(2)] for side in ("local", "shared")
        )
        for local, shared, launches in zip(locals_, shareds, (3, 1), strict=True):
            device.reset(local, shared)
            for _ in range(launches):
                device.launch(local.address, shared.address)
        text = device.die(device.engine(locals_[0].address, shareds[1].address), is_culprit=False)
        device.settle()
        return text

    return run_threads(len(case.splits), body, WAIT_S, case.config.engine if kind is CudaDevice else None)


@dataclass(frozen=True)
class Outcome:
    """What one rank did in one sequence: how often each rule ran, launches that were compared, texts of refusals."""

    ran: Counter[str]
    num_launches: int
    num_resets: int
    refusals: list[str]


def run_sequences(
    case: LayerCase, kind: type[EngineDevice], seeds: Sequence[int], num_steps: int
) -> tuple[torch.Tensor, list[list[Outcome]]]:
    """Run a seeded sequence for each seed on virtual ranks; (T, H) of all ranks' layers alone, outcomes [seed][rank].

    Every sequence begins with empty books on memory that the one before has used.
    """

    def body(comm: Communicator) -> tuple[torch.Tensor, list[Outcome]]:
        device = _device_of(comm, case, kind)

        def agree(step: str) -> None:
            steps = comm.allgather(step, WAIT_S)
            assert len(set(steps)) == 1, f"ranks are about to take different steps: {steps}"

        outcomes = []
        for seed in seeds:
            device.begin()
            sequence = FenceSequence(device, comm.size)
            ran = run_seeded(sequence, seed, num_steps, agree)
            outcomes.append(Outcome(ran, device.num_launches, device.num_resets, sequence.refusals))
        device.check_guards()
        return device.expected.cpu(), outcomes

    results = run_threads(len(case.splits), body, 10 * WAIT_S, case.config.engine if kind is CudaDevice else None)
    by_seed = [[outcomes[number] for _, outcomes in results] for number in range(len(seeds))]
    return torch.cat([expected for expected, _ in results]), by_seed


def require_everything_happened(by_seed: list[list[Outcome]]) -> None:
    """All ranks did the same, and these sequences together hold every kind of step and of refusal."""
    for outcomes in by_seed:
        assert all(one.ran == outcomes[0].ran and one.num_launches == outcomes[0].num_launches for one in outcomes)
    ran: Counter[str] = Counter()
    for outcomes in by_seed:
        ran += outcomes[0].ran
    assert set(ran) == set(RULES), f"never drawn: {set(RULES) - set(ran)}; take more seeds"
    texts = " ".join(text for outcomes in by_seed for text in outcomes[0].refusals)
    for reason in REASONS:
        assert reason in texts, f"nothing was refused with {reason!r}"
    assert sum(outcomes[0].num_launches for outcomes in by_seed) >= 10 * len(by_seed)
