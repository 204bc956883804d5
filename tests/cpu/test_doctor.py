# SPDX-License-Identifier: Apache-2.0
"""`doctor`: every requirement has a verdict with a reason, whatever the machine lacks or has broken."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.cli import invoke
from trtllm_megamoe import doctor
from trtllm_megamoe.doctor import Finding, diagnose

REQUIREMENTS = [
    "python", "torch", "cuda", "gpu arch", "cutlass dsl", "tvm-ffi", "mpi", "tensorrt_llm", "symmetric memory",
]  # fmt: skip


def finding(requirement: str) -> Finding:
    return next(f for f in diagnose().findings if f.requirement == requirement)


def test_doctor_json_has_a_reasoned_verdict_for_every_requirement() -> None:
    result = invoke("doctor", "--json")
    report = json.loads(result.stdout)
    assert report["schema"] == "megamoe-doctor/1"
    assert [entry["requirement"] for entry in report["requirements"]] == REQUIREMENTS
    for entry in report["requirements"]:
        assert entry["verdict"] in ("ok", "missing", "unusable"), entry
        assert entry["reason"] and entry["needed_for"], entry
    assert [engine["engine"] for engine in report["engines"]] == ["cpu", "cuda"]
    # this very test runs on torch, so the CPU engine can run
    assert report["engines"][0]["can_run"] and report["can_run"]
    assert result.exit_code == 0


def test_doctor_text_names_every_requirement_engine_and_variable() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    for text in (*REQUIREMENTS, "cpu   can run", "cuda", "TRTLLM_MEGAMOE_LOG"):
        assert text in result.stdout


def test_doctor_says_what_torch_itself_says() -> None:
    assert torch.__version__ in finding("torch").reason
    assert (finding("cuda").verdict == "ok") == torch.cuda.is_available()


def test_doctor_without_torch_still_answers_and_exits_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` raise ImportError
    diagnosis = diagnose()
    verdicts = {f.requirement: f for f in diagnosis.findings}
    assert verdicts["torch"].verdict == "unusable" and "does not import" in verdicts["torch"].reason
    assert not diagnosis.can_run
    assert diagnosis.engines[0].reason.startswith("torch: ")
    assert invoke("doctor").exit_code == 2


@pytest.mark.parametrize("version", ["2.3.1", "2.3.1+cu121"])
def test_doctor_old_torch_is_unusable_and_names_the_floor(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert finding("torch").verdict == "unusable"
    assert "older than 2.4" in finding("torch").reason
    assert not diagnose().can_run


def fake_gpus(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: f"GPU {capabilities[index]}")


@pytest.mark.parametrize(
    ("capabilities", "verdict", "text"),
    [
        ([(9, 0)], "ok", "Hopper (sm_90a)"),
        ([(10, 0), (10, 3)], "ok", "not yet run on hardware"),
        ([(8, 0), (9, 0)], "ok", "not supported"),
        ([(8, 0)], "unusable", "8.0, not supported"),
        ([(12, 0)], "unusable", "12.0, not supported"),
    ],
)
def test_doctor_gpu_arch_is_judged_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], verdict: str, text: str
) -> None:
    fake_gpus(monkeypatch, capabilities)
    assert finding("gpu arch").verdict == verdict
    assert text in finding("gpu arch").reason
    assert finding("cuda").verdict == "ok"


def fake_versions(monkeypatch: pytest.MonkeyPatch, known: dict[str, str | None]) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in known:
            return real(name)
        found = known[name]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("requirement", "distribution"),
    [
        ("cutlass dsl", "nvidia-cutlass-dsl"),
        ("tvm-ffi", "apache-tvm-ffi"),
        ("mpi", "mpi4py"),
        ("tensorrt_llm", "tensorrt-llm"),
    ],
)
def test_doctor_absent_package_is_missing_with_a_next_step(
    monkeypatch: pytest.MonkeyPatch, requirement: str, distribution: str
) -> None:
    fake_versions(monkeypatch, {distribution: None})
    assert finding(requirement).verdict == "missing"
    assert distribution in finding(requirement).reason
    assert finding(requirement).next_step
    assert diagnose().can_run  # none of these is needed by the CPU engine over threads


def test_doctor_package_without_its_module_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub of tensorrt-llm on PyPI looks like this."""
    monkeypatch.setattr(doctor, "_is_importable", lambda module: module != "tensorrt_llm")
    fake_versions(monkeypatch, {"tensorrt-llm": "1.2.1"})
    assert finding("tensorrt_llm").verdict == "unusable"
    assert "1.2.1 is installed but module tensorrt_llm is not there" in finding("tensorrt_llm").reason


def test_doctor_mpi_library_that_does_not_load_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: cannot load MPI library\n")

    monkeypatch.setattr(doctor.subprocess, "run", broken)
    assert finding("mpi").verdict == "unusable"
    assert "cannot load MPI library" in finding("mpi").reason
    assert "threads only" in diagnose().engines[0].reason


def test_doctor_absent_mpirun_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert finding("mpi").verdict == "missing"
    assert "mpirun" in finding("mpi").reason


def test_doctor_hanging_mpi_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(command: list[str], **options: float) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(doctor.subprocess, "run", slow)
    assert finding("mpi").verdict == "unusable"
    assert "took over" in finding("mpi").reason


@pytest.mark.parametrize("value", ["LOUD", ""])
def test_log_variable_with_an_unknown_level_is_bad_input(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRTLLM_MEGAMOE_LOG", value)
    result = invoke("doctor")
    assert result.exit_code == 2
    assert "TRTLLM_MEGAMOE_LOG" in result.stderr and "allowed: DEBUG" in result.stderr
