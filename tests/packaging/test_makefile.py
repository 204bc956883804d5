# SPDX-License-Identifier: Apache-2.0
"""`make` on a machine that lacks something says the one line that installs it; on a ready one it installs nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=directory, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    for name in ("Makefile", "setup.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def fake_python(directory: Path, script: str) -> str:
    path = directory / "python3.11"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("target", ["test", "bench", "lint"])
def test_make_without_python_names_the_packages(fresh: Path, target: str) -> None:
    done = make(fresh, target, "PYTHON=no-such-python")
    assert done.returncode != 0
    assert done.stderr.count("apt-get install") == 1
    assert "'no-such-python' not found" in done.stderr and "apt-get install -y python3 python3-venv" in done.stderr
    assert not (fresh / ".venv").exists()


def test_make_with_an_old_python_names_a_newer_one(fresh: Path) -> None:
    done = make(fresh, "test", f"PYTHON={fake_python(fresh, 'exit 1')}")
    assert done.returncode != 0
    assert "older than 3.10" in done.stderr and done.stderr.count("apt-get install") == 1


def test_make_without_the_venv_module_names_its_package(fresh: Path) -> None:
    python = fake_python(fresh, 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    done = make(fresh, "test", f"PYTHON={python}")
    assert done.returncode != 0
    assert "apt-get install -y python3.11-venv" in done.stderr and done.stderr.count("apt-get install") == 1


def test_make_with_a_finished_environment_installs_nothing(fresh: Path) -> None:
    (fresh / ".venv").mkdir()
    (fresh / ".venv" / ".installed").touch()
    plan = make(fresh, "--dry-run", "test", "bench", "PYTHON=no-such-python")
    assert plan.returncode == 0, plan.stderr
    assert "pip install" not in plan.stdout
    for text in ("ruff check", "-m mypy", "-m pytest", "-n 8", "-m microbench"):
        assert text in plan.stdout, text


def test_continuous_integration_script_is_strict_and_calls_make() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script and "make test" in script
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True, timeout=60)
