# SPDX-License-Identifier: Apache-2.0
"""From operand text to functions of a warp: registers, immediates, special registers, addresses. No instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import UnsupportedInstruction
from .machine import LANES, Machine, Warp
from .memory import CTA_SHIFT, SHARED_BASE

Value = Callable[[Warp], NDArray[Any]]

PARAM_SHIFT = 16
PARAM_SPACE = 0x7A0000000000
"""Where the address of a parameter points: the space, then the parameter's number above PARAM_SHIFT bits."""

_DTYPES = {
    "pred": np.bool_,
    "s8": np.int32,
    "b8": np.uint32,
    "u8": np.uint32,
    "b16": np.uint32,
    "u16": np.uint32,
    "s16": np.int32,
    "f16": np.uint32,
    "f16x2": np.uint32,
    "bf16": np.uint32,
    "bf16x2": np.uint32,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
}


_SPECIAL_STARTS = ("%t", "%l", "%c", "%n", "%g", "__")


def _special(name: str, machine: Machine) -> Value | None:
    if name[:2] not in _SPECIAL_STARTS:
        return None

    def constant(value: Callable[[Warp], int], dtype: Any = np.uint32) -> Value:
        return lambda w: np.full(LANES, value(w), dtype)

    table: dict[str, Value] = {
        "%tid.x": lambda w: w.thread_index,
        "%laneid": lambda w: w.thread_index & np.uint32(31),
        "%tid.y": constant(lambda w: 0),
        "%tid.z": constant(lambda w: 0),
        "%ctaid.x": constant(lambda w: w.cta.index),
        "%nctaid.x": constant(lambda w: machine.grid),
        "%ntid.x": constant(lambda w: machine.program.threads),
        "%cluster_ctarank": constant(lambda w: w.cta.cluster_rank),
        "%cluster_ctaid.x": constant(lambda w: w.cta.cluster_rank),
        "%globaltimer": constant(lambda w: machine.clock_ns, np.uint64),
        "__dynamic_shmem__0": constant(lambda w: w.cta.cluster_rank << CTA_SHIFT | SHARED_BASE),
    }
    return table.get(name)


def value(text: str, kind: str, machine: Machine) -> Value:
    """A getter for an operand read as PTX type `kind`; 16-bit values occupy the low half of 32 bits."""
    if kind not in _DTYPES:
        raise UnsupportedInstruction(f"type {kind}")
    dtype = np.dtype(_DTYPES[kind])
    if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        number = int(text.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
        raw = np.full(LANES, number, np.dtype(f"u{dtype.itemsize}"))
        fixed = raw != 0 if dtype == np.bool_ else raw.view(dtype)
        return lambda w: fixed
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        single = np.full(LANES, int(text[2:], 16), np.uint32).view(dtype)
        return lambda w: single
    found = re.fullmatch(r"param:(\d+)", text)
    if found:
        address = np.full(LANES, PARAM_SPACE + (int(found[1]) << PARAM_SHIFT), np.uint64).view(dtype)
        return lambda w: address
    special = _special(text, machine)
    if special is not None:
        return lambda w: special(w).view(dtype)
    if kind in ("s16", "s8"):  # 16-bit registers hold zeros above their 16 bits
        return lambda w: w.registers[text].astype(np.uint16).view(np.int16).astype(np.int32)
    if dtype in (np.int32, np.float32, np.int64, np.float64):
        return lambda w: w.registers[text].view(dtype)
    return lambda w: w.registers[text]


def address(text: str, kind: str, machine: Machine) -> Value:
    """A getter for `[base+offset]`, as 64-bit addresses; `kind` is u32 for shared, u64 for global memory."""
    inner = text.strip("[] ")
    found = re.fullmatch(r"(\S+?)\s*\+\s*(-?\d+)", inner)
    base, offset = (found[1], int(found[2])) if found else (inner, 0)
    if kind == "u32" and base.startswith("%") and machine.program.types.get(base.rstrip("0123456789") + "<>") == "b64":
        kind = "u64"
    get = value(base, kind, machine)
    step = np.uint64(offset & ((1 << 64) - 1))
    if kind == "u32":
        limit = np.uint64(0xFFFFFFFF)
        return lambda w: (get(w).astype(np.uint64) + step) & limit
    return lambda w: get(w) + step


def group(text: str) -> list[str]:
    """The elements of `{a, b}`, or the operand itself."""
    return [part.strip() for part in text.strip("{}").split(",")]


def lanes(mask: Any) -> NDArray[np.int64]:
    """Numbers of the active lanes."""
    return np.arange(LANES) if mask is None else np.nonzero(mask)[0]
