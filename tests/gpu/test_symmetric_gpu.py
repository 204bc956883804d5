# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory on one GPU: virtual ranks on streams of their own, and processes that take turns on the GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cpu.test_symmetric import region, table_for
from tests.helpers.symmetric_program import assert_exchanged, read_results
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeVerificationError
from trtllm_megamoe.symmetric import allocate_symmetric
from trtllm_megamoe.symmetric.devices import OVERLAP_VARIABLE, nvlink_matrix
from trtllm_megamoe.symmetric.local import GUARD_BYTES, VirtualRankMemory
from trtllm_megamoe.symmetric.workspace import Workspace

pytestmark = pytest.mark.gpu
WATCHDOG_S = 180.0
EP = 8
PROGRAM = "tests.helpers.symmetric_program"


def test_virtual_ranks_work_on_different_streams_none_of_them_the_default() -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        stream = torch.cuda.current_stream()
        assert stream != torch.cuda.default_stream()
        busy = torch.ones(1 << 20, device="cuda").cumsum(0)
        assert busy.device.index == torch.cuda.current_device()
        return stream.cuda_stream, int(busy[-1])

    per_rank = run_threads(EP, body, WATCHDOG_S, device="cuda")
    assert len({stream for stream, _ in per_rank}) == EP
    assert all(total == 1 << 20 for _, total in per_rank)


def test_virtual_ranks_on_the_default_stream_are_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(MegaMoeConfigError, match=r"needs a stream of its own.*device='cuda:0'"):
            VirtualRankMemory(table_for(2), comm, torch.device("cuda", 0), WATCHDOG_S)

    run_threads(2, body, WATCHDOG_S)


def test_virtual_ranks_read_and_write_each_others_memory_between_whole_guards() -> None:
    table = table_for(EP, num_experts=8 * EP)

    def body(comm: Communicator) -> tuple[tuple[int, ...], list[int]]:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = allocate_symmetric(table, comm, device, WATCHDOG_S)
        assert isinstance(memory, VirtualRankMemory)
        for peer, view in enumerate(memory.views):
            region(view, table, "return_counters").view(torch.int64)[comm.rank] = 100 * comm.rank + peer
        torch.cuda.current_stream().synchronize()
        comm.barrier(WATCHDOG_S)
        received = region(memory.own, table, "return_counters").view(torch.int64).tolist()
        comm.barrier(WATCHDOG_S)
        memory.close()
        return memory.peer_addresses, received

    per_rank = run_threads(EP, body, WATCHDOG_S, device="cuda")
    assert len({addresses for addresses, _ in per_rank}) == 1 and len(set(per_rank[0][0])) == EP
    assert [received for _, received in per_rank] == [[100 * s + r for s in range(EP)] for r in range(EP)]
    assert all(address % 256 == 0 for address in per_rank[0][0])


@pytest.mark.parametrize("distance", [-1, 0])
def test_virtual_rank_write_outside_its_memory_on_the_gpu_is_found(distance: int) -> None:
    table = table_for(2)
    num_bytes = table.total_bytes("shared")

    def body(comm: Communicator) -> None:
        memory = VirtualRankMemory(table, comm, torch.device("cuda", 0), WATCHDOG_S)
        byte = GUARD_BYTES + (num_bytes if distance == 0 else distance)
        memory._guarded[byte] = 0
        with pytest.raises(MegaMoeVerificationError, match=f"rank {comm.rank}: 1 bytes were written"):
            memory.close()

    run_threads(2, body, WATCHDOG_S, device="cuda:0")


def test_workspace_on_the_gpu_starts_at_zero_where_it_must_and_gives_its_memory_back() -> None:
    table = table_for(1, max_tokens_per_rank=4096)
    device = torch.device("cuda", torch.cuda.current_device())
    junk = torch.full((table.total_bytes("local"),), 0x5C, dtype=torch.uint8, device=device)
    del junk  # the next allocation of this size gets its bytes
    before = torch.cuda.memory_allocated()
    workspace = Workspace(table, single(), device, WATCHDOG_S)
    for entry in table.regions("local"):
        if entry.zero_at_start:
            assert not workspace.local[entry.offset_bytes : entry.end_bytes].any(), entry.name
    assert torch.cuda.memory_allocated() - before >= table.total_bytes("local") + table.total_bytes("shared")
    workspace.close()
    assert torch.cuda.memory_allocated() == before


def test_launch_together_blocks_no_rank_whose_peers_wait_on_the_device() -> None:
    """Allocations of fresh memory between launches of 8 ranks: all are issued before any rank goes on."""

    def body(comm: Communicator) -> int:
        total = 0
        for step in range(10):
            fresh = torch.empty((1 + step + comm.rank) << 20, dtype=torch.uint8, device="cuda")
            comm.launch_together(lambda fresh=fresh: fresh.fill_(1), WATCHDOG_S)  # type: ignore[misc]
            total += int(fresh.sum(dtype=torch.int64))
            del fresh
        return total

    assert run_threads(EP, body, WATCHDOG_S, device="cuda") == [
        sum((1 + step + rank) << 20 for step in range(10)) for rank in range(EP)
    ]


def _environment(**changes: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != OVERLAP_VARIABLE}
    return environment | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]} | changes


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, timeout=WATCHDOG_S, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def _torchrun(size: int, out_dir: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [*launcher, "-m", PROGRAM, "cuda", str(out_dir)]


def test_processes_on_one_gpu_map_each_others_memory_where_that_is_allowed(tmp_path: Path) -> None:
    _run(_torchrun(EP, tmp_path), _environment(**{OVERLAP_VARIABLE: "1"}))
    assert_exchanged(read_results(tmp_path, EP))


def test_processes_on_one_gpu_are_refused_alike_where_it_is_not_allowed(tmp_path: Path) -> None:
    _run(_torchrun(2, tmp_path), _environment())
    texts = [result["error"] for result in read_results(tmp_path, 2)]
    assert texts[0] == texts[1] and "2 ranks see 1 different GPUs" in texts[0] and OVERLAP_VARIABLE in texts[0]


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_mpi_ranks_on_one_gpu_map_each_others_memory(tmp_path: Path) -> None:
    command = mpirun_command(EP, ["-m", PROGRAM, "cuda", str(tmp_path)])
    _run(command, mpirun_environment(EP) | _environment(**{OVERLAP_VARIABLE: "1"}))
    assert_exchanged(read_results(tmp_path, EP))


def test_nvlink_matrix_covers_every_visible_gpu() -> None:
    matrix = nvlink_matrix()
    count = torch.cuda.device_count()
    assert matrix is not None and [len(row) for row in matrix] == [count] * count
