# SPDX-License-Identifier: Apache-2.0
"""Everything that needs several GPUs, in one command:

    python tools/multigpu_suite.py --ranks R --out FILE.json [STEP...]

Steps: tests (tests/multigpu: oracle, one GPU's bits, three wires with both activation modes, all routings, token counts
with zeros, graph replay, late ranks, 10 000 launches), dead-rank (a rank that does not launch, then one that is killed:
named in time, and the others go on), bench (`microbench sweep` over the ranks: presets, lockstep and burst, wires,
routings, the unfused chain beside it, links). Every step has a watchdog, and all of them end within `--limit` seconds:
what is late is skipped and says so. The report is written after every step.

Kernels come from the store (TRTLLM_MEGAMOE_CACHE_DIR): `tools/needed_kernels.py ranks --ranks R`. `--rehearse` runs the
bench step on the CPU engine with a small layer, `--dry-run` prints the commands.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from microbench.environment import commit
from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment

ROOT = Path(__file__).parent.parent
STEPS = ("tests", "dead-rank", "bench")
SOAK_LAUNCHES = 10_000
_START_S = 30.0
"""What a job may need from its start to its first result, and a step that is not granted as much is skipped."""

_END_S = 8.0


@dataclass(frozen=True)
class Step:
    """One command under a watchdog. It must say `proof` (a skipped test is no success); `collect` reads its results."""

    name: str
    command: Callable[[float], list[str]]  # of the seconds that it has
    limit_s: float
    proof: str
    env: dict[str, str] = field(default_factory=dict)
    collect: Callable[[], dict[str, Any]] | None = None


def steps_of(names: list[str], ranks: int, directory: Path, rehearse: bool) -> list[Step]:
    """The named steps, in order; `directory` keeps what the bench measures."""
    pytest = ["-m", "pytest", "-q", "-x", "--color=no", "-p", "no:cacheprovider"]
    tests = mpirun_command(ranks, [*pytest, "tests/multigpu"])
    dead = [sys.executable, *pytest, "tests/gpu/test_cuda_processes.py", "-k", "dead_process"]

    def bench(seconds: float) -> list[str]:
        options = ["--engine", "cpu" if rehearse else "cuda", "--out", str(directory), "--axis-limit", "60"]
        options += ["--time-limit", f"{max(1.0, seconds - _START_S):.0f}"]
        return mpirun_command(ranks, ["-m", "microbench", "sweep", *options, *(["--small"] if rehearse else [])])

    every = {
        "tests": Step("tests", lambda _: tests, 90, " passed", {"MEGAMOE_SOAK_LAUNCHES": str(SOAK_LAUNCHES)}),
        "dead-rank": Step("dead-rank", lambda _: dead, 60, " passed", {"MEGAMOE_TEST_RANKS": str(ranks)}),
        "bench": Step("bench", bench, 600, "rows verified", collect=lambda: collected(ROOT / directory)),
    }
    return [every[name] for name in names]


def collected(directory: Path) -> dict[str, Any]:
    """What a sweep left: outcomes, all rows, agreement of two runs, links."""
    paths = {name: directory / f"{name}.json" for name in ("axes", "sweep", "agreement", "links")}
    return {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.is_file()}


def run(step: Step, seconds: float, ranks: int) -> dict[str, Any]:
    """What a step said: exit status, seconds, last lines, its own results."""
    limit = min(step.limit_s, seconds)
    command = step.command(limit)
    shown = ["python" if word == sys.executable else word for word in [Path(command[0]).name, *command[1:]]]
    result: dict[str, Any] = {"step": step.name, "command": shlex.join(shown)}
    if limit < _START_S:
        return result | {"status": f"skipped: {limit:.0f} s are left", "seconds": 0.0, "output": [], "ok": False}
    started = time.monotonic()
    environment = mpirun_environment(ranks) | step.env
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    status: int | str
    try:
        output = process.communicate(timeout=limit)[0]
        status = process.returncode
    except subprocess.TimeoutExpired:
        output = _end(process)
        status = f"killed after {limit:.0f} s"
    text = output.decode(errors="replace")
    result |= {
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "output": text.splitlines()[-60:],
        "ok": status == 0 and step.proof in text,
    }
    return result if step.collect is None else result | {"results": step.collect()}


def _end(process: subprocess.Popen[bytes]) -> bytes:
    """mpirun ends its ranks on SIGTERM; what does not listen is killed. Returns the rest of the output."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=_END_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return b""


def main() -> int:
    """Exit code 1 when any step failed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=[], metavar="STEP", help=f"any of {', '.join(STEPS)}; none: all")
    parser.add_argument("--ranks", type=int, required=True, choices=(2, 4, 8), help="GPUs")
    parser.add_argument("--out", type=Path, required=True, help="JSON report; a directory beside it keeps the bench's")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for all steps")
    parser.add_argument("--rehearse", action="store_true", help="the bench on the CPU engine, small")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    arguments = parser.parse_args()
    names = arguments.steps or (["bench"] if arguments.rehearse else list(STEPS))
    if set(names) - set(STEPS):
        parser.error(f"unknown steps {sorted(set(names) - set(STEPS))}; allowed: {', '.join(STEPS)}")
    directory = arguments.out.absolute().with_suffix("")
    if directory.is_relative_to(ROOT.absolute()):
        directory = directory.relative_to(ROOT.absolute())  # commands in results name no place of this machine
    steps = steps_of(names, arguments.ranks, directory, arguments.rehearse)
    if arguments.dry_run:
        print("\n".join(f"{step.name}: {shlex.join(step.command(step.limit_s))}" for step in steps))
        return 0
    (ROOT / directory).mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "tools/multigpu_suite.py", *sys.argv[1:]]),
        "commit": commit(),
        "ranks": arguments.ranks,
        "soak_launches": SOAK_LAUNCHES if "tests" in names else 0,
        "steps": [],
    }
    started = time.monotonic()
    for step in steps:
        result = run(step, arguments.limit - (time.monotonic() - started), arguments.ranks)
        report["steps"].append(result)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(
            f"{'ok  ' if result['ok'] else 'FAIL'} {step.name}: {result['status']}, {result['seconds']} s", flush=True
        )
        print("\n".join(result["output"][-40 if step.name == "bench" or not result["ok"] else -3 :]), flush=True)
    return 0 if all(result["ok"] for result in report["steps"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
