# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the packages and their data and nothing else, and its metadata is what setup.py promises."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import trtllm_megamoe

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trtllm_megamoe/", "vendored_kernels/", "microbench/")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the tracked files, so that nothing left in the work tree gets in."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if not name.startswith("tests/data/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    suffixes = (".py", ".typed", ".json")
    wanted = {
        name
        for name in tracked()
        if name.startswith(PACKAGES) and name.endswith(suffixes) and not name.startswith("microbench/results/")
    }
    assert wanted <= set(wheel.namelist())
    assert "trtllm_megamoe/py.typed" in wanted


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    others = [n for n in wheel.namelist() if not n.startswith(PACKAGES) and ".dist-info/" not in n]
    assert others == []
    assert not any("test" in Path(name).parts for name in wheel.namelist())


def test_wheel_carries_licence_and_notice(wheel: zipfile.ZipFile) -> None:
    names = [Path(name).name for name in wheel.namelist() if ".dist-info/" in name]
    assert "LICENSE" in names and "NOTICE" in names


def test_wheel_metadata_is_as_promised(wheel: zipfile.ZipFile) -> None:
    facts = metadata(wheel)
    assert facts["Name"] == "trtllm-megamoe"
    assert facts["Version"] == trtllm_megamoe.__version__
    assert facts["Requires-Python"] == ">=3.10"
    assert set(facts.get_all("Provides-Extra", [])) >= {"cu12", "cu13", "bench", "rivals", "dev"}
    required = [entry for entry in facts.get_all("Requires-Dist", []) if "extra ==" not in entry]
    (torch,) = (entry for entry in required if entry.startswith("torch"))
    assert torch == "torch>=2.4"  # open upwards: a host pins its own
    assert not any(entry.startswith(("tensorrt", "nvidia")) for entry in required)
    (entry_points,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "trtllm-megamoe = trtllm_megamoe.__main__:program" in wheel.read(entry_points).decode()
