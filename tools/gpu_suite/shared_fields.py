# SPDX-License-Identifier: Apache-2.0
"""Which field of the Hopper kernel's shared storage an address lies in, and which warp a thread is: for racecheck.

The fields are read from the source of the kernel's `Storage`, so that they are written down once; pure, needs no DSL.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vendored_kernels
from trtllm_megamoe.formats import round_up
from vendored_kernels.sm90.config import KernelConfig

SYSTEM_BYTES = 0x400
"""A block's own shared memory begins behind what the system keeps of it (compute capability 8.0 and above)."""

BLOCK_WINDOW = 1 << 24
"""Addresses of shared memory carry the block's number in its cluster above this."""

_ROOT = Path(vendored_kernels.__file__).parent
_ELEMENT_BYTES = {"Int64": 8, "Int32": 4, "Uint8": 1}
_CONSTANTS = {
    "stamps.SHARED_BYTES": "common/stamps.py",
    "staging.NOTED_WORDS": "sm90/staging.py",
    "CONTROL_BYTES": "common/units.py",
}
"""Numbers that the fields' sizes are made of -> the file that says them."""

ROLES = ("W", "T", "R", "Z")


@dataclass(frozen=True, slots=True)
class Field:
    """A named part of the kernel's shared memory; `offset` counts from the begin of the kernel's own."""

    name: str
    offset: int
    size: int


def fields(config: KernelConfig) -> list[Field]:
    """All fields in order: each at the next multiple of its alignment, as in C."""
    found: list[Field] = []
    end = 0
    for name, elements, element_bytes, align in _declared(config):
        start = round_up(end, align)
        end = start + elements * element_bytes
        found.append(Field(name, start, end - start))
    return found


def _declared(config: KernelConfig) -> list[tuple[str, int, int, int]]:
    """(name, elements, bytes of an element, alignment) of each field of `Storage`."""
    tree = ast.parse((_ROOT / "sm90" / "kernel.py").read_text("utf-8"))
    storage = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "Storage")
    declared = []
    for line in storage.body:
        assert isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        text = ast.unparse(line.annotation)
        found = re.fullmatch(r"(?:cute\.struct\.Align\[)?cute\.struct\.MemRange\[(\w+), (.*?)\](?:, (\d+)\])?", text)
        if found is None:
            raise ValueError(f"sm90/kernel.py: Storage.{line.target.id} is declared in an unknown way: {text}")
        element_bytes = _ELEMENT_BYTES[found[1]]
        elements = _evaluate(found[2], config)
        declared.append((line.target.id, elements, element_bytes, int(found[3] or element_bytes)))
    return declared


def _evaluate(size: str, config: KernelConfig) -> int:
    names: dict[str, Any] = {"cfg": config, "tile": config.tile, "max": max, "__builtins__": {}}
    for name, path in _CONSTANTS.items():
        if name in size:
            size = size.replace(name, str(_constant(name.split(".")[-1], path)))
    return int(eval(size, names))  # an expression of our own source


def _constant(name: str, path: str) -> int:
    """A number that a file says, perhaps by others that it says."""
    said = re.search(rf"^{name} = (.+)$", (_ROOT / path).read_text("utf-8"), re.MULTILINE)
    if said is None:
        raise ValueError(f"{path} does not say {name}")
    others = {other: _constant(other, path) for other in re.findall(r"[A-Z][A-Z_]+", said[1])}
    return int(eval(said[1], {"__builtins__": {}}, others))


def field_at(address: int, known: list[Field]) -> tuple[str, int]:
    """The field of a shared address as racecheck reports it, and the offset inside; `outside` where there is none."""
    offset = address % BLOCK_WINDOW - SYSTEM_BYTES
    for field in known:
        if field.offset <= offset < field.offset + field.size:
            return field.name, offset - field.offset
    return "outside", offset


def role_of(thread: int, config: KernelConfig) -> str:
    """What a thread's warp does: math, W, T, R, Z, or D (dispatch)."""
    single = thread // 32 - 4 * config.tile.math_warpgroups
    if single < 0:
        return "math"
    return ROLES[single] if single < len(ROLES) else "D"
