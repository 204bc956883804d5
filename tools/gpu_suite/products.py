# SPDX-License-Identifier: Apache-2.0
"""Every product code x scale byte, alone at the output: layers whose result shows any product that was rounded.

All sixteen e2m1 codes with each of the 127 legal e4m3 scale bytes (0x00 to 0x7E), in the down, up and gate weights.
Every factor beside the product is a power of two or 6, so that nothing else rounds on the way to the bf16 output:

- down: fc1 passes one column on, each output row is one product;
- up, gate, `alone` (bf16 mode): one product per fc1 row, fc2 hands each row to an output column. The gate shows its
  positive products, silu takes the negative ones to zero;
- up, gate, `difference`: a product minus smaller products that add up to it, plus the smallest product there is. Exact
  products leave that smallest one, whatever code and byte: a value that survives requantisation in either mode. The
  smaller products are again shown like that, so by induction every value follows from the smallest one's.

Used by the GPU suite (:func:`run`) and by the interpreter's tests (:func:`make_case`); expected values are float64
arithmetic over the formulas of docs/numerics.md 1, with nothing shared with packing, kernel or oracle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import TILES, KernelConfig

LEGAL_BYTES = tuple(range(0x7F))
"""0x7F is NaN, and block scales are not negative."""

ROLES = ("down", "up", "gate")
"""Which projection of expert e holds the products: ROLES[e % 3]."""

SPECS = tuple(LayerSpec(256, 128, 6, 2, mode) for mode in ("nvfp4", "bf16"))
TILE_NAMES = ("n8", "n16", "n128", "h16")

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ONE, _HALF, _MINUS = 2, 1, 8  # codes of 1 and 1/2, sign bit
_UNIT_BYTE, _SMALLEST_BYTE = 0x38, 0x01  # scales 1 and 2^-9
_SUMS = (
    *((0, 0, 0), (1, 0, 0), (1, 1, 0), (2, 1, 0), (2, 2, 0), (4, 1, 0), (4, 2, 0), (4, 2, 1)),
    *((4, 4, 0), (8, 1, 0), (8, 2, 0), (8, 2, 1), (8, 4, 0), (8, 4, 1), (8, 4, 2), (16, -1, 0)),
)
"""Subnormal mantissas 0 to 7, then 8 to 15, as sums of powers of two; 15 with the largest exponent is NaN."""
_HALVES = ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 4))
_A1, _A2 = 2.0**-4, 2.0**4
_HOT, _LEVEL = 6.0, 4.0  # values of x; 6 is what an nvfp4 block of one value keeps exactly, 4 beside a 6 as well


def code_value(code: int) -> float:
    """Value of an e2m1 code."""
    return -_MAGNITUDES[code & 7] if code & 8 else _MAGNITUDES[code & 7]


def byte_value(byte: int) -> float:
    """Value of a non-negative finite e4m3 byte."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def scale_terms(byte: int) -> list[tuple[int, int]]:
    """Three (sign, byte): smaller scales, powers of two or zero, that add up to `byte`'s (the smallest: itself)."""
    exponent, mantissa = byte >> 3, byte & 7
    lowest = exponent - 10 if exponent else -9
    terms = _SUMS[mantissa + 8 if exponent else mantissa]
    return [(-1 if t < 0 else 1, _power_byte(lowest + abs(t).bit_length() - 1) if t else 0) for t in terms]


def code_parts(code: int) -> tuple[int, int]:
    """Two codes of the same sign, powers of two or zero, that add up to `code`, smaller ones where there are any."""
    first, second = _HALVES[code & 7]
    return first | code & _MINUS, second | code & _MINUS


def _power_byte(exponent: int) -> int:
    return (exponent + 7) << 3 if exponent >= -6 else 1 << (exponent + 9)


