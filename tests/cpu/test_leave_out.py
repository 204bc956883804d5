# SPDX-License-Identifier: Apache-2.0
"""tools/leave_out.py: every edit fits the present kernel sources once, and changes nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.leave_out import POINTS, ROOT, VARIANTS, WHOLE, Edit, config_of, patched_copy

KERNEL = ROOT / "vendored_kernels"


@pytest.mark.parametrize("variant", VARIANTS)
def test_edits_fit_the_sources_and_leave_python(variant: str, tmp_path: Path) -> None:
    patched_copy(variant, tmp_path)
    changed = set()
    for file in sorted(KERNEL.rglob("*.py")):
        copy = tmp_path / "vendored_kernels" / file.relative_to(KERNEL)
        if copy.read_text() != file.read_text():
            changed.add(file.relative_to(KERNEL / "sm90").as_posix())
            ast.parse(copy.read_text())
    assert changed == {edit.file for edit in VARIANTS[variant][1]}
    assert bool(changed) == (variant != WHOLE)


@pytest.mark.parametrize(("text", "times"), [("nothing of it", 0), ("a line, a line", 2)])
def test_an_edit_that_does_not_fit_once_is_refused(text: str, times: int, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(text)
    with pytest.raises(ValueError, match=rf"kernel\.py: expected once, found {times} times"):
        Edit("kernel.py", "a line", "another").apply(tmp_path)
    assert (tmp_path / "kernel.py").read_text() == text


def test_points_are_kernels_of_the_product() -> None:
    assert [config_of(*point).tile.name for point in POINTS] == ["n64", "n128", "n64", "n128", "h64"]
