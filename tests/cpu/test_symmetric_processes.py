# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between processes on GPUs, as far as no GPU is needed: who may form a group, and the order of calls.

torch's allocator is replaced by one of host memory over threads; tests/gpu and tests/multigpu test the real one.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.test_symmetric import assert_at_start, region, table_for
from tests.helpers.symmetric_program import assert_exchanged, read_results
from trtllm_megamoe.comm import Communicator, run_threads, single, torch_distributed
from trtllm_megamoe.comm.launch import run_mpirun
from trtllm_megamoe.errors import (
    MegaMoeConfigError,
    MegaMoeRankDivergenceError,
    MegaMoeTimeoutError,
    MegaMoeUnavailableError,
)
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.regions import RegionTable
from trtllm_megamoe.symmetric import torch_symm
from trtllm_megamoe.symmetric.base import require_same_header
from trtllm_megamoe.symmetric.devices import OVERLAP_VARIABLE, RankGpus, choose_device, plan, why_not_connected
from trtllm_megamoe.symmetric.torch_symm import TorchSymmetricMemory

WATCHDOG_S = 60.0
CPU = torch.device("cpu")
ALL = tuple(f"uuid{index}" for index in range(8))


def _facts(count: int, **changes: Any) -> list[RankGpus]:
    return [replace(RankGpus("node/boot", ALL, 0, False), **changes) for _ in range(count)]


# -- which GPU


def test_plan_ranks_that_chose_nothing_take_one_gpu_each_in_order() -> None:
    assert plan(_facts(8)) == list(range(8))
    assert plan(_facts(3, visible=ALL[:4])) == [0, 1, 2]


def test_plan_choice_of_the_application_is_kept() -> None:
    facts = [replace(fact, current=7 - rank) for rank, fact in enumerate(_facts(8))]
    assert plan(facts) == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (4, 8), (7, 8)])
def test_plan_fewer_gpus_than_ranks_needs_the_overlap_variable_on_every_rank(gpus: int, ranks: int) -> None:
    facts = _facts(ranks, visible=ALL[:gpus])
    with pytest.raises(MegaMoeUnavailableError, match=f"{ranks} ranks see {gpus} different GPUs.*{OVERLAP_VARIABLE}=1"):
        plan(facts)
    allowed = [replace(fact, may_overlap=True) for fact in facts]
    assert plan(allowed) == [rank % gpus for rank in range(ranks)]
    with pytest.raises(MegaMoeUnavailableError, match=OVERLAP_VARIABLE):
        plan([*allowed[:-1], facts[-1]])


def test_plan_ranks_on_several_nodes_are_refused_by_name() -> None:
    facts = [*_facts(2), replace(_facts(1)[0], host="other/boot")]
    with pytest.raises(MegaMoeUnavailableError, match=r"spread over 2 nodes: node \(rank 1\), other \(rank 2\)"):
        plan(facts)


def test_plan_same_host_name_of_another_machine_is_another_node() -> None:
    """Containers of different machines may have the same host name; the kernel's boot id tells them apart."""
    facts = [_facts(1)[0], replace(_facts(1)[0], host="node/boot2")]
    with pytest.raises(MegaMoeUnavailableError, match="spread over 2 nodes"):
        plan(facts)


def test_plan_rank_without_a_gpu_is_named() -> None:
    facts = [*_facts(2), replace(_facts(1)[0], visible=())]
    with pytest.raises(MegaMoeUnavailableError, match=r"ranks \[2\] of 3 see no GPU"):
        plan(facts)


def test_plan_gpus_hidden_from_each_other_are_refused_with_advice() -> None:
    """torch tells GPUs apart by CUDA index, which is 0 on every rank that sees only its own."""
    facts = [replace(fact, visible=(ALL[rank],)) for rank, fact in enumerate(_facts(4))]
    with pytest.raises(MegaMoeUnavailableError, match=r"by the same CUDA index \[0\].*CUDA_VISIBLE_DEVICES"):
        plan(facts)


def test_plan_two_ranks_set_to_one_gpu_of_many_take_their_own() -> None:
    facts = [replace(fact, current=5) for fact in _facts(4)]
    assert plan(facts) == [0, 1, 2, 3]


def test_plan_ranks_that_see_different_parts_of_a_node_are_refused() -> None:
    seen = [ALL[:2], ALL[:2], ALL[:2], ALL[:8]]
    facts = [replace(fact, visible=visible) for fact, visible in zip(_facts(4), seen, strict=True)]
    with pytest.raises(MegaMoeUnavailableError, match=r"would share GPUs although the node has 8: rank 0: GPU 0 of"):
        plan(facts)


@pytest.mark.parametrize(
    ("p2p", "links", "words"),
    [
        (True, 18, None),
        (True, None, None),
        (False, 18, "rank 1: its GPU 1 and rank 0's GPU 0 cannot map each other's memory"),
        (True, 0, "rank 1: its GPU 1 and rank 0's GPU 0 are not connected by NVLink"),
    ],
)
def test_connection_of_every_peer_is_judged(p2p: bool, links: int | None, words: str | None) -> None:
    nvlinks = None if links is None else [[0 if i == j else links for j in range(4)] for i in range(4)]
    found = why_not_connected(1, 1, ALL[:4], ALL[:4], lambda first, second: p2p, nvlinks)
    assert found is None if words is None else found is not None and words in found


