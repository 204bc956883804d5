# SPDX-License-Identifier: Apache-2.0
"""Number formats of docs/numerics.md sections 1 to 3 as plain torch: elements, NVFP4 blocks, combine wire rows.

Called by the oracle and by tests. Written from that text alone; imports nothing of packing, engines or kernels, so that
a shared mistake cannot hide. Clarity before speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import CombineFormat, round_up

NVFP4_BLOCK = 16
FP8_WIRE_BLOCK = 32
FP4_WIRE_BLOCK = 16

E2M1_MAX_CODE = 0x7  # 6.0; also the code of NaN
E4M3_MAX_CODE = 0x7E  # 448.0
E4M3_NAN_CODE = 0x7F
E8M0_NAN_CODE = 0xFF
BF16_NAN_BITS = 0x7FC0
F16_MAX = 65504.0

ONE_SIXTH = torch.tensor(0x3E2AAAAB, dtype=torch.int32).view(torch.float32)  # RN32(1/6)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, built from bits: exact for -149..127 on every device, subnormals included."""
    return ((exponent.long() + 1023) << 52).view(torch.float64).to(torch.float32)


def _e2m1_magnitudes() -> torch.Tensor:
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e4m3_magnitudes() -> torch.Tensor:
    """Values of codes 0 .. 0x7E: (m / 8) * 2^-6 below the first binade, (1 + m / 8) * 2^(e - 7) above."""
    code = torch.arange(E4M3_MAX_CODE + 1)
    exponent, mantissa = code >> 3, (code & 7).float()
    return torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * power_of_two(exponent - 10))


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return table.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def _encode_magnitude(magnitude: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the nearest table entry, a tie to the even index, above the table its last one; NaN gives any index."""
    table = table.to(magnitude.dtype)
    midpoints = (table[1:] + table[:-1]) / 2  # one mantissa bit more than the entries: exact
    lower = torch.bucketize(magnitude, midpoints, right=False)
    upper = torch.bucketize(magnitude, midpoints, right=True)  # differs from `lower` on a midpoint only
    return torch.where(lower % 2 == 0, lower, upper)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (one a byte, uint8) to float32."""
    magnitudes = _e2m1_magnitudes()
    return _look_up(torch.cat([magnitudes, -magnitudes]), codes)


def e2m1_encode(values: torch.Tensor) -> torch.Tensor:
    """Float values to codes 0..15, one a byte, uint8: nearest, ties to the even code, saturating, NaN to 7."""
    codes = _encode_magnitude(values.abs(), _e2m1_magnitudes().to(values.device))
    codes = codes + 8 * torch.signbit(values)
    return torch.where(values.isnan(), E2M1_MAX_CODE, codes).to(torch.uint8)


def e4m3_decode(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes (uint8) to float32."""
    magnitudes = torch.cat([_e4m3_magnitudes(), torch.tensor([float("nan")])])
    return _look_up(torch.cat([magnitudes, -magnitudes]), codes)


def e4m3_encode(values: torch.Tensor) -> torch.Tensor:
    """Float values to E4M3 bytes, uint8: nearest, ties to even, saturating at 448, NaN to 0x7F."""
    codes = _encode_magnitude(values.abs(), _e4m3_magnitudes().to(values.device))
    codes = codes + 0x80 * torch.signbit(values)
    return torch.where(values.isnan(), E4M3_NAN_CODE, codes).to(torch.uint8)


def e8m0_decode(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) to float32 powers of two; 0xFF is NaN, 0x00 the subnormal 2^-127."""
    return torch.where(codes == E8M0_NAN_CODE, float("nan"), power_of_two(codes.long() - 127))


def e8m0_encode_exponent(exponent: torch.Tensor) -> torch.Tensor:
    """Exponents -127..127 (integers) to E8M0 bytes, uint8."""
    return (exponent + 127).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """(..., N) codes 0..15 to (..., N/2) bytes: the even index sits in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(..., N/2) bytes to (..., N) codes 0..15, the low nibble first."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    if values.shape[-1] % block:
        raise MegaMoeConfigError(
            f"cannot split rows of {values.shape[-1]} values into blocks of {block}: pad the row length to a multiple"
        )
    return values.reshape(*values.shape[:-1], values.shape[-1] // block, block)


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """A quantised tensor: `codes` (..., N) one e2m1 code a byte, `scales` (..., N/16) e4m3 bytes, both uint8."""

    codes: torch.Tensor
    scales: torch.Tensor

    def decode(self) -> torch.Tensor:
        """code * scale as float32 (exact), without the global scale."""
        return nvfp4_decode(self.codes, self.scales)


def nvfp4_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code * scale, float32 (..., N): at most 7 significant bits, hence exact; the global scale is left out."""
    blocks = _blocks(e2m1_decode(codes), NVFP4_BLOCK)
    return (blocks * e4m3_decode(scales).unsqueeze(-1)).flatten(-2)


def nvfp4_quantize(values: torch.Tensor, global_scale: torch.Tensor) -> Nvfp4:
    """Quantise rows with a static, non-reciprocal global scale; docs/numerics.md section 2, operation by operation.

    Args:
        values: (..., N) of any float type that float32 holds exactly; N a multiple of 16.
        global_scale: float32 scalar > 0 (calibrated amax / 2688).
    """
    blocks = _blocks(values.to(torch.float32), NVFP4_BLOCK)
    a = global_scale.to(blocks.device, torch.float32)
    qs = torch.ones_like(a) / a
    amax = blocks.abs().amax(dim=-1)  # NaN wins
    scales = e4m3_encode(amax * (qs * ONE_SIXTH.to(qs.device)))
    scale = e4m3_decode(scales)
    codes = e2m1_encode(blocks * (qs / scale).unsqueeze(-1))
    codes = torch.where(scale.unsqueeze(-1) == 0, 0, codes)
    return Nvfp4(codes=codes.flatten(-2), scales=scales)


def nvfp4_saturated(values: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """(..., N/16) bool: blocks with a value above the calibrated range 6 * 448 * a, which quantisation cuts off."""
    amax = _blocks(values, NVFP4_BLOCK).abs().amax(dim=-1)
    return amax.double() > 2688.0 * global_scale.to(amax.device).double()


@dataclass(frozen=True, slots=True)
class WireRows:
    """Encoded result rows: `data` (N, data_row_bytes) and `scales` (N, scale_row_bytes), uint8; pad bytes are zero."""

    data: torch.Tensor
    scales: torch.Tensor


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """(N, M) elements to their little-endian bytes (N, M * itemsize)."""
    return values.contiguous().view(torch.uint8)


def _pad_scales(scales: torch.Tensor) -> torch.Tensor:
    padded = round_up(scales.shape[-1], 16)
    return torch.nn.functional.pad(scales, (0, padded - scales.shape[-1]))


def wire_encode(rows: torch.Tensor, combine_format: CombineFormat) -> WireRows:
    """Route rows (N, H) bf16 to the bytes that travel in this format; docs/numerics.md section 3."""
    if rows.dtype != torch.bfloat16 or rows.dim() != 2:
        raise MegaMoeConfigError(f"wire rows must be (N, H) bfloat16, got {tuple(rows.shape)} {rows.dtype}")
    if combine_format is CombineFormat.BF16:
        return WireRows(data=_bytes_of(rows), scales=rows.new_empty((rows.shape[0], 0), dtype=torch.uint8))
    if combine_format is CombineFormat.FP8:
        return _fp8_wire_encode(rows)
    return _fp4_wire_encode(rows)


def wire_decode(wire: WireRows, combine_format: CombineFormat, hidden_size: int) -> torch.Tensor:
    """Bytes of N rows to (N, H) float32, as the token owner reads them."""
    if combine_format is CombineFormat.BF16:
        return wire.data.contiguous().view(torch.bfloat16).float()
    if combine_format is CombineFormat.FP8:
        scale = e8m0_decode(wire.scales[:, : hidden_size // FP8_WIRE_BLOCK])
        return (_blocks(e4m3_decode(wire.data), FP8_WIRE_BLOCK) * scale.unsqueeze(-1)).flatten(-2)
    amax = wire.scales[:, : hidden_size // 8].contiguous().view(torch.bfloat16).float()
    step = (amax * ONE_SIXTH.to(amax.device)).unsqueeze(-1)
    return (_blocks(e2m1_decode(unpack_nibbles(wire.data)), FP4_WIRE_BLOCK) * step).flatten(-2)


def _fp8_wire_encode(rows: torch.Tensor) -> WireRows:
    """Per 32 values one power of two, the smallest that brings the largest magnitude to at most 448."""
    blocks = _blocks(rows.float(), FP8_WIRE_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, 0.5 <= mantissa < 1
    k = torch.where(2 * mantissa <= 1.75, exponent - 9, exponent - 8).clamp(-127, 127)
    k = torch.where(amax.isinf(), 127, k)
    codes = e4m3_encode(blocks * power_of_two(-k).unsqueeze(-1))
    scales = e8m0_encode_exponent(k)
    zero, bad = amax == 0, amax.isnan()
    scales = torch.where(zero, 0, torch.where(bad, E8M0_NAN_CODE, scales)).to(torch.uint8)
    codes = torch.where(zero.unsqueeze(-1), 0, torch.where(bad.unsqueeze(-1), E4M3_NAN_CODE, codes)).to(torch.uint8)
    return WireRows(data=codes.flatten(-2), scales=_pad_scales(scales))


def _fp4_wire_encode(rows: torch.Tensor) -> WireRows:
    """Per 16 values the bf16 amax itself; a code counts sixths of it."""
    blocks = _blocks(rows.float(), FP4_WIRE_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    per_step = torch.full_like(amax, 6.0) / amax  # one rounding; torch evaluates `6.0 / amax` as 6 * (1 / amax)
    zero, bad = per_step.isinf(), amax.isnan()  # an amax of 0 also divides to infinity
    codes = e2m1_encode(blocks * per_step.unsqueeze(-1))
    codes = torch.where(zero.unsqueeze(-1), 0, torch.where(bad.unsqueeze(-1), E2M1_MAX_CODE, codes)).to(torch.uint8)
    bits = amax.to(torch.bfloat16).view(torch.int16)
    bits = torch.where(zero, 0, torch.where(bad, BF16_NAN_BITS, bits)).to(torch.int16)
    return WireRows(data=pack_nibbles(codes.flatten(-2)), scales=_pad_scales(_bytes_of(bits)))


def f16_saturate(values: torch.Tensor) -> torch.Tensor:
    """RN16 of float32 values, kept within +-65504; NaN stays NaN."""
    return values.clamp(-F16_MAX, F16_MAX).to(torch.float16)


def row_exponent(values: torch.Tensor) -> torch.Tensor:
    """(..., 1) int32 p with 2^14 <= max|row| * 2^p < 2^15, within [-126, 126]; 0 for a zero or not finite row.

    Source: docs/numerics.md section 4.2, step 1.
    """
    amax = values.float().abs().amax(dim=-1, keepdim=True)
    _, exponent = torch.frexp(amax)  # amax in [2^(exponent - 1), 2^exponent)
    return torch.where((amax > 0) & amax.isfinite(), (15 - exponent).clamp(-126, 126), 0).to(torch.int32)


def requant_exponent(down_input_scale: torch.Tensor) -> torch.Tensor:
    """Static int32 exponent q = 10 - ceil(log2(2688 * a2)) within [-14, 30]; docs/numerics.md section 4.2, step 6."""
    mantissa, exponent = torch.frexp(2688.0 * down_input_scale.double())  # exact: 12 + 24 bits
    ceil_log2 = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (10 - ceil_log2).clamp(-14, 30).to(torch.int32)
