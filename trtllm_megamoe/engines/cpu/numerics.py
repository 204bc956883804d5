# SPDX-License-Identifier: Apache-2.0
"""docs/numerics.md for the CPU engine: codecs, exact dot products, SwiGLU, wire formats.

Everything is elementwise IEEE arithmetic or a sum that is exact in fp64, so that a value never depends on its
position, the batch, the thread count or the vector width. The oracle has its own implementation; share nothing with it.
"""

from __future__ import annotations

import math

import torch

from trtllm_megamoe.formats import CombineFormat

BLOCK = 16
"""Values per NVFP4 and fp4-wire block."""

_SIX = torch.tensor(6.0)
_SIXTH = torch.tensor(1.0 / 6.0, dtype=torch.float32)
_E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _just_above(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(math.inf)))


# smallest fp32 magnitude of each code 1..7; a midpoint belongs to its even neighbour, so every second bound is open
_E2M1_BOUNDS = torch.tensor(
    [_just_above(0.25), 0.75, _just_above(1.25), 1.75, _just_above(2.5), 3.5, _just_above(5.0)], dtype=torch.float32
)

# one chunk of a reduction is summed exactly: |code * scale| <= 2688 in units of 2^-10 (numerics 6)
_EXACT_TERMS_NVFP4 = 1024
_EXACT_TERMS_16BIT = 2048
_HALF_UNIT = 16.0  # a 16-bit activation splits at 2^-4 into two halves of 20 bits


