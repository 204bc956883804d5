# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_megamoe.cli.worker DIR` under mpirun: the collective part of cases that a parent prepared.

`run_under_mpirun` is the parent's side: it starts one MPI job for a list of cases and reads the results back. The
parent judges inputs before and results after; an error that the ranks agree on ends the job normally and is raised by
the parent.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from trtllm_megamoe import errors
from trtllm_megamoe.cli.job import CalibratedScales, Forwarded, RunCase, forward_case, read_input
from trtllm_megamoe.comm import mpi
from trtllm_megamoe.comm.launch import run_mpirun
from trtllm_megamoe.engines.base import SaturationReport
from trtllm_megamoe.errors import MegaMoeAbortedError, MegaMoeConfigError, MegaMoeError
from trtllm_megamoe.formats import ActivationMode

JOB_S = 6 * 3600.0
"""Longest MPI job; waits inside it are bounded one by one, so this only bounds honest work."""

_CASES = "cases.json"
_ERROR = "error.json"


def run_under_mpirun(cases: Sequence[RunCase], timeout_s: float = JOB_S) -> list[Forwarded]:
    """Run all cases, which must have one EP size, in one MPI job of that many ranks.

    Raises:
        MegaMoeError: What the ranks agreed on, with their text.
        MegaMoeAbortedError: The job ended without a result; its own messages are on stderr.
    """
    sizes = {case.ep_size for case in cases}
    if len(sizes) != 1:
        raise MegaMoeConfigError(f"one MPI job runs cases of one EP size, got {sorted(sizes)}")
    with tempfile.TemporaryDirectory(prefix="trtllm-megamoe-") as name:
        directory = Path(name)
        (directory / _CASES).write_text(json.dumps([case.model_dump(mode="json") for case in cases]))
        # mpi4py's runner ends the whole job when one rank dies of an exception
        program = ["-m", "mpi4py", "-m", "trtllm_megamoe.cli.worker", name]
        exit_code = run_mpirun(sizes.pop(), program, timeout_s)
        if (directory / _ERROR).exists():
            fault = json.loads((directory / _ERROR).read_text())
            kind = getattr(errors, fault["kind"])
            raise kind(fault["text"])
        results = [_read_result(directory / f"{index}.safetensors") for index in range(len(cases))]
    complete = [result for result in results if result is not None]
    if exit_code != 0 or len(complete) < len(cases):
        raise MegaMoeAbortedError(
            f"the MPI job ended with exit code {exit_code} and {len(complete)} of {len(cases)} results; "
            "its own messages are above"
        )
    return complete


def _write_result(path: Path, forwarded: Forwarded) -> None:
    facts = {name: value for name, value in asdict(forwarded).items() if name != "out"}
    save_file({"out": forwarded.out}, path, metadata={"facts": json.dumps(facts)})


def _read_result(path: Path) -> Forwarded | None:
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["facts"])
        if facts["saturation"] is not None:
            facts["saturation"] = SaturationReport(**facts["saturation"])
        facts["activation_mode"] = ActivationMode(facts["activation_mode"])
        if facts["calibrated"] is not None:
            scales = facts["calibrated"]
            facts["calibrated"] = CalibratedScales(scales["input_global"], tuple(scales["down_input_global"]))
        return Forwarded(out=file.get_tensor("out"), **facts)


def main() -> None:
    """Run the cases of a directory on this MPI rank; rank 0 writes results or the common error."""
    directory = Path(sys.argv[1])
    cases = [RunCase.model_validate(case) for case in json.loads((directory / _CASES).read_text())]
    comm = mpi()
    try:
        for index, case in enumerate(cases):
            forwarded = forward_case(case, read_input(case.input, case.layer), comm, show_progress=True)
            if forwarded is not None:
                _write_result(directory / f"{index}.safetensors", forwarded)
    except MegaMoeError as err:
        if comm.rank == 0:
            (directory / _ERROR).write_text(json.dumps({"kind": type(err).__name__, "text": str(err)}))


if __name__ == "__main__":
    main()
