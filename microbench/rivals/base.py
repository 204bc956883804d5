# SPDX-License-Identifier: Apache-2.0
"""What every rival is given and asked: NVFP4 weights, rows sorted by expert, and the check before any time is taken.

Used by the rivals and by those who time them. Imports no rival and no package that a rival needs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch

from microbench.check import Verdict

REGION = "rows sorted by expert in, rows out: fc1, SwiGLU, fc2; no gather, no top-k sum"

# A rival rounds gate, up and their product to bf16 (2^-9 each, more than once in some) and sums in its own order: two
# to five thousandths in all. A wrong scale, a swapped gate or a lost expert costs tenths.
TOLERANCE_REL_L2 = 1e-2
_MAX_ROWS_CHECKED = 128

BLOCK = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_RMS = math.sqrt(sum(value * value for value in _E2M1) / len(_E2M1))
_SCALE_LOG2_MEAN, _SCALE_LOG2_SD = 3.0, 1.0


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """One projection of all experts, as checkpoints hold it.

    Attributes:
        codes: (E, N, K / 2) uint8, two e2m1 codes a byte, the lower nibble first.
        block_scales: (E, N, K / 16) float8_e4m3fn.
        global_scales: (E,) float32, powers of two: the product of the three is exact in bf16.
    """

    codes: torch.Tensor
    block_scales: torch.Tensor
    global_scales: torch.Tensor

    def decode(self, expert: int) -> torch.Tensor:
        """(N, K) float32, exact."""
        scales = self.block_scales[expert].float() * self.global_scales[expert]
        return _elements(self.codes[expert]) * scales.repeat_interleave(BLOCK, dim=1)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """One projection of all experts with a power of two per 32 values.

    Attributes:
        codes: As in :class:`Nvfp4Matrix`.
        exponents: (E, N, K / 32) uint8, e8m0: 2^(value - 127).
    """

    codes: torch.Tensor
    exponents: torch.Tensor

    def decode(self, expert: int) -> torch.Tensor:
        """(N, K) float32, exact."""
        scales = torch.exp2(self.exponents[expert].float() - 127)
        return _elements(self.codes[expert]) * scales.repeat_interleave(2 * BLOCK, dim=1)


Matrix = Nvfp4Matrix | Mxfp4Matrix


def _elements(codes: torch.Tensor) -> torch.Tensor:
    """(N, K) float32 of packed e2m1 codes (N, K / 2)."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    return values[pairs.reshape(codes.shape[0], -1).int()]


@dataclass(frozen=True, slots=True)
class Weights:
    """An expert MLP: `gate_up` (E, 2 I, H), gate rows first, and `down` (E, H, I)."""

    hidden_size: int
    intermediate_size: int
    gate_up: Matrix
    down: Matrix

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.codes.shape[0]

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.gate_up.codes.device


def make_weights(
    hidden_size: int, intermediate_size: int, num_experts: int, device: torch.device, seed: int = 0
) -> Weights:
    """Random weights: heavy-tailed block scales, global scales that differ between experts, outputs of order one."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Nvfp4Matrix:
        codes = torch.empty(num_experts, rows, columns // 2, dtype=torch.uint8, device=device)
        codes.random_(0, 256, generator=generator)
        scales = torch.empty(num_experts, rows, columns // BLOCK, dtype=torch.float8_e4m3fn, device=device)
        for expert in range(num_experts):  # one at a time: the float32 draw is four times the result
            drawn = torch.randn(rows, columns // BLOCK, generator=generator, device=device)
            scales[expert] = (
                torch.exp2(drawn.mul_(_SCALE_LOG2_SD).add_(_SCALE_LOG2_MEAN)).clamp_(max=448.0).to(torch.float8_e4m3fn)
            )
        unit = -round(math.log2(_E2M1_RMS * 2.0**_SCALE_LOG2_MEAN * math.sqrt(columns)))
        exponents = torch.tensor([unit + expert % 3 - 1 for expert in range(num_experts)], dtype=torch.float32)
        return Nvfp4Matrix(codes, scales, torch.exp2(exponents).to(device))

    return Weights(
        hidden_size,
        intermediate_size,
        matrix(2 * intermediate_size, hidden_size),
        matrix(hidden_size, intermediate_size),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """`x` (R, H) bf16, `counts[e]` of which belong to expert e, in the experts' order."""

    x: torch.Tensor
    counts: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """End of each expert's rows."""
        return tuple(accumulate(self.counts))