def _in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """(..., n) -> (..., n / block, block); works for zero rows, too."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // block, block)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 (..., n/2) -> uint8 codes (..., n), even index in the low nibble."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (..., n) -> uint8 (..., n/2)."""
    pairs = _in_blocks(codes, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def decode_blocks(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """NVFP4 codes (..., n/2) and e4m3 bytes (..., n/16) -> code * scale (..., n); exact in f16, fp32 and fp64."""
    values = _E2M1_VALUES.to(dtype)[unpack_codes(packed).long()]
    scale = scales.view(torch.float8_e4m3fn).to(dtype)
    return (_in_blocks(values, BLOCK) * scale.unsqueeze(-1)).flatten(-2)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> uint8 e2m1 codes; ties to the even code, saturating, sign kept, NaN -> 7."""
    magnitude = torch.bucketize(values.abs(), _E2M1_BOUNDS, right=True).to(torch.uint8)
    code = magnitude | (torch.signbit(values).to(torch.uint8) << 3)
    return torch.where(values.isnan(), torch.full_like(code, 7), code)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> uint8 e4m3 codes; saturating at 448, NaN -> 0x7F."""
    code = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(code, 0x7F), code)


def _block_amax(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks (..., n/block, block) and their largest magnitude (NaN if any value is)."""
    blocks = _in_blocks(values, block)
    return blocks, blocks.abs().amax(-1)


def quantize_nvfp4(values: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Quantise fp32 rows (m, n) by their static global scales.

    Args:
        values: (m, n) float32.
        global_scale: `a`, float32, scalar or (m, 1).

    Returns:
        Packed codes (m, n/2) uint8, scales (m, n/16) uint8, and the number of saturated blocks.
    """
    blocks, amax = _block_amax(values, BLOCK)
    quant_scale = 1.0 / global_scale
    scales = encode_e4m3(amax * (quant_scale * _SIXTH))
    decoded = scales.view(torch.float8_e4m3fn).float()
    codes = encode_e2m1(blocks * (quant_scale / decoded).unsqueeze(-1))
    codes.masked_fill_((scales == 0).unsqueeze(-1), 0)
    saturated = int((amax > 2688.0 * global_scale).sum())
    return pack_codes(codes.flatten(-2)), scales, saturated


def row_power_of_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """16-bit activations of bf16 rows (m, H): f16 of x * 2^p, and 2^-p as fp32 (m,) (numerics 4.2 step 1)."""
    amax = x.float().abs().amax(-1)
    _, exponent = torch.frexp(amax)
    p = (15 - exponent).clamp(-126, 126)
    p = torch.where((amax == 0) | ~torch.isfinite(amax), torch.zeros_like(p), p)
    return saturating_f16(x.float() * power_of_two(p).unsqueeze(-1)), power_of_two(-p)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as fp32, exact for -126 .. 127."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def saturating_f16(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> f16, nearest, saturating at +-65504; NaN stays NaN."""
    return values.clamp(-65504.0, 65504.0).half()


def exact_matmul(a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, is_nvfp4: bool) -> torch.Tensor:
    """f16 rows (m, k) times NVFP4 rows (n, k/2 packed) -> fp64 (m, n), the same bits for any m, threads or BLAS.

    The reduction is cut into pieces whose sums are exact in fp64, and the pieces are added in ascending order.
    """
    k = a.shape[1]
    terms = _EXACT_TERMS_NVFP4 if is_nvfp4 else _EXACT_TERMS_16BIT
    acc = torch.zeros(a.shape[0], packed.shape[0], dtype=torch.float64)
    for k0 in range(0, k, terms):
        k1 = min(k, k0 + terms)
        w = decode_blocks(packed[:, k0 // 2 : k1 // 2], scales[:, k0 // BLOCK : k1 // BLOCK], torch.float64).T
        part = a[:, k0:k1].double()
        if is_nvfp4:
            acc += part @ w
        else:
            high = torch.floor(part * _HALF_UNIT) / _HALF_UNIT
            acc += high @ w
            acc += (part - high) @ w
    return acc


def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp in fp64 from IEEE operations only (1e-15 relative); library exp differs between vector and tail lanes."""
    x = x.clamp(-708.0, 708.0)
    n = torch.round(x * 1.4426950408889634)
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    poly = torch.full_like(r, 1.0 / math.factorial(13))
    for degree in range(12, -1, -1):
        poly = poly * r + 1.0 / math.factorial(degree)
    scale = ((torch.nan_to_num(n).long() + 1023) << 52).view(torch.float64)
    return poly * scale


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None, alpha: float, beta: float) -> torch.Tensor:
    """fp32 gate, up -> fp32 h = g * sigmoid(alpha g) * (u + beta), clamped first (numerics 4.1 steps 3 and 4)."""
    if limit is not None and math.isfinite(limit):
        gate = torch.clamp(gate, max=limit)
        up = torch.clamp(up, -limit, limit)
    g, u = gate.double(), up.double()
    return (g / (1.0 + _exp(-alpha * g)) * (u + beta)).float()


def encode_wire(rows: torch.Tensor, fmt: CombineFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 rows (m, H) -> data plane (m, bytes) and unpadded scale plane (m, bytes) as uint8 (numerics 3)."""
    if fmt is CombineFormat.BF16:
        return rows.contiguous().view(torch.uint8), rows.new_empty((rows.shape[0], 0), dtype=torch.uint8)
    values = rows.float()
    if fmt is CombineFormat.FP8:
        blocks, amax = _block_amax(values, 32)
        fraction, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
        k = exponent - 9 + (fraction > 0.875)
        k = torch.where(torch.isinf(amax), torch.full_like(k, 127), k).clamp(-127, 127)
        byte = (k + 127).to(torch.uint8)
        # 2^-k over two exact factors: k = 127 needs 2^-127, which is subnormal
        half = torch.div(-k, 2, rounding_mode="floor")
        scaled = blocks * power_of_two(half).unsqueeze(-1) * power_of_two(-k - half).unsqueeze(-1)
        codes = encode_e4m3(scaled)
        is_nan, is_zero = amax.isnan(), amax == 0
        byte = torch.where(is_nan, 255, torch.where(is_zero, 0, byte)).to(torch.uint8)
        codes.masked_fill_(is_nan.unsqueeze(-1), 0x7F).masked_fill_(is_zero.unsqueeze(-1), 0)
        return codes.flatten(-2), byte
    blocks, amax = _block_amax(values, BLOCK)
    # a Python scalar over a tensor would be reciprocal times scalar: two roundings
    inverse = _SIX / amax
    codes = encode_e2m1(blocks * inverse.unsqueeze(-1))
    is_nan, is_zero = amax.isnan(), inverse.isinf()
    codes.masked_fill_(is_nan.unsqueeze(-1), 7).masked_fill_(is_zero.unsqueeze(-1), 0)
    stored = torch.where(is_zero, torch.zeros_like(amax), amax).bfloat16()
    stored = torch.where(is_nan, torch.full_like(stored, math.nan), stored)
    return pack_codes(codes.flatten(-2)), stored.view(torch.uint8)


def decode_wire(data: torch.Tensor, scales: torch.Tensor, fmt: CombineFormat, hidden_size: int) -> torch.Tensor:
    """Inverse of encode_wire: uint8 planes (m, bytes), the scale plane may be padded -> fp32 rows (m, H)."""
    if fmt is CombineFormat.BF16:
        return data.view(torch.bfloat16).float()
    if fmt is CombineFormat.FP8:
        byte = scales[:, : hidden_size // 32]
        scale = byte.contiguous().view(torch.float8_e8m0fnu).float()
        codes = _in_blocks(data.view(torch.float8_e4m3fn).float(), 32)
        return (codes * scale.unsqueeze(-1)).flatten(-2)
    amax = scales[:, : hidden_size // 8].contiguous().view(torch.bfloat16).float()
    values = _in_blocks(_E2M1_VALUES[unpack_codes(data).long()], BLOCK)
    return (values * (amax * _SIXTH).unsqueeze(-1)).flatten(-2)
