# SPDX-License-Identifier: Apache-2.0
"""Run under mpirun by tests/cpu/test_engine_mpi.py: `python -m tests.helpers.mpi_program SCENARIO OUT_DIR`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.layer_cases import LayerCase, even_splits, forward_rank, make_case, with_splits
from trtllm_megamoe.comm import Communicator, mpi
from trtllm_megamoe.errors import MegaMoeError
from trtllm_megamoe.layer import MegaMoELayer, build_workspace

LAUNCHES = 12
KILLED_RANK = 1
KILL_LIMIT_S = 3.0


def launch_cases(ep_size: int) -> list[LayerCase]:
    """Launches with moving shares, zeros included, and every routing that stresses the protocol."""
    kinds = ["random", "hot_rank", "masked_30", "all_masked", "duplicates", "zipf"]
    cases = []
    for index in range(LAUNCHES):
        case = make_case(kinds[index % len(kinds)], ep_size=1, num_tokens=3 * index + 1, max_tokens_per_rank=64)
        total = 3 * index + 1
        splits = even_splits(total, ep_size) if index % 2 else [0] * (ep_size - 1) + [total]
        cases.append(with_splits(case, splits))
    return cases


def run_launches(comm: Communicator, out_dir: Path) -> None:
    """One layer with a workspace of its own and two on a shared one take turns; every rank writes its rows."""
    cases = launch_cases(comm.size)
    outputs = {}
    shared = build_workspace(cases[0].config, comm)
    with contextlib.ExitStack() as stack:
        stack.callback(shared.close)
        layers = {
            name: stack.enter_context(MegaMoELayer(cases[0].config, comm, workspace=workspace))
            for name, workspace in (("a", None), ("b", shared), ("c", shared))
        }
        for layer in layers.values():
            layer.load_weights(cases[0].weights)
        for index, case in enumerate(cases):
            time.sleep(0.002 * ((comm.rank * 7 + index) % 5))
            for name, layer in layers.items():
                outputs[f"{name}{index}"] = forward_rank(layer, case, comm.rank)
    save_file(outputs, out_dir / f"rank{comm.rank}.safetensors")


def run_killed(comm: Communicator, out_dir: Path) -> None:
    """One rank dies of SIGKILL between launches; every other one ends with an error, the first of which names it."""
    case = make_case("random", ep_size=comm.size, num_experts=12, timeout_s=KILL_LIMIT_S)
    layer = MegaMoELayer(case.config, comm)
    layer.load_weights(case.weights)
    forward_rank(layer, case, comm.rank)
    (out_dir / f"started{comm.rank}").touch()
    if comm.rank == KILLED_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        forward_rank(layer, case, comm.rank)
    except MegaMoeError as err:
        (out_dir / f"error{comm.rank}").write_text(str(err))
    # leave without MPI's finalisation, which would wait for the dead rank
    os._exit(0)


def main() -> None:
    scenario, out_dir = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    {"launches": run_launches, "killed": run_killed}[scenario](mpi(), out_dir)


if __name__ == "__main__":
    main()