@dataclass
class _Matrix:
    """One projection of one expert: codes (rows, columns), scale bytes (rows, blocks)."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, rows: int, columns: int) -> _Matrix:
        return cls(
            torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, columns // 16, dtype=torch.uint8)
        )  # fmt: skip

    def values(self) -> torch.Tensor:
        """(rows, columns) float64: code x scale by the plain formulas."""
        codes = torch.tensor([code_value(c) for c in range(16)], dtype=torch.float64)
        scales = torch.tensor([byte_value(b) for b in range(0x7F)], dtype=torch.float64)
        return codes[self.codes.long()] * scales[self.scales.long()].repeat_interleave(16, dim=1)

    def tensors(self, name: str, scale_2: float, input_scale: float) -> dict[str, torch.Tensor]:
        """As in a checkpoint."""
        return {
            f"{name}.weight": self.codes[:, 0::2] | self.codes[:, 1::2] << 4,
            f"{name}.weight_scale": self.scales,
            f"{name}.weight_scale_2": torch.tensor(scale_2),
            f"{name}.input_scale": torch.tensor(input_scale),
        }


@dataclass(frozen=True)
class ProductCase:
    """One layer and its tokens.

    Attributes:
        tensors: Checkpoint tensors of all experts, canonical names.
        x, ids, weights: (T, H) bf16, (T, K) int64 with one live route a token, (T, K) fp32, NaN where masked.
        expected: (T, H) float64, each exactly a bf16 value.
        products: What `expected[t, n]` shows: expert, code, scale byte, (T, H, 3).
        kinds: "down", "up alone", "gate difference", ... of each token.
    """

    tensors: dict[str, torch.Tensor]
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    expected: torch.Tensor
    products: torch.Tensor
    kinds: tuple[str, ...]

    def wrong(self, y: torch.Tensor) -> list[str]:
        """A line for each output (T, H) that is not the expected value."""
        bad = (y.double().cpu() != self.expected).nonzero().tolist()
        return [
            f"{self.kinds[t]}: expert {e}, code {code:#x}, scale byte {byte:#04x}: "
            f"got {float(y[t, n])!r}, expected {float(self.expected[t, n])!r}"
            for t, n in bad
            for e, code, byte in [self.products[t, n].tolist()]
        ]


def make_case(
    hidden: int, inter: int, num_experts: int, top_k: int, mode: str, scale_bytes: Sequence[int], shift: int = 0
) -> ProductCase:
    """A layer that shows every code with each of these bytes.

    Args:
        hidden: H, at least I + 16 and 128.
        inter: I.
        scale_bytes: At most I of them, repeated over the rows.
        shift: Which blocks of the hidden dimension hold the products; expert e adds e // 3.

    Raises:
        ValueError: The shape has no room for it.
    """
    if hidden < max(inter + 16, 128) or len(scale_bytes) > inter:
        raise ValueError(f"{len(scale_bytes)} bytes do not fit hidden {hidden}, intermediate {inter}")
    tensors: dict[str, torch.Tensor] = {}
    parts = []
    for expert in range(num_experts):
        role = ROLES[expert % 3]
        made = (
            _down(hidden, inter, scale_bytes)
            if role == "down"
            else _fc1(role, hidden, inter, mode, scale_bytes, shift + expert // 3)
        )
        parts.append((expert, role, made))
        gate, up, down = made.matrices
        # silu(g) = g from g = 64 on, in fp32: the levels are 128 and 192, the gate's smallest product 64 or 96
        factors = {"w1": 2.0**14 if role == "gate" else 2.0**5, "w3": 2.0**-9 if role == "gate" else 1.0, "w2": 1.0}
        for name, matrix in (("w1", gate), ("w3", up), ("w2", down)):
            tensors |= matrix.tensors(f"{expert}.{name}", factors[name], _A2 if name == "w2" else _A1)
    return _assemble(tensors, parts, top_k)


@dataclass(frozen=True)
class _Expert:
    matrices: tuple[_Matrix, _Matrix, _Matrix]  # gate, up, down
    tokens: torch.Tensor  # (T, H)
    kinds: tuple[str, ...]
    shown: torch.Tensor  # (T, H, 2): code and byte that an output shows


def _fill(matrix: _Matrix, row: int, block: int, codes: Sequence[int], scale: int) -> None:
    matrix.codes[row, 16 * block : 16 * block + 16] = torch.tensor(codes, dtype=torch.uint8)
    matrix.scales[row, block] = scale


def _codes_of_row(row: int) -> torch.Tensor:
    """All sixteen codes, each in another place than in the row before."""
    return (torch.arange(16) + row).remainder(16).to(torch.uint8)


def _down(hidden: int, inter: int, scale_bytes: Sequence[int]) -> _Expert:
    gate, up, down = _Matrix.zeros(inter, hidden), _Matrix.zeros(inter, hidden), _Matrix.zeros(hidden, inter)
    gate.codes[:, -16], gate.scales[:, -1] = _ONE, _UNIT_BYTE
    diagonal = torch.arange(inter)
    up.codes[diagonal, diagonal], up.scales[diagonal, diagonal // 16] = _ONE, _UNIT_BYTE
    blocks = inter // 16
    # an odd step: each block of sixteen columns has every byte
    numbers = torch.arange(hidden).unsqueeze(1) * (blocks | 1) + torch.arange(blocks)
    down.scales = torch.tensor(scale_bytes, dtype=torch.uint8)[numbers % len(scale_bytes)]
    down.codes = torch.stack([_codes_of_row(row).repeat(blocks) for row in range(hidden)])
    tokens = torch.zeros(inter, hidden)
    tokens[diagonal, diagonal] = _HOT
    tokens[:, -16], tokens[:, -15] = _LEVEL, _HOT
    shown = torch.stack((down.codes.T, down.scales.repeat_interleave(16, dim=1).T), dim=-1)
    return _Expert((gate, up, down), tokens, ("down",) * inter, shown)


def _fc1(role: str, hidden: int, inter: int, mode: str, scale_bytes: Sequence[int], shift: int) -> _Expert:
    level, products, down = _Matrix.zeros(inter, hidden), _Matrix.zeros(inter, hidden), _Matrix.zeros(hidden, inter)
    usable = hidden // 16 - 1
    first, *others = [(shift + i) % usable for i in range(7)]  # the products; what is taken from them
    for row in range(inter):
        byte = scale_bytes[row % len(scale_bytes)]
        codes = _codes_of_row(row)
        _fill(products, row, first, codes.tolist(), byte)
        for i, (sign, scale) in enumerate(scale_terms(byte)):
            for part in range(2):
                taken = [code_parts(code)[part] ^ (_MINUS if sign > 0 else 0) for code in codes.tolist()]
                _fill(products, row, others[2 * i + part], taken, scale)
    # the smallest comes last in the sum, when the rest has come to nothing: no accumulator needs more than fp32
    products.codes[:, -16:], products.scales[:, -1] = _HALF, _SMALLEST_BYTE
    level.codes[:, 16 * first : 16 * first + 16], level.scales[:, first] = _ONE, _UNIT_BYTE
    rows = torch.arange(hidden) % inter
    down.codes[torch.arange(hidden), rows] = _ONE
    down.scales[torch.arange(hidden), rows // 16] = _UNIT_BYTE
    kinds, tokens, shown = [], [], []
    for place in range(16):
        column = 16 * first + place  # every summand in the same place of its block: the same lane decodes it
        summands = torch.tensor([16 * block + place for block in (first, *others, usable)])
        chosen = {"difference": torch.zeros(hidden).index_fill(0, summands, _HOT)}
        if mode == "bf16":
            chosen["alone"] = torch.zeros(hidden).index_fill(0, summands[:1], _LEVEL)
        for kind, token in chosen.items():
            kinds.append(f"{role} {kind}")
            tokens.append(token)
            shown.append(torch.stack((products.codes[rows, column], products.scales[rows, first]), dim=-1))
    matrices = (products, level, down) if role == "gate" else (level, products, down)
    return _Expert(matrices, torch.stack(tokens), tuple(kinds), torch.stack(shown))


def _assemble(tensors: dict[str, torch.Tensor], parts: Sequence[tuple[int, str, _Expert]], top_k: int) -> ProductCase:
    x, ids, expected, products = [], [], [], []
    for expert, _, made in parts:
        count = made.tokens.shape[0]
        routes = torch.full((count, top_k), -1, dtype=torch.int64)
        routes[torch.arange(count), torch.arange(count) % top_k] = expert
        x.append(made.tokens)
        ids.append(routes)
        expected.append(_expected(tensors, expert, made))
        products.append(torch.cat((torch.full((*made.shown.shape[:2], 1), expert), made.shown.long()), dim=-1))
    all_ids = torch.cat(ids)
    exact = torch.cat(expected)
    assert torch.equal(exact.to(torch.bfloat16).double(), exact), "an expected value is no bf16 value"
    weights = torch.where(all_ids >= 0, 1.0, float("nan")).float()
    kinds = tuple(kind for _, _, made in parts for kind in made.kinds)
    return ProductCase(
        tensors, torch.cat(x).to(torch.bfloat16), all_ids, weights, exact, torch.cat(products), kinds
    )  # fmt: skip


def _expected(tensors: dict[str, torch.Tensor], expert: int, made: _Expert) -> torch.Tensor:
    """(T, H) float64 of one expert; silu at its limits, which all of these layers are at."""
    gate, up, down = (matrix.values() for matrix in made.matrices)
    factor = {w: float(tensors[f"{expert}.{w}.weight_scale_2"]) for w in ("w1", "w3", "w2")}
    x = made.tokens.double()
    g, u = x @ gate.T * factor["w1"], x @ up.T * factor["w3"]
    assert bool(((g == 0) | (g.abs() >= 64)).all())
    return (g.clamp_min(0) * u) @ down.T * factor["w2"]


def needed() -> list[KernelConfig]:
    """Kernels of this part."""
    return [KernelConfig(spec, TILES[tile]) for spec in SPECS for tile in TILE_NAMES]


def run(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """Both modes, every tile, products in every block of the hidden dimension; one result per mode, tile and place."""
    from tools.gpu_suite.layer import GpuLayer

    for spec in SPECS:
        shape = (spec.hidden_size, spec.intermediate_size, spec.num_local_experts, spec.top_k)
        for shift in range(0, spec.hidden_size // 16 - 1, 2):  # the second set of experts is one further
            case = make_case(*shape, spec.activation_mode, LEGAL_BYTES, shift)
            layer = GpuLayer(spec, case.tensors, case.x.shape[0], cache_dir)
            operands = case.x.cuda(), case.ids.cuda(), case.weights.cuda()
            for tile in TILE_NAMES:
                layer.poison()
                y = layer.forward(tile, *operands).cpu()
                wrong, error = case.wrong(y), layer.error_record()
                yield {
                    "mode": spec.activation_mode,
                    "tile": tile,
                    "first_block": shift,
                    "products": case.expected.numel(),
                    "wrong": len(wrong),
                    "first_wrong": wrong[:3],
                    "error_record": error if error["set"] else None,
                    "ok": not wrong and not error["set"],
                }
                if error["set"]:
                    layer.reset()
