# SPDX-License-Identifier: Apache-2.0
"""One rank's worker: builds the model, loads it, warms it up and runs the scenario."""

from __future__ import annotations

import json
import traceback
from pathlib import Path


def worker_main(llm_args, scenario, out_dir):
    from mpi4py import MPI
    from tensorrt_llm._torch.pyexecutor.engine import run_scenario

    rank = MPI.COMM_WORLD.Get_rank()
    try:
        report = run_scenario(llm_args, json.loads(Path(scenario).read_text()), Path(out_dir), rank)
        (Path(out_dir) / f"report{rank}.json").write_text(json.dumps(report))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        (Path(out_dir) / f"error{rank}.txt").write_text(text)
        (Path(out_dir) / f"trace{rank}.txt").write_text(traceback.format_exc())