def make_rows(weights: Weights, counts: Sequence[int], seed: int = 1) -> Rows:
    """Random rows of order one with unequal size."""
    generator = torch.Generator(weights.device).manual_seed(seed)
    x = torch.randn(sum(counts), weights.hidden_size, generator=generator, device=weights.device)
    x *= torch.exp2(torch.rand(x.shape[0], 1, generator=generator, device=weights.device) - 0.5)
    return Rows(x.to(torch.bfloat16), tuple(counts))


class Rival(ABC):
    """One public implementation.

    Attributes:
        name: Package, weight format and variant, as tables show it.
        distribution: The package on PyPI whose version belongs beside the times.
    """

    name: ClassVar[str]
    distribution: ClassVar[str]

    @classmethod
    @abstractmethod
    def why_not(cls) -> str | None:
        """None where it can run here, else the reason."""

    @classmethod
    def in_own_format(cls, weights: Weights) -> Weights:
        """The weights in the number format that it computes with, against which its output is checked."""
        return weights

    @abstractmethod
    def __init__(self, weights: Weights, totals: Sequence[int]) -> None:
        """Take weights of the own format into the rival's layout; `totals` are the sums of rows that will be bound."""

    @abstractmethod
    def bind(self, rows: Rows) -> None:
        """Prepare for these rows, outside any timing: routing tables, buffers, compilation."""

    @abstractmethod
    def run(self) -> torch.Tensor:
        """One pass over the bound rows: (R, H) bf16. Allocates nothing that a CUDA graph could not hold."""


@dataclass(frozen=True, slots=True)
class RivalCheck:
    """Outcome of the check. `reason` is None where it passed."""

    verdict: Verdict
    rel_l2: float | None
    rows_checked: int
    reason: str | None = None


def check(out: torch.Tensor, weights: Weights, rows: Rows) -> RivalCheck:
    """Compare the first, the fullest and the last expert that owns rows with float32, and look for NaN everywhere."""
    if tuple(out.shape) != tuple(rows.x.shape):
        return RivalCheck(Verdict.WRONG, None, 0, f"output {tuple(out.shape)} for rows {tuple(rows.x.shape)}")
    owners = [expert for expert, count in enumerate(rows.counts) if count]
    if not owners:
        return RivalCheck(Verdict.NOT_VERIFIED, None, 0, "no expert owns a row")
    if not bool(torch.isfinite(out).all()):
        return RivalCheck(Verdict.WRONG, None, 0, "the output is not finite")
    worst, checked = 0.0, 0
    for expert in dict.fromkeys((owners[0], max(owners, key=lambda e: rows.counts[e]), owners[-1])):
        count = min(rows.counts[expert], _MAX_ROWS_CHECKED)
        part = slice(rows.ends[expert] - count, rows.ends[expert])  # the last rows: an early end shows
        gate, up = (rows.x[part].float() @ weights.gate_up.decode(expert).T).to(torch.bfloat16).float().chunk(2, dim=1)
        hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16).float()
        expected = hidden @ weights.down.decode(expert).T
        worst = max(worst, float((out[part].float() - expected).norm() / expected.norm()))
        checked += count
    if worst < TOLERANCE_REL_L2:
        return RivalCheck(Verdict.VERIFIED, worst, checked)
    return RivalCheck(Verdict.WRONG, worst, checked, f"rel-L2 {worst:.3e} is not below {TOLERANCE_REL_L2:g}")
