# SPDX-License-Identifier: Apache-2.0
"""Everything that needs several GPUs: `python tools/multigpu_suite.py --ranks R --out FILE.json [PART...]`.

Parts: tests (tests/multigpu: oracle, one GPU's bits, graphs, delays), soak (10 000 launches of it), dead-rank (a killed
process is named in time), and a benchmark per preset: v4-pro, v4-flash, dsv3, each GPU with its share of an EP8 layer,
1 to 8192 tokens a rank. `--wires` and `--modes` widen the benchmarks. Every step has a watchdog; a step that fails or
hangs is recorded and the next one runs. Kernels come from the cache (TRTLLM_MEGAMOE_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment

ROOT = Path(__file__).parent.parent
PRESETS = {"v4-pro": "deepseek-v4-pro", "v4-flash": "deepseek-v4-flash", "dsv3": "deepseek-v3"}
PARTS = ("tests", "soak", "dead-rank", *PRESETS)
SHARES = 8
"""Each GPU holds the experts of one rank of so many."""

TOKENS = "1,8,64,512,2048,8192"


@dataclass(frozen=True)
class Step:
    """One command under a watchdog. It must say `proof` (a skipped test is no success); `report` is its JSON file."""

    name: str
    command: list[str]
    limit_s: float
    proof: str
    env: dict[str, str] = field(default_factory=dict)
    report: Path | None = None


def steps_of(parts: list[str], ranks: int, wires: str, modes: str, scratch: Path) -> list[Step]:
    """The steps of the named parts, in order."""
    pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    steps = []
    for part in parts:
        if part == "tests":
            steps.append(Step(part, mpirun_command(ranks, [*pytest, "tests/multigpu"]), 180, " passed"))
        elif part == "soak":
            command = mpirun_command(ranks, [*pytest, "tests/multigpu", "-k", "many_launches"])
            steps.append(Step(part, command, 180, " passed", {"MEGAMOE_SOAK_LAUNCHES": "10000"}))
        elif part == "dead-rank":
            steps.append(
                Step(
                    part, [sys.executable, *pytest, "tests/gpu/test_cuda_processes.py", "-k", "killed"], 180, " passed"
                )
            )
        else:
            for mode in modes.split(","):
                report = scratch / f"{part}-{mode}.json"
                command = ["-m", "microbench", "--engine", "cuda", "--expect-engine", "cuda"]
                command += ["--preset", PRESETS[part], "--scale-experts", str(SHARES // ranks)]
                command += ["--tokens-per-rank", TOKENS, "--activations", mode, "--combine-format", wires]
                command += ["--cuda-graph", "--mode", "lockstep,burst", "--json", str(report)]
                steps.append(Step(f"{part} {mode}", mpirun_command(ranks, command), 240, "verified", report=report))
    return steps


def run(step: Step, ranks: int) -> dict[str, Any]:
    """What a step said: exit status, seconds, last lines, its own report."""
    started = time.monotonic()
    environment = mpirun_environment(ranks) | step.env
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = subprocess.Popen(step.command, cwd=ROOT, env=environment, **pipes)
    status: int | str
    try:
        output = process.communicate(timeout=step.limit_s)[0]
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output = process.communicate()[0]
        status = f"killed after {step.limit_s:g} s"
    result: dict[str, Any] = {
        "step": step.name,
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in step.command),
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "output": output.decode(errors="replace").splitlines()[-40:],
        "ok": status == 0 and step.proof in output.decode(errors="replace"),
    }
    if step.report is not None and step.report.is_file():
        result["report"] = json.loads(step.report.read_text())
    return result


def main() -> int:
    """Exit code 1 when any step failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--ranks", type=int, required=True, choices=(2, 4, 8), help="GPUs")
    parser.add_argument("--out", type=Path, required=True, help="JSON report, written after every step")
    parser.add_argument("--wires", default="bf16", help="combine formats of the benchmarks")
    parser.add_argument("--modes", default="bf16,nvfp4", help="activation modes of the benchmarks")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; allowed: {', '.join(PARTS)}")
    report: dict[str, Any] = {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "ranks": arguments.ranks,
        "steps": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        for step in steps_of(arguments.parts, arguments.ranks, arguments.wires, arguments.modes, Path(scratch)):
            result = run(step, arguments.ranks)
            report["steps"].append(result)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            print(
                f"{'ok  ' if result['ok'] else 'FAIL'} {step.name}: {result['status']}, {result['seconds']} s",
                flush=True,
            )
            if not result["ok"]:
                print("\n".join(result["output"][-15:]), flush=True)
    return 0 if all(result["ok"] for result in report["steps"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
