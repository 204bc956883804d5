# SPDX-License-Identifier: Apache-2.0
"""Rules for tracked files: header, size, and nothing that belongs to one machine."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
).stdout.split("\0")[:-1]
FILES = [ROOT / name for name in TRACKED if (ROOT / name).is_file()]
PYTHON = [path for path in FILES if path.suffix == ".py" and path.stat().st_size > 0]
# what a generator of tests fills in: its sources look like the host's, not like ours
TEMPLATES = "tests/helpers/fake_host/template/"

HOST_LINES = 600
TEST_LINES = 700
KERNEL_LINES = 1100

# spelled in pieces, so that this file passes its own test
MACHINE = [
    "/" + "work/",
    "/" + "root/",
    "/" + "home/",
    r"py" + r"pi\.(org|nvidia)",
    r"files\.python" + "hosted",
    r"--(extra-)?index" + "-url",
    "--find" + "-links",
    "trusted" + "-host",
]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_are_files_to_judge() -> None:
    assert len(PYTHON) > 30


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_python_file_begins_with_licence_and_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    start = 1 if lines[0].startswith("#!") else 0
    assert lines[start] == "# SPDX-License-Identifier: Apache-2.0"
    assert name(path).startswith(TEMPLATES) or ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_python_file_is_not_too_long(path: Path) -> None:
    limits = {"vendored_kernels": KERNEL_LINES, "tests": TEST_LINES}
    limit = limits.get(path.relative_to(ROOT).parts[0], HOST_LINES)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("pattern", MACHINE)
def test_no_file_names_one_machine_or_an_index(pattern: str) -> None:
    found = []
    for path in FILES:
        if path.suffix in (".safetensors", ".png", ".o", ".so"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{name(path)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_licence_is_apache_and_notice_names_the_data() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert "tests/data" in (ROOT / "NOTICE").read_text()


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".md"], ids=name)
def test_relative_links_of_documents_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_compiler_extras_pin_the_version_that_the_registry_checks() -> None:
    from vendored_kernels.registry import DSL_VERSION

    assert f'DSL = "{DSL_VERSION}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_rivals_extra_pins_the_versions_that_were_measured() -> None:
    """Every package that a rival needs, torch apart; the newest result says which versions the times belong to."""
    from microbench.rivals.catalog import RIVALS

    extra = re.search(r"^RIVALS = \[\n(.*?)^\]", (ROOT / "setup.py").read_text(encoding="utf-8"), re.M | re.S)
    assert extra is not None
    pins = dict(re.findall(r'"([\w-]+)==([\w.]+);', extra[1]))
    assert set(pins) == {rival.distribution for rival in RIVALS} - {"torch"}
    newest = max((ROOT / "microbench" / "results" / "hopper").glob("rivals-*.json"))
    rows = json.loads(newest.read_text(encoding="utf-8"))["rivals"]["results"]
    names = {rival.name: rival.distribution for rival in RIVALS}
    measured = {names[row["rival"]]: row["version"] for row in rows if row["rival"] in names and row["version"]}
    assert pins == {name: version for name, version in measured.items() if name != "torch"}
