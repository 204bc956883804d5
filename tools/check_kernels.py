# SPDX-License-Identifier: Apache-2.0
"""What can be said about compiled kernels without a GPU: `python tools/check_kernels.py DIR`.

DIR holds objects compiled with their PTX and cubin kept. Per kernel: no stack, no local memory, no serialised wgmma, no
extra uniform moves in the main loop (SASS); acquire, release and proxy fences where the memory-order table of
`vendored_kernels/sm90/kernel.py` wants them, no approximation that docs/numerics.md forbids (PTX). Blackwell kernels:
see check_blackwell.py. Needs `cuobjdump`
and `nvdisasm` (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.bulk_stores import unwaited_bulk_stores
from tools.check_blackwell import check_blackwell

WINDOW = 40
"""PTX lines between a fence and the release that it belongs to (the branch of the one releasing thread included)."""


def find_cuobjdump() -> str:
    """From NVIDIA's wheels, which are as new as the compiler, or else from PATH."""
    for base in map(Path, sys.path):
        for path in base.glob("nvidia/*/bin/cuobjdump"):
            if os.access(path, os.X_OK) and (path.parent / "nvdisasm").exists():
                return str(path)
    found = shutil.which("cuobjdump")
    if found and shutil.which("nvdisasm"):
        return found
    raise SystemExit("cuobjdump with nvdisasm not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def sass_lines(cubin: Path, cuobjdump: str) -> tuple[list[str], str]:
    """Instructions and the resource line of a cubin."""
    text = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    usage = subprocess.run(
        [cuobjdump, "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    lines = [line for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]
    resources = next(line for line in usage.splitlines() if "REG:" in line)
    return lines, resources


def expected_wgmma(facts: dict[str, Any]) -> int:
    """wgmma instructions of all main loops: 8 per m64 tile and reduction step of a stage."""
    tile = facts["tile"]
    m64 = tile["rows"] // (64 * tile["math_warpgroups"])
    steps = 2 if tile["rows"] == 128 else 1
    return 8 * m64 * steps * len(tile["token_widths"])


def check_sass(lines: list[str], resources: str, facts: dict[str, Any]) -> list[str]:
    """Faults of the machine code."""
    faults = []
    for name in ("STACK", "LOCAL"):
        size = int(re.search(rf"{name}:(\d+)", resources)[1])  # type: ignore[index]
        if size:
            faults.append(f"{name} {size} bytes, must be 0")
    local = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines)
    if local:
        faults.append(f"{local} local memory instructions")
    wgmma = [i for i, line in enumerate(lines) if "HGMMA" in line]
    if len(wgmma) != expected_wgmma(facts):
        faults.append(f"{len(wgmma)} wgmma, expected {expected_wgmma(facts)}")
    drains = sum("gsb0, 0x0" in line for line in lines)
    pipelined = sum("gsb0, 0x1" in line for line in lines)
    widths = len(facts["tile"]["token_widths"])
    if drains != widths or pipelined != expected_wgmma(facts) // 4:
        faults.append(
            f"wgmma waits: {drains} full and {pipelined} pipelined, expected {widths} and "
            f"{expected_wgmma(facts) // 4}: the compiler serialised wgmma"
        )
    moves = sum("R2UR" in line for a, b in itertools.pairwise(wgmma) if b - a < 200 for line in lines[a:b])
    if moves > 2 * widths:
        faults.append(f"{moves} R2UR between wgmma: the stage index is not warp-uniform")
    return faults


def lint_ptx(text: str, exchange: bool) -> list[str]:
    """Faults of the memory order and of forbidden instructions; each rule fails when its instruction is removed.

    What differs with an exchange: fc2 tiles are announced to the token owners instead of this rank, size cells and
    return counters cross ranks, and the publisher waits for staged tokens before the first token load.
    """
    faults = []
    lines = [line.strip() for line in text.splitlines()]
    for word in ("tanh.approx", "ld.global.nc", "ld.volatile", "membar", ".weak."):
        if any(word in line for line in lines):
            faults.append(f"{word} must not appear")
    faults += unwaited_bulk_stores(lines)

    def positions(pattern: str) -> list[int]:
        return [i for i, line in enumerate(lines) if re.search(pattern, line)]

    fences = positions(r"^fence\.proxy\.async;")
    releases = positions(r"^red\.release\.gpu\.global\.add\.u32")
    acquires = positions(r"^ld\.acquire\.gpu\.global\.b32")
    loads = positions(r"cp\.async\.bulk\.tensor")
    if len(releases) != 3:
        third = "fc2 tile" if not exchange else "pulled piece"
        faults.append(f"{len(releases)} releases, expected 3: staged tokens, fc1 block, {third}")
    fenced = sum(
        any(max([r - WINDOW, *(other for other in releases if other < r)]) < f < r for f in fences) for r in releases
    )
    expected, what = (2, "staged tokens, fc1 block") if not exchange else (1, "fc1 block")  # pulled rows: by T alone
    if fenced != expected:
        faults.append(f"{fenced} releases follow fence.proxy.async, expected {expected}: {what}")
    if len(acquires) != 6:
        faults.append(f"{len(acquires)} acquire loads, expected two in each of three waits")
    token_acquires = [a for a in acquires if loads and a < loads[0]]
    before = 4 if not exchange else 6
    if len(token_acquires) != before:
        faults.append(f"{len(token_acquires)} acquire loads before the first token load, expected {before}")
    elif not any(token_acquires[-1] < f < loads[0] for f in fences):
        faults.append("no fence.proxy.async between the token warp's last acquire and its first TMA load")
    sites = 3 if not exchange else 9  # waits: staged, cells, payload, pool, fc1, returns; and three header words
    if len(positions(r"^st\.release\.sys\.global\.b32")) != sites:
        faults.append("every wait must raise the abort word with st.release.sys")
    readers = (3 if not exchange else 6) + 3  # every wait, the exit, and twice to name who failed
    if len(positions(r"^ld\.acquire\.sys\.global\.b32")) != readers:
        faults.append("every wait and the exit must read the abort word with ld.acquire.sys")
    if len(positions(r"^atom\.acq_rel\.gpu\.global\.add\.u32")) != 1:
        faults.append("the exit ticket must be one atom.acq_rel.gpu")
    return faults + (_lint_exchange(lines, positions) if exchange else [])


def _lint_exchange(lines: list[str], positions: Callable[[str], list[int]]) -> list[str]:
    """Faults of what crosses ranks: all at system scope; cells, and payload tags, behind a fence of the same thread."""
    faults = []
    if len(positions(r"^ld\.acquire\.sys\.global\.b64")) != 6:
        faults.append("cells, tags and return counters must be polled with ld.acquire.sys, two loads in each wait")
    if len(positions(r"^red\.release\.sys\.global\.add\.u64")) != 1:
        faults.append("return counters must be raised with one red.release.sys")
    stores = positions(r"^st\.relaxed\.sys\.global\.b64")
    fences = positions(r"^fence\.acq_rel\.sys;")
    behind = {sum(fence < store for fence in fences) for store in stores}  # the compiler may unroll the loop over cells
    if len(fences) != 2 or behind != {1, 2}:
        faults.append("size cells and payload tags must be stored with st.relaxed.sys, each behind a fence.acq_rel.sys")
    if positions(r"^(st|red|atom)\.(relaxed|release|acq_rel)\.gpu\.global\S*\.(b64|u64)"):
        faults.append("a 64-bit flag is written at GPU scope: those cross ranks")
    return faults


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes, from its cubin.

    Attributes:
        registers: Of a thread at launch.
        stack_bytes, local_bytes: Of a thread; local memory is what spilled registers live in.
        spill_instructions: Loads and stores of local memory.
        static_shared_bytes: Shared memory of the cubin; most of it is asked for at launch.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    spill_instructions: int
    static_shared_bytes: int


def read_resources(lines: list[str], resources: str) -> Resources:
    """The numbers of `sass_lines`."""
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", resources)}
    return Resources(
        registers=numbers["REG"],
        stack_bytes=numbers["STACK"],
        local_bytes=numbers["LOCAL"],
        spill_instructions=sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines),
        static_shared_bytes=numbers["SHARED"],
    )


def inspect(facts_file: Path, cuobjdump: str) -> tuple[list[str], Resources | None]:
    """All faults of one kernel, and what it takes; None where its cubin or PTX is missing."""
    facts = json.loads(facts_file.read_text())
    ptx, cubin = facts_file.with_suffix(".ptx"), facts_file.with_suffix(".cubin")
    if not ptx.is_file() or not cubin.is_file():
        return ["PTX or cubin missing: compile with the intermediates kept"], None
    lines, resources = sass_lines(cubin, cuobjdump)
    if facts["arch"] != "sm_90a":
        faults = check_blackwell(ptx.read_text(), lines, resources, facts)
    else:
        faults = check_sass(lines, resources, facts) + lint_ptx(ptx.read_text(), facts["layer"]["ep_size"] > 1)
    return faults, read_resources(lines, resources)


def check_kernel(facts_file: Path, cuobjdump: str) -> list[str]:
    """All faults of one kernel."""
    return inspect(facts_file, cuobjdump)[0]


def main() -> int:
    """Check every kernel of a directory."""
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    if not files:
        raise SystemExit(f"no kernels in {sys.argv[1]}")
    cuobjdump = find_cuobjdump()
    bad = 0
    for file in files:
        faults = check_kernel(file, cuobjdump)
        bad += bool(faults)
        print(f"{file.stem}: {'; '.join(faults) if faults else 'ok'}", flush=True)
    print(f"{len(files)} kernels, {bad} with faults")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