def test_connection_of_ranks_on_one_gpu_or_on_a_gpu_out_of_sight_is_not_judged() -> None:
    def refuse(first: int, second: int) -> bool:
        raise AssertionError("nothing to ask")

    assert why_not_connected(0, 0, [ALL[0], ALL[0]], ALL[:1], refuse, [[0]]) is None
    assert why_not_connected(0, 0, [ALL[0], ALL[1]], ALL[:1], refuse, [[0]]) is None


class _OtherProcesses(Communicator):
    """Threads that pretend to be processes of a job."""

    def __init__(self, comm: Communicator, extra_ranks: int = 0) -> None:
        self._comm = comm
        self.rank, self.size, self.transport = comm.rank, comm.size, "torch"
        self.world_size = comm.size + extra_ranks

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        return self._comm.allgather(value, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        self._comm.barrier(timeout_s)

    def fence(self) -> None:
        self._comm.fence()


def test_choose_device_refusal_of_one_rank_is_the_same_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    current: dict[int, int] = {}
    module = "trtllm_megamoe.symmetric.devices."
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.setdefault(index, index))
    monkeypatch.setattr(module + "_own_gpus", lambda: _facts(1)[0])
    monkeypatch.setattr(module + "nvlink_matrix", lambda: [[18] * 8] * 8)

    def body(comm: Communicator) -> Any:
        try:
            return choose_device(_OtherProcesses(comm), WATCHDOG_S)
        except MegaMoeUnavailableError as err:
            return str(err)

    monkeypatch.setattr(module + "can_access", lambda first, second: (first, second) != (2, 0))
    texts = run_threads(3, body, WATCHDOG_S)
    assert len(set(texts)) == 1 and "rank 2: its GPU 2 and rank 0's GPU 0" in texts[0] and not current
    monkeypatch.setattr(module + "can_access", lambda first, second: True)
    assert run_threads(3, body, WATCHDOG_S) == [torch.device("cuda", index) for index in range(3)]
    assert sorted(current) == [0, 1, 2]


# -- order of calls


class _FakeTorch:
    """torch's symmetric memory over threads; logs every call, and maps whatever was rendezvoused together."""

    def __init__(self, comm: Communicator, log: list[str], faults: dict[str, int], table: RegionTable) -> None:
        self.comm, self.log, self.faults, self.table = comm, log, faults, table

    def _maybe_fail(self, what: str) -> None:
        self.log.append(what)
        if self.faults.get(what) == self.comm.rank:
            raise RuntimeError(f"planted in {what}")

    def empty_strided_p2p(
        self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert stride == (1,) and dtype == torch.uint8
        self._maybe_fail("empty")
        return torch.full(size, 0x5C, dtype=dtype, device=device)

    def rendezvous(self, own: torch.Tensor, group_name: str) -> Any:
        assert group_name == "the default group"
        header = region(own, self.table, "header").view(torch.int64)
        assert header[0] != 0 and not region(own, self.table, "size_cells").any(), "exposed before it was initialised"
        self._maybe_fail("rendezvous")
        buffers = self.comm.allgather(own, WATCHDOG_S)
        shift = 64 if "address" in self.faults else 0

        class Handle:
            buffer_ptrs = tuple(buffer.data_ptr() + shift for buffer in buffers)

            @staticmethod
            def get_buffer(peer: int, sizes: tuple[int], dtype: torch.dtype) -> torch.Tensor:
                return buffers[peer][: sizes[0]]

        return Handle()


def _allocate(monkeypatch: pytest.MonkeyPatch, ep_size: int, **faults: int) -> tuple[list[Any], list[str]]:
    """Per rank (peer addresses, generation) or the error's text, and the log of calls."""
    table, log = table_for(ep_size), []
    fakes: dict[int, _FakeTorch] = {}

    class Dispatch:  # the module has one name for all threads
        @staticmethod
        def empty_strided_p2p(*args: Any) -> torch.Tensor:
            return fakes[_rank()].empty_strided_p2p(*args)

        @staticmethod
        def rendezvous(*args: Any) -> Any:
            return fakes[_rank()].rendezvous(*args)

    def _rank() -> int:
        import threading

        return int(threading.current_thread().name.rsplit("-", 1)[1])

    monkeypatch.setattr(torch_symm, "_SymmetricMemory", Dispatch)
    monkeypatch.setattr(torch_symm, "_group_name", lambda: "the default group")
    monkeypatch.setattr(torch_symm, "ensure_process_group", lambda comm, timeout_s: log.append("process group"))

    def body(comm: Communicator) -> Any:
        fakes[comm.rank] = _FakeTorch(comm, log, faults, table)
        try:
            memory = TorchSymmetricMemory(table, _OtherProcesses(comm), CPU, WATCHDOG_S)
            require_same_header(memory, table, comm)
            for view in memory.views:
                assert_at_start(view, table, memory.generation)
            result = memory.peer_addresses, memory.generation, memory.own.data_ptr()
            comm.barrier(WATCHDOG_S)
            memory.close()
            memory.close()
            return result
        except MegaMoeUnavailableError as err:
            return str(err)

    return run_threads(ep_size, body, WATCHDOG_S), log


def test_torch_memory_is_initialised_before_the_rendezvous_and_mapped_in_rank_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, log = _allocate(monkeypatch, 4)
    addresses, generations, own = zip(*results, strict=True)
    assert len(set(generations)) == 1 and set(addresses) == {tuple(own)}
    order = [name for name, _ in itertools.groupby(sorted(log, key=["process group", "empty", "rendezvous"].index))]
    assert order == ["process group", "empty", "rendezvous"] and len(log) == 12
    last_allocation = max(index for index, name in enumerate(log) if name == "empty")
    assert last_allocation < log.index("rendezvous"), "a rank entered the rendezvous before all could allocate"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"empty": 2}, "rank 2 of 4: cannot allocate 0.0 MB of symmetric memory on cpu: planted in empty"),
        ({"address": 0}, "reports addresses that are not its buffers'"),
    ],
)
def test_torch_memory_that_one_rank_cannot_have_is_the_same_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, faults: dict[str, int], words: str
) -> None:
    texts, log = _allocate(monkeypatch, 4, **faults)
    assert len(set(texts)) == 1 and words in texts[0]
    assert ("rendezvous" in log) == ("empty" not in faults), "nobody enters a rendezvous that cannot complete"


