# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between processes: `mpirun|torchrun ... -m tests.helpers.symmetric_program cpu|cuda OUT_DIR`.

Every rank writes into its slot of every rank's memory, twice over (another allocation each time), and reports as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.cpu.test_symmetric import region, table_for
from trtllm_megamoe.comm import Communicator, mpi, torch_distributed
from trtllm_megamoe.errors import MegaMoeError
from trtllm_megamoe.symmetric import allocate_symmetric
from trtllm_megamoe.symmetric.devices import choose_device

WAIT_S = 60.0


def communicator() -> Communicator:
    """Of the launcher that started this process."""
    return mpi(WAIT_S) if "OMPI_COMM_WORLD_SIZE" in os.environ else torch_distributed(WAIT_S)


def exchange(comm: Communicator, kind: str) -> dict[str, Any]:
    """What this rank found in its own memory after all ranks have written, per allocation."""
    table = table_for(comm.size, num_experts=8 * comm.size)
    device = choose_device(comm, WAIT_S) if kind == "cuda" else torch.device("cpu")
    rounds = []
    for number in range(2):
        memory = allocate_symmetric(table, comm, device, WAIT_S)
        for peer, view in enumerate(memory.views):
            slots = region(view, table, "return_counters").view(torch.int64)
            assert slots[comm.rank] == 0
            slots[comm.rank] = 1000 * number + 100 * comm.rank + peer
        _settle(comm, device)
        received = region(memory.own, table, "return_counters").view(torch.int64).tolist()
        comm.barrier(WAIT_S)
        rounds.append({"received": received, "generation": memory.generation})
        assert memory.peer_addresses[comm.rank] == memory.own.data_ptr()
        memory.close()
    return {"rounds": rounds, "device": str(device)}


def expected(rank: int, size: int, number: int) -> list[int]:
    """What rank `rank` of `size` must find in round `number`."""
    return [1000 * number + 100 * source + rank for source in range(size)]


def assert_exchanged(results: list[dict[str, Any]]) -> None:
    """Every rank got every rank's word; generations agree and differ between allocations."""
    for number in range(2):
        for rank, result in enumerate(results):
            assert "error" not in result, result
            assert result["rounds"][number]["received"] == expected(rank, len(results), number)
    generations = [tuple(entry["generation"] for entry in result["rounds"]) for result in results]
    assert len(set(generations)) == 1 and generations[0][0] != generations[0][1]


def _settle(comm: Communicator, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    comm.fence()
    comm.barrier(WAIT_S)
    comm.fence()


def main() -> None:
    kind, out_dir = sys.argv[1], Path(sys.argv[2])
    comm = communicator()
    try:
        result = exchange(comm, kind)
    except MegaMoeError as err:
        result = {"error": f"{type(err).__name__}: {err}"}
    (out_dir / f"rank{comm.rank}.json").write_text(json.dumps(result))


def read_results(out_dir: Path, size: int) -> list[dict[str, Any]]:
    """The ranks' reports, in order."""
    return [json.loads((out_dir / f"rank{rank}.json").read_text()) for rank in range(size)]


if __name__ == "__main__":
    main()
