# SPDX-License-Identifier: Apache-2.0
"""The environment block of a result: what ran where. A fact that cannot be read is null, never a guess.

Used by the runner on rank 0. Reads files, package metadata and git; starts no GPU context on the CPU engine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import trtllm_megamoe
from microbench.clocks import device_limits
from vendored_kernels import registry

_ROOT = Path(trtllm_megamoe.__file__).resolve().parent.parent
_GIT_S = 10.0
COMMIT_VARIABLE = "MEGAMOE_COMMIT"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=_GIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """Commit of the source tree, with `-dirty` behind it where tracked files differ.

    Where the tree is a copy without its history, what MEGAMOE_COMMIT says; None where that says nothing either.
    """
    head = _git("rev-parse", "HEAD") if (_ROOT / ".git").exists() else None
    if head is None:
        return os.environ.get(COMMIT_VARIABLE) or None
    return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def version_of(distribution: str) -> str | None:
    """Installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str | None:
    """The processor's name as the system spells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def device_name(engine_name: str) -> str | None:
    """Name of the GPU that the engine runs on; None for the CPU engine."""
    return None if engine_name == "cpu" else torch.cuda.get_device_name()


def arch_name(engine_name: str) -> str:
    """What the engine's code is built for: `cpu`, or `sm_90` and the like."""
    if engine_name == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _gpu_facts() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "sm": 10 * major + minor,
        "num_gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def collect(rows: Sequence[Mapping[str, Any]], threads_per_rank: int, launcher: str, transport: str) -> dict[str, Any]:
    """The block, by the schema's names. GPU facts are null on the CPU engine, whatever the machine has.

    Args:
        rows: All rows of the run: clocks and power are those of their timed regions, on rank 0's GPU.
    """
    facts: dict[str, Any] = {
        "package": trtllm_megamoe.__version__,
        "commit": commit(),
        "object_hashes": sorted({row["object_hash"] for row in rows if row["object_hash"] is not None}),
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hostname_hash": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads_per_rank": threads_per_rank,
        "launcher": launcher,
        "transport": transport,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cutlass_dsl": version_of("nvidia-cutlass-dsl"),
        "kernel_dsl": None,
        "kernel_sources": None,
        "tvm_ffi": version_of("apache-tvm-ffi"),
        "tensorrt_llm": version_of("tensorrt_llm"),
        "gpu": None,
        "sm": None,
        "num_gpus": None,
        "cuda": None,
        "driver": None,
        "clocks_mhz": None,
        "power_w": None,
    }
    if rows[0]["engine"] != "cpu":
        facts.update(_gpu_facts())
        facts.update(kernel_dsl=registry.DSL_VERSION, kernel_sources=registry.source_digest()[:24])
        facts.update(_clock_facts([row["clocks"] for row in rows if row["clocks"] is not None]))
    return facts


def _clock_facts(summaries: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Clocks and power over all timed regions, and the device's own limits; null where NVML says nothing."""
    if not summaries:
        return {}
    limits = device_limits(torch.cuda.current_device())

    def median(name: str) -> float:
        return float(statistics.median(summary[name] for summary in summaries))

    return {
        "clocks_mhz": {
            "sm": median("sm_mhz"),
            "sm_lowest": min(summary["sm_mhz_min"] for summary in summaries),
            "mem": median("mem_mhz"),
            **{name: value for name, value in limits.items() if name == "sm_max"},
        },
        "power_w": {
            "median": median("power_w"),
            "highest": max(summary["power_w_max"] for summary in summaries),
            **{name: value for name, value in limits.items() if name == "limit"},
        },
    }
