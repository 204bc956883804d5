# SPDX-License-Identifier: Apache-2.0
"""A third opinion: docs/numerics.md route by route in numpy and ml_dtypes, without a line of the reference's code.

Only for small layers with finite values; every statement is one step of the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
SIXTH = F32(1) / F32(6)
Tensors = Mapping[str, torch.Tensor]


def _nvfp4(v: np.ndarray, a: F32) -> np.ndarray:
    """Section 2: a row to code * scale in float64."""
    blocks = v.astype(F32).reshape(-1, 16)
    qs = F32(1) / a
    scale = np.minimum(np.abs(blocks).max(1) * (qs * SIXTH), F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = blocks * (qs / scale)[:, None]
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    codes[scale == 0] = 0
    return (codes * scale[:, None]).reshape(v.shape)


def _f16(v: np.ndarray) -> np.ndarray:
    return np.clip(v, -65504, 65504).astype(np.float16).astype(np.float64)


def _matrix(tensors: Tensors, name: str) -> np.ndarray:
    packed = tensors[f"{name}.weight"].numpy()
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = tensors[f"{name}.weight_scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return values * np.repeat(scales.astype(np.float64), 16, axis=1)


def _wire(r: np.ndarray, combine_format: str) -> np.ndarray:
    """Section 3: what the owner decodes from one bf16 row."""
    if combine_format == "bf16":
        return r
    if combine_format == "fp8":
        blocks = r.reshape(-1, 32).astype(np.float64)
        amax = np.abs(blocks).max(1)
        k = np.array([-127 if m == 0 else max(-127, math.ceil(math.log2(m / 448))) for m in amax], dtype=np.float64)
        codes = (blocks * np.exp2(-k)[:, None]).astype(F32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return (codes * np.exp2(k)[:, None]).astype(F32).reshape(r.shape)
    blocks = r.reshape(-1, 16).astype(F32)
    amax = np.abs(blocks).max(1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        per_step = F32(6) / amax
        codes = (blocks * per_step[:, None]).astype(ml_dtypes.float4_e2m1fn).astype(F32)
    codes[np.isinf(per_step)] = 0
    return (codes * (amax * SIXTH)[:, None]).reshape(r.shape)


def _route(
    tensors: Tensors, x: np.ndarray, expert: int, w: F32, a1: F32, *, activations: str, before_requant: bool,
    combine_format: str, limit: float | None, alpha: float, beta: float,
) -> np.ndarray:  # fmt: skip
    """Section 4: one bf16 token row through one expert, decoded from the wire, float32."""
    scale2 = {p: F32(tensors[f"{expert}.{p}.weight_scale_2"].item()) for p in ("w1", "w2", "w3")}
    p = 0
    if activations == "nvfp4":
        xf, factor = _nvfp4(x, a1), a1
    else:
        m = float(np.abs(x).max())
        p = 0 if m == 0 else 14 - math.floor(math.log2(m))
        xf, factor = _f16(x * F32(2.0**p)), F32(1)
    g = (_matrix(tensors, f"{expert}.w1") @ xf).astype(F32) * F32(2.0**-p) * (scale2["w1"] * factor)
    u = (_matrix(tensors, f"{expert}.w3") @ xf).astype(F32) * F32(2.0**-p) * (scale2["w3"] * factor)
    if limit is not None:
        g, u = np.minimum(g, F32(limit)), np.maximum(np.minimum(u, F32(limit)), F32(-limit))
    g64 = g.astype(np.float64)
    h = (g64 / (1 + np.exp(-alpha * g64)) * (u.astype(np.float64) + beta)).astype(F32)
    if before_requant:
        h = h * w
    down_scale = tensors.get(f"{expert}.w2.input_scale")
    if activations == "nvfp4":
        assert down_scale is not None
        a2 = F32(down_scale.item())
        hf, factor = _nvfp4(h, a2), a2
    else:
        q = 0
        if down_scale is not None:
            q = min(30, max(-14, 10 - math.ceil(math.log2(2688.0 * down_scale.item()))))
        hf, factor = _f16(h.astype(ml_dtypes.bfloat16).astype(F32) * F32(2.0**q)), F32(2.0**-q)
    y = (_matrix(tensors, f"{expert}.w2") @ hf).astype(F32) * (scale2["w2"] * factor)
    return _wire(y.astype(ml_dtypes.bfloat16).astype(F32), combine_format)


def scalar_layer(
    tensors: Tensors, num_experts: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *,
    activations: str, combine_format: str = "bf16", before_requant: bool = False, limit: float | None = None,
    alpha: float = 1.0, beta: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The layer's bf16 output (T, H) for bf16 `x`; section 5 around `_route`."""
    scales = [tensors[n].item() for n in tensors if n.endswith("input_scale") and ".w2." not in n]
    a1 = F32(max(scales, default=0.0))
    out = np.zeros(x.shape, dtype=F32)
    for token, row in enumerate(x.float().numpy()):
        for slot, expert in enumerate(topk_ids[token].tolist()):
            if 0 <= expert < num_experts:
                w = F32(topk_weights[token, slot].item())
                decoded = _route(
                    tensors, row, expert, w, a1, activations=activations, before_requant=before_requant,
                    combine_format=combine_format, limit=limit, alpha=alpha, beta=beta,
                )  # fmt: skip
                out[token] = out[token] + (decoded if before_requant else w * decoded)
    return torch.from_numpy(out.astype(ml_dtypes.bfloat16).view(np.int16)).view(torch.bfloat16)