def test_torch_memory_group_that_is_a_part_of_the_job_is_refused_before_anything_collective() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:  # no other rank takes part: a collective would time out
            part = _OtherProcesses(comm, extra_ranks=6)
            with pytest.raises(MegaMoeConfigError, match=r"the group has 2 ranks, the job has 8.*pure DEP"):
                TorchSymmetricMemory(table_for(2), part, CPU, 0.2)
            with pytest.raises(MegaMoeConfigError, match=r"the group has 2 ranks, the job has 8.*pure DEP"):
                MegaMoELayer(_config(), part)

    run_threads(2, body, WATCHDOG_S)


def _config() -> Any:
    from tests.helpers.layer_cases import make_case

    return make_case("random", ep_size=1).config


def test_torch_memory_of_another_allocation_is_found_through_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that hands ranks blocks of different ages is caught: the header of the mapped block is an older one."""
    table = table_for(1)
    stale = torch.zeros(table.total_bytes("shared"), dtype=torch.uint8)

    class Swapped:
        @staticmethod
        def empty_strided_p2p(size: Any, *_: Any) -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8)

        @staticmethod
        def rendezvous(own: torch.Tensor, _: str) -> Any:
            class Handle:
                buffer_ptrs = (own.data_ptr(),)

            return Handle()

    monkeypatch.setattr(torch_symm, "_SymmetricMemory", Swapped)
    monkeypatch.setattr(torch_symm, "_group_name", lambda: "")
    monkeypatch.setattr(torch_symm, "ensure_process_group", lambda comm, timeout_s: None)
    memory = TorchSymmetricMemory(table, single(), CPU, 1.0)
    require_same_header(memory, table, single())
    memory.views = (stale,)
    with pytest.raises(MegaMoeRankDivergenceError, match=r"header word 0 \(generation\) is 0x0"):
        require_same_header(memory, table, single())


# -- ranks of torch.distributed


def test_torchrun_ranks_exchange_values_and_name_a_missing_rank(tmp_path: Path) -> None:
    program = ["-m", "tests.helpers.torchrun_program", str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    job = subprocess.run(command, timeout=WATCHDOG_S, check=False, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr[-2000:]
    texts = [(tmp_path / f"rank{rank}").read_text().split("\n") for rank in range(2)]
    assert texts[0][0] == texts[1][0] == "[{'rank': 0}, {'rank': 1}] of 2"
    assert "waited 1 s in a barrier of 2 torch.distributed ranks" in texts[0][1] and "Ranks 1 failed" in texts[0][1]
    assert all("no shared host memory between 2 ranks of transport 'torch'" in text[2] for text in texts)


def test_torch_distributed_without_a_launcher_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MegaMoeConfigError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set; start with"):
        torch_distributed()


def test_torch_distributed_rank_that_never_comes_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MegaMoeTimeoutError, match="no process group of all ranks within 1 s"):
        torch_distributed(1.0)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_mpi_windows_carry_every_ranks_words_and_a_new_generation_each_time(ep_size: int, tmp_path: Path) -> None:
    assert run_mpirun(ep_size, ["-m", "tests.helpers.symmetric_program", "cpu", str(tmp_path)], WATCHDOG_S) == 0
    assert_exchanged(read_results(tmp_path, ep_size))
