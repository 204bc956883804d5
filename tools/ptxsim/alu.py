# SPDX-License-Identifier: Apache-2.0
"""Register-only instructions: integers, predicates, fp32, f16 pairs and conversions.

Approximations (rcp, ex2) are those of approx.py: exact and rounded once, where no GPU's are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import approx, values
from .errors import SimError, UnsupportedInstruction
from .machine import LANES, Machine, Mask, Warp
from .operands import group, value
from .parse import Instruction

Function = Callable[[Warp, Mask], Any]
A = Any

_INTEGERS = ("u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64")
_WITH_BYTES = (*_INTEGERS, "u8", "s8")
_UNSIGNED = {"s32": "u32", "s64": "u64", "s16": "u16"}


def _bits(kind: str) -> int:
    return 64 if kind.endswith("64") else 16 if kind in ("u16", "s16", "b16", "f16", "bf16") else 32


def _raw(x: A) -> A:
    """The bits of a result, as registers hold them."""
    if x.dtype == bool:
        return x
    return np.ascontiguousarray(x).view(np.uint64 if x.itemsize == 8 else np.uint32)


def _apply(ins: Instruction, machine: Machine, kinds: list[str], fn: Callable[..., A]) -> Function:
    """d = fn(sources), sources read as `kinds`."""
    target = ins.operands[0]
    get = [value(text, kind, machine) for text, kind in zip(ins.operands[1:], kinds, strict=True)]
    if len(get) == 1:
        one = get[0]
        return lambda w, m: w.put(target, _raw(fn(one(w))), m)
    if len(get) == 2:
        a, b = get
        return lambda w, m: w.put(target, _raw(fn(a(w), b(w))), m)
    return lambda w, m: w.put(target, _raw(fn(*[g(w) for g in get])), m)


def _divide(a: A, b: A) -> A:
    if (b == 0).any():
        raise SimError("integer division by zero")
    x, y = a.astype(object), b.astype(object)
    quotient = [abs(int(p)) // abs(int(q)) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(x, y, strict=True)]
    return np.array(quotient).astype(a.dtype)


def _remainder(a: A, b: A) -> A:
    return a - _divide(a, b) * b


def _shift_left(a: A, b: A) -> A:
    bits = np.uint32(8 * a.itemsize)
    return np.where(b >= bits, a.dtype.type(0), a << np.minimum(b, bits - 1).astype(a.dtype))


def _shift_right(a: A, b: A) -> A:
    bits = np.uint32(8 * a.itemsize)
    shifted = a >> np.minimum(b, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(b >= bits, a.dtype.type(0), shifted)


def _lop3(ins: Instruction, machine: Machine) -> Function:
    table = int(ins.operands[4], 0)
    get = [value(text, "b32", machine) for text in ins.operands[1:4]]

    def run(w: Warp, m: Mask) -> None:
        a, b, c = (g(w) for g in get)
        out = np.zeros(LANES, np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        w.put(ins.operands[0], out, m)

    return run


def _permute(a: A, b: A, selector: A) -> A:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros(LANES, np.uint64)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        out |= np.where(nibble & np.uint32(8), sign, byte) << np.uint64(8 * i)
    return out.astype(np.uint32)


def _funnel(left: bool, wrap: bool) -> Callable[[A, A, A], A]:
    def run(low: A, high: A, count: A) -> A:
        n = (count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return run


_COMPARE: dict[str, Callable[[A, A], A]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _compare_unordered(fn: Callable[[A, A], A]) -> Callable[[A, A], A]:
    return lambda a, b: fn(a, b) | np.isnan(a) | np.isnan(b)


def _setp(ins: Instruction, machine: Machine) -> Function:
    kind = ins.parts[-1]
    name = ins.parts[1]
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        fn = _compare_unordered(_COMPARE[name[:2]])
    elif name == "nan":
        fn = lambda a, b: np.isnan(a) | np.isnan(b)  # noqa: E731
    elif name == "ne" and kind == "f32":
        fn = lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)  # noqa: E731
    else:
        fn = _COMPARE[name]
    if "|" in ins.operands[0]:
        raise UnsupportedInstruction(ins.text)
    joined = next((p for p in ins.parts[2:-1] if p in ("and", "or", "xor")), None)
    if joined is None:
        return _apply(ins, machine, [kind, kind], fn)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[joined]
    return _apply(ins, machine, [kind, kind, "pred"], lambda a, b, c: join(fn(a, b), c))


def _mov(ins: Instruction, machine: Machine) -> Function:
    kind = ins.parts[-1]
    target, source = ins.operands
    bits = _bits(kind)
    if source.startswith("{"):
        parts = group(source)
        width = bits // len(parts)
        get = [value(part, "b32" if width <= 32 else "b64", machine) for part in parts]
        keep = np.uint64((1 << width) - 1)

        def pack(w: Warp, m: Mask) -> None:
            out = np.zeros(LANES, np.uint64)
            for i, g in enumerate(get):
                out |= (g(w).astype(np.uint64) & keep) << np.uint64(width * i)
            w.put(target, out if bits == 64 else out.astype(np.uint32), m)

        return pack
    if target.startswith("{"):
        parts = group(target)
        width = bits // len(parts)
        get_one = value(source, kind, machine)

        def unpack(w: Warp, m: Mask) -> None:
            raw = get_one(w).astype(np.uint64)
            for i, part in enumerate(parts):
                piece = (raw >> np.uint64(width * i)) & np.uint64((1 << width) - 1)
                w.put(part, piece if width == 64 else piece.astype(np.uint32), m)

        return unpack
    return _apply(ins, machine, [kind], lambda a: a.copy())


def _minimum(nan: bool, larger: bool) -> Callable[[A, A], A]:
    """min / max of fp32: -0 below +0; NaN passes with .NaN, else the other operand."""
    choose, pick = (np.maximum, np.fmax) if larger else (np.minimum, np.fmin)

    def run(a: A, b: A) -> A:
        out = choose(a, b) if nan else pick(a, b)
        both_zero = (a == 0) & (b == 0)
        sign = np.signbit(a) & np.signbit(b) if larger else np.signbit(a) | np.signbit(b)
        out = np.where(both_zero, np.where(sign, np.float32(-0.0), np.float32(0.0)), out)
        return np.where(np.isnan(out), np.uint32(0x7FFFFFFF).view(np.float32), out).astype(np.float32)

    return run


def _f32(ins: Instruction, machine: Machine) -> Function:
    base = ins.parts[0]
    functions: dict[str, Callable[..., A]] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "fma": values.fma_f32,
        "abs": np.abs,
        "neg": np.negative,
        "min": _minimum(ins.has("NaN"), False),
        "max": _minimum(ins.has("NaN"), True),
        "div": lambda a, b: (a / b).astype(np.float32),
        "rcp": lambda a: approx.evaluate("rcp", a),
        "ex2": lambda a: approx.evaluate("ex2", a),
    }
    if base not in functions or any(p in ("rz", "rm", "rp", "sat") for p in ins.parts):
        raise UnsupportedInstruction(ins.text)
    fn = functions[base]
    if base == "div" and ins.has("approx"):
        raise UnsupportedInstruction(ins.text)
    if ins.has("ftz"):
        plain = fn
        fn = lambda *a: values.flush(plain(*[values.flush(x) for x in a]))  # noqa: E731
    return _apply(ins, machine, ["f32"] * (len(ins.operands) - 1), fn)


def _f16x2(ins: Instruction, machine: Machine) -> Function:
    functions: dict[str, Callable[[A, A], A]] = {"mul": np.multiply, "add": np.add, "sub": np.subtract}
    if ins.parts[0] not in functions:
        raise UnsupportedInstruction(ins.text)
    fn = functions[ins.parts[0]]

    def run(a: A, b: A) -> A:
        x, y = a.view(np.float16), b.view(np.float16)
        return np.asarray(fn(x, y), np.float16).view(np.uint32)

    return _apply(ins, machine, ["b32", "b32"], run)


def _halves(a: A) -> tuple[A, A]:
    return a & np.uint32(0xFFFF), a >> np.uint32(16)


def _e4m3_pair_to_f16(a: A) -> A:
    low = values.f16_bits(values.E4M3_VALUES[a & np.uint32(255)])
    high = values.f16_bits(values.E4M3_VALUES[(a >> np.uint32(8)) & np.uint32(255)])
    return low | high << np.uint32(16)


_CONVERT: dict[str, tuple[list[str], Callable[..., A]]] = {
    "rn.bf16.f32": (["f32"], values.bf16_bits),
    "rn.bf16x2.f32": (["f32", "f32"], lambda a, b: values.bf16_bits(a) << np.uint32(16) | values.bf16_bits(b)),
    "rn.f16.f32": (["f32"], values.f16_bits),
    "rn.f16x2.f32": (["f32", "f32"], lambda a, b: values.f16_bits(a) << np.uint32(16) | values.f16_bits(b)),
    "f32.f16": (["b16"], values.f16_value),
    "f32.bf16": (["b16"], lambda a: (a << np.uint32(16)).view(np.float32)),
    "rn.satfinite.e4m3x2.f32": (["f32", "f32"], lambda a, b: values.e4m3_code(a) << np.uint32(8) | values.e4m3_code(b)),
    "rn.f16x2.e4m3x2": (["b16"], _e4m3_pair_to_f16),
    "rn.satfinite.e2m1x2.f32": (["f32", "f32"], lambda a, b: values.e2m1_code(a) << np.uint32(4) | values.e2m1_code(b)),
    "rn.f32.s32": (["s32"], lambda a: a.astype(np.float32)),
    "rn.f32.u32": (["u32"], lambda a: a.astype(np.float32)),
    "rzi.s32.f32": (
        ["f32"],
        lambda a: np.trunc(np.nan_to_num(a)).astype(np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32),
    ),
}


def _cvt(ins: Instruction, machine: Machine) -> Function:
    suffix = ".".join(ins.parts[1:])
    if suffix in _CONVERT:
        kinds, fn = _CONVERT[suffix]
        return _apply(ins, machine, kinds, fn)
    to, source = ins.parts[-2:]
    if len(ins.parts) == 3 and to in _WITH_BYTES and source in _WITH_BYTES:

        def widen(a: A) -> A:
            if source in ("u16", "b16"):
                a = a & np.uint32(0xFFFF)
            elif source == "u8":
                a = a & np.uint32(0xFF)
            elif source == "s16":
                a = a.astype(np.int16)
            elif source == "s8":
                a = a.astype(np.int8)
            if _bits(to) == 64:
                return a.astype(np.int64) if source.startswith("s") else a.astype(np.uint64)
            out = a.astype(np.int32).view(np.uint32) if source.startswith("s") else a.astype(np.uint32)
            if to == "s8":
                out = out.astype(np.int8).astype(np.int32).view(np.uint32)
            elif to == "u8":
                out = out & np.uint32(0xFF)
            return out & np.uint32(0xFFFF) if _bits(to) == 16 or to.endswith("8") else out

        return _apply(ins, machine, [source], widen)
    raise UnsupportedInstruction(ins.text)


def compile_alu(ins: Instruction, machine: Machine) -> Function | None:
    """A function of (warp, mask), or None if this is no arithmetic."""
    base, kind = ins.parts[0], ins.parts[-1]
    if base == "mov":
        return _mov(ins, machine)
    if base == "setp":
        return _setp(ins, machine)
    if base == "cvt":
        return _cvt(ins, machine)
    if base == "lop3":
        return _lop3(ins, machine)
    if base == "cvta":
        return _apply(ins, machine, ["b64"], lambda a: a.copy())
    if base == "mapa":
        return _apply(ins, machine, ["b32", "b32"], lambda a, b: (a & np.uint32(0xFFFFFF)) | b << np.uint32(24))
    if base == "prmt":
        return _apply(ins, machine, ["b32"] * 3, _permute)
    if base == "shf":
        return _apply(ins, machine, ["b32"] * 3, _funnel(ins.has("l"), ins.has("wrap")))
    if base == "selp":
        return _apply(ins, machine, [kind, kind, "pred"], lambda a, b, p: np.where(p, a, b))
    if kind == "f32":
        return _f32(ins, machine)
    if kind == "f16x2":
        return _f16x2(ins, machine)
    if kind == "pred":
        fns: dict[str, Callable[..., A]] = {
            "and": np.logical_and,
            "or": np.logical_or,
            "xor": np.logical_xor,
            "not": np.logical_not,
        }
        return _apply(ins, machine, ["pred"] * (len(ins.operands) - 1), fns[base]) if base in fns else None
    if kind not in _INTEGERS:
        return None
    found = _integer(ins, machine, base, kind)
    if found is None or _bits(kind) != 16 or ins.has("wide"):
        return found

    def narrow(w: Warp, m: Mask) -> None:
        found(w, m)
        w.registers[ins.operands[0]] = w.registers[ins.operands[0]] & np.uint32(0xFFFF)

    return narrow


def _integer(ins: Instruction, machine: Machine, base: str, kind: str) -> Function | None:
    if base in ("mul", "mad") and ins.has("wide"):
        wide: Any = {"s32": np.int64, "u32": np.uint64, "s16": np.int32, "u16": np.uint32}[kind]
        if base == "mul":
            return _apply(ins, machine, [kind, kind], lambda a, b: a.astype(wide) * b.astype(wide))
        return _apply(
            ins,
            machine,
            [kind, kind, "s64" if kind == "s32" else "u64"],
            lambda a, b, c: a.astype(wide) * b.astype(wide) + c,
        )
    if base == "mul" and ins.has("hi"):
        wide = np.int64 if kind == "s32" else np.uint64
        narrow = np.int32 if kind == "s32" else np.uint32
        return _apply(
            ins, machine, [kind, kind], lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(narrow)
        )
    if base == "mad" and ins.has("lo"):
        return _apply(ins, machine, [_UNSIGNED.get(kind, kind)] * 3, lambda a, b, c: a * b + c)
    if base in ("shl", "shr"):
        return _apply(ins, machine, [kind, "u32"], _shift_left if base == "shl" else _shift_right)
    functions: dict[str, Callable[..., A]] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
        "neg": np.negative,
        "abs": np.abs,
        "min": np.minimum,
        "max": np.maximum,
        "div": _divide,
        "rem": _remainder,
        "popc": lambda a: np.array([bin(int(x)).count("1") for x in a], np.uint32),
        "clz": lambda a: np.array([8 * a.itemsize - int(x).bit_length() for x in a], np.uint32),
        "bfind": lambda a: np.array([(32 - int(x).bit_length()) if x else 0xFFFFFFFF for x in a], np.uint32),
        "brev": lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], np.uint32),
    }
    if base not in functions or len(ins.parts) > (3 if base in ("mul", "bfind") else 2):
        return None
    if base == "bfind" and not (ins.has("shiftamt") and kind == "u32"):
        return None
    return _apply(ins, machine, [kind] * (len(ins.operands) - 1), functions[base])
