# SPDX-License-Identifier: Apache-2.0
"""What of this machine the package can use: one verdict with a reason per requirement, and which engines can run.

Called by the `doctor` command and by bug reports. Each probe is guarded: a broken installation is a verdict, never a
crash. Heavy packages are looked up, not imported (torch is the exception: only it knows the GPUs); MPI is loaded in a
process of its own, because importing it here would start it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import trtllm_megamoe

Verdict = Literal["ok", "missing", "unusable"]

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 4)
_PROBE_S = 60.0

_HOPPER = "Hopper (sm_90a)"
_NOT_RUN = "kernels compiled, inspected, interpreted; not yet run on hardware: launched if engine 'cuda' is asked for"
_GPU_FAMILIES = {
    (9, 0): _HOPPER,
    (10, 0): f"Blackwell (sm_100a): {_NOT_RUN}",
    (10, 3): f"Blackwell (sm_103a): {_NOT_RUN}",
}
"""Compute capability -> the family whose kernels run on it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One requirement: what was found, what that means, who needs it, and the next step where it is not met."""

    requirement: str
    verdict: Verdict
    reason: str
    needed_for: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """Whether an engine can run here, and why (not)."""

    engine: str
    can_run: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything `doctor` knows."""

    findings: tuple[Finding, ...]
    engines: tuple[EngineVerdict, ...]

    @property
    def can_run(self) -> bool:
        """Whether at least one engine can run."""
        return any(engine.can_run for engine in self.engines)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, schema `megamoe-doctor/1`."""
        return {
            "schema": "megamoe-doctor/1",
            "version": trtllm_megamoe.__version__,
            "platform": platform.platform(),
            "can_run": self.can_run,
            "requirements": [asdict(finding) for finding in self.findings],
            "engines": [asdict(engine) for engine in self.engines],
        }


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _load_torch() -> Any | None:
    """The torch module, or None where it is absent or broken (an OSError is a missing shared library)."""
    try:
        import torch
    except ImportError:
        return None
    except OSError:
        return None
    return torch


def _python() -> Finding:
    is_new_enough = sys.version_info >= MIN_PYTHON
    return Finding(
        "python",
        "ok" if is_new_enough else "unusable",
        f"{platform.python_version()}, needs {'.'.join(map(str, MIN_PYTHON))} or newer",
        "everything",
        "" if is_new_enough else "install a newer Python",
    )


def _torch() -> Finding:
    needed_for = "everything"
    torch = _load_torch()
    if torch is None:
        installed = _installed_version("torch")
        if installed is None:
            return Finding("torch", "missing", "not installed", needed_for, "pip install torch")
        text = f"{installed} is installed but does not import"
        return Finding("torch", "unusable", text, needed_for, "reinstall torch")
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < MIN_TORCH:
        text = f"{version} is older than {'.'.join(map(str, MIN_TORCH))}"
        return Finding("torch", "unusable", text, needed_for, "pip install -U torch")
    return Finding("torch", "ok", version, needed_for)


def _cuda() -> Finding:
    needed_for = "cuda engine"
    torch = _load_torch()
    if torch is None:
        return Finding("cuda", "missing", "unknown without torch", needed_for, "install torch first")
    if torch.version.cuda is None:
        return Finding(
            "cuda", "missing", "this torch is built without CUDA", needed_for, "install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        text = f"torch is built for CUDA {torch.version.cuda}, but no driver or no GPU is visible"
        return Finding("cuda", "missing", text, needed_for, "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return Finding("cuda", "ok", f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPU(s)", needed_for)


def _gpu_arch() -> Finding:
    needed_for = "cuda engine"
    torch = _load_torch()
    if torch is None or not torch.cuda.is_available():
        return Finding("gpu arch", "missing", "no GPU visible", needed_for, "run on a Hopper or Blackwell GPU")
    seen = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        family = _GPU_FAMILIES.get(capability, "not supported")
        seen.append((torch.cuda.get_device_name(index), capability, family))
    text = ", ".join(sorted({f"{name}: {major}.{minor}, {family}" for name, (major, minor), family in seen}))
    families = {family for _, _, family in seen}
    if families <= {"not supported"}:
        return Finding("gpu arch", "unusable", text, needed_for, "run on a Hopper or Blackwell GPU")
    if _HOPPER not in families:
        return Finding("gpu arch", "ok", text, needed_for, "check the kernels first: python -m trtllm_megamoe selftest")
    return Finding("gpu arch", "ok", text, needed_for)


def _package(requirement: str, distribution: str, module: str, needed_for: str, next_step: str) -> Finding:
    version = _installed_version(distribution)
    if version is None:
        return Finding(requirement, "missing", f"{distribution} is not installed", needed_for, next_step)
    if not _is_importable(module):
        text = f"{distribution} {version} is installed but module {module} is not there"
        return Finding(requirement, "unusable", text, needed_for, next_step)
    return Finding(requirement, "ok", f"{distribution} {version}", needed_for)


def _dsl() -> Finding:
    step = "pip install 'trtllm-megamoe[cu13]'"
    return _package("cutlass dsl", "nvidia-cutlass-dsl", "cutlass", "compiling kernels", step)


def _tvm_ffi() -> Finding:
    step = "pip install 'trtllm-megamoe[cu13]'"
    return _package("tvm-ffi", "apache-tvm-ffi", "tvm_ffi", "launching compiled kernels", step)


def _mpi() -> Finding:
    needed_for = "ranks as processes (run --transport mpi, microbench)"
    step = "pip install 'trtllm-megamoe[bench]'"
    finding = _package("mpi", "mpi4py", "mpi4py", needed_for, step)
    if finding.verdict != "ok":
        return finding
    try:
        from trtllm_megamoe.comm.launch import find_mpirun

        mpirun = find_mpirun()
    except ImportError:
        return Finding("mpi", "unusable", "the launcher code needs torch", needed_for, "install torch first")
    except trtllm_megamoe.MegaMoeError as err:
        return Finding("mpi", "missing", str(err), needed_for, step)
    # MPI starts on import: ask a process of its own, and do not start it even there
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("mpi", "unusable", f"loading the MPI library took over {_PROBE_S:g} s", needed_for, step)
    if probe.returncode != 0:
        last_line = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("mpi", "unusable", f"{finding.reason} loads no MPI library: {last_line}", needed_for, step)
    library = probe.stdout.strip().splitlines()[0].split(",")[0]
    return Finding("mpi", "ok", f"{finding.reason}, {library}, {mpirun.name} found", needed_for)


def _tensorrt_llm() -> Finding:
    step = "install tensorrt_llm 1.3.0rc22 or newer from its own index"
    return _package("tensorrt_llm", "tensorrt-llm", "tensorrt_llm", "the MEGAMOE_CUTEDSL plug-in only", step)


def _symmetric_memory() -> Finding:
    needed_for = "cuda engine on several GPUs"
    torch = _load_torch()
    if torch is None:
        return Finding("symmetric memory", "missing", "unknown without torch", needed_for, "install torch first")
    if not _is_importable("torch.distributed._symmetric_memory"):
        text = f"torch {torch.__version__} has no symmetric memory"
        return Finding("symmetric memory", "missing", text, needed_for, "pip install -U torch")
    if not torch.cuda.is_available():
        return Finding("symmetric memory", "missing", "torch has it, but there is no GPU to map", needed_for)
    return Finding("symmetric memory", "ok", f"torch {torch.__version__}", needed_for)


_PROBES: tuple[Callable[[], Finding], ...] = (
    _python, _torch, _cuda, _gpu_arch, _dsl, _tvm_ffi, _mpi, _tensorrt_llm, _symmetric_memory,
)  # fmt: skip


def _judge_cpu(met: dict[str, Finding]) -> EngineVerdict:
    for name in ("python", "torch"):
        if met[name].verdict != "ok":
            return EngineVerdict("cpu", False, f"{name}: {met[name].reason}")
    transports = "threads and MPI ranks" if met["mpi"].verdict == "ok" else "threads only (no MPI)"
    return EngineVerdict("cpu", True, f"torch on this machine's cores; {transports}")


def _judge_cuda(met: dict[str, Finding]) -> EngineVerdict:
    for name in ("python", "torch"):
        if met[name].verdict != "ok":
            return EngineVerdict("cuda", False, f"{name}: {met[name].reason}")
    from trtllm_megamoe.engines.registry import choose_engine

    try:
        choice = choose_engine("cuda", ep_size=1)
    except trtllm_megamoe.MegaMoeError as err:
        return EngineVerdict("cuda", False, str(err))
    return EngineVerdict("cuda", True, choice.reason)


def diagnose() -> Diagnosis:
    """Probe this machine. Changes nothing, needs no GPU, takes a few seconds (torch is imported)."""
    findings = tuple(probe() for probe in _PROBES)
    met = {finding.requirement: finding for finding in findings}
    return Diagnosis(findings, (_judge_cpu(met), _judge_cuda(met)))
