# SPDX-License-Identifier: Apache-2.0
"""One MoE layer in plain torch with every rounding point of docs/numerics.md explicit: what all engines are judged by.

Called by `run`, the microbench's check and tests. Reads canonical-named checkpoint tensors itself; shares no code with
packing, engines or kernels, knows no ranks. Memory: one expert's projection in float64 and the routes' rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
from trtllm_megamoe.reference import codecs

_EXACT_TERMS = 1024  # so many products of nvfp4 values sum exactly in float64, in any order


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """Which rounding points are on. Use `product` for what engines compute, `exact` for none of them.

    Attributes:
        round_x: x to bf16 on entry.
        fc1_activations: nvfp4 quantises x with a1; bf16 carries it as f16 with a row exponent; None leaves it as it is.
        fc2_activations: the same for the fc1 output, with a2[e], or as bf16 and then f16 with a static exponent.
        fp32_epilogues: sums, alphas, products and the SwiGLU result are rounded to fp32; else all stay float64.
        round_routes: each route's fc2 row to bf16 (needed by every wire format).
        combine_format: wire format of the rows; None sends them as they are.
        score_placement: where the routing weight multiplies.
        swiglu_limit: clamp bound L > 0; None or infinity means no clamp.
        swiglu_alpha, swiglu_beta: h = g * sigmoid(alpha * g) * (u + beta).
        top_k_sum: dtype of the slot-ordered sum, float32 or float64.
        round_output: the sum to bf16.
    """

    round_x: bool
    fc1_activations: ActivationMode | None
    fc2_activations: ActivationMode | None
    fp32_epilogues: bool
    round_routes: bool
    combine_format: CombineFormat | None
    score_placement: ScorePlacement
    swiglu_limit: float | None
    swiglu_alpha: float
    swiglu_beta: float
    top_k_sum: torch.dtype
    round_output: bool

    def __post_init__(self) -> None:
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise MegaMoeConfigError(f"swiglu_limit must be > 0, got {self.swiglu_limit}; None means no clamp")
        if self.top_k_sum not in (torch.float32, torch.float64):
            raise MegaMoeConfigError(f"top_k_sum must be torch.float32 or torch.float64, got {self.top_k_sum}")
        if self.combine_format is not None and not self.round_routes:
            raise MegaMoeConfigError("every combine format starts from bf16 rows: round_routes must be True")

    @classmethod
    def product(
        cls,
        activations: ActivationMode,
        *,
        combine_format: CombineFormat = CombineFormat.BF16,
        score_placement: ScorePlacement = ScorePlacement.AFTER_FC2,
        swiglu_limit: float | None = None,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
    ) -> OracleOptions:
        """What the engines compute in this activation mode."""
        return cls(
            round_x=True,
            fc1_activations=activations,
            fc2_activations=activations,
            fp32_epilogues=True,
            round_routes=True,
            combine_format=combine_format,
            score_placement=score_placement,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            top_k_sum=torch.float32,
            round_output=True,
        )

    @classmethod
    def exact(
        cls,
        *,
        score_placement: ScorePlacement = ScorePlacement.AFTER_FC2,
        swiglu_limit: float | None = None,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
    ) -> OracleOptions:
        """The dequantised weights in float64, nothing else rounded."""
        return cls(
            round_x=False,
            fc1_activations=None,
            fc2_activations=None,
            fp32_epilogues=False,
            round_routes=False,
            combine_format=None,
            score_placement=score_placement,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            top_k_sum=torch.float64,
            round_output=False,
        )


@dataclass(frozen=True, slots=True)
class OracleWeights:
    """One layer's experts, all E of them, over tensors named `{e}.{w1|w2|w3}.{weight|weight_scale|...}`.

    w1 is gate, w3 up (both (I, H/2) packed codes), w2 down ((H, I/2)). Tensors are read when an expert is computed, so
    a lazy mapping works.

    Attributes:
        input_scale: a1, float32 scalar: largest `input_scale` of any expert's w1 and w3; None for weight-only layers.
        down_input_scales: a2, (E,) float32, or None.
    """

    tensors: Mapping[str, torch.Tensor]
    num_experts: int
    hidden_size: int
    intermediate_size: int
    input_scale: torch.Tensor | None
    down_input_scales: torch.Tensor | None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> OracleWeights:
        """Find E, H, I and the input scales.

        Raises:
            MegaMoeWeightError: experts are not numbered 0..E-1, or only some carry input scales.
        """
        experts = {int(name.split(".", 1)[0]) for name in tensors}
        if experts != set(range(len(experts))) or not experts:
            raise MegaMoeWeightError(f"expert numbers must be 0..E-1 without a gap, got {sorted(experts)}")
        num_experts = len(experts)
        names = [f"{e}.{w}.input_scale" for e in range(num_experts) for w in ("w1", "w3", "w2")]
        present = [name for name in names if name in tensors]
        if present and len(present) != len(names):
            missing = next(name for name in names if name not in tensors)
            raise MegaMoeWeightError(f"input scales must be on every expert's projections or on none; no {missing}")
        input_scale = down_input_scales = None
        if present:
            scales = {name: tensors[name].to("cpu", torch.float32).reshape(()) for name in names}
            input_scale = torch.stack([s for name, s in scales.items() if ".w2." not in name]).max()
            down_input_scales = torch.stack([scales[f"{e}.w2.input_scale"] for e in range(num_experts)])
        intermediate_size, half_hidden = tensors["0.w1.weight"].shape
        return cls(tensors, num_experts, 2 * half_hidden, intermediate_size, input_scale, down_input_scales)

    def projection(self, expert: int, name: str, device: torch.device) -> torch.Tensor:
        """code * scale of one projection, float64 (exact), without its global scale: w1, w3 (I, H), w2 (H, I)."""
        shape = (self.intermediate_size, self.hidden_size)
        rows, columns = shape if name != "w2" else shape[::-1]
        packed = self.tensors[f"{expert}.{name}.weight"]
        scales = self.tensors[f"{expert}.{name}.weight_scale"]
        if packed.shape != (rows, columns // 2) or scales.shape != (rows, columns // codecs.NVFP4_BLOCK):
            raise MegaMoeWeightError(
                f"{expert}.{name}: weight {tuple(packed.shape)} and weight_scale {tuple(scales.shape)} do not fit "
                f"a projection of {rows} x {columns}"
            )
        codes = codecs.unpack_nibbles(packed.view(torch.uint8).to(device))
        return codecs.nvfp4_decode(codes, scales.view(torch.uint8).to(device)).double()

    def global_scale(self, expert: int, name: str) -> torch.Tensor:
        """`weight_scale_2` as a float32 scalar on the CPU."""
        return self.tensors[f"{expert}.{name}.weight_scale_2"].to("cpu", torch.float32).reshape(())


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleTrace:
    """What a layer computes on the way, per route at [token, slot].

    T tokens, K slots, H hidden, I intermediate. Masked routes hold zeros. Fields that the options do not produce are
    None. Floats are float32, or float64 without fp32 epilogues.
    """

    out: torch.Tensor  # (T, H) bf16, or the dtype of the top-k sum
    live: torch.Tensor  # (T, K) bool
    decoded: torch.Tensor  # (T, K, H) the rows that the token owner sums
    routes: torch.Tensor  # (T, K, H) fc2 rows, already rounded to bf16 where that is on
    x_codes: torch.Tensor | None  # (T, H) uint8, one e2m1 code a byte
    x_scales: torch.Tensor | None  # (T, H/16) uint8
    x_f16: torch.Tensor | None  # (T, H) f16
    x_exponents: torch.Tensor | None  # (T, 1) int32, the row exponent p
    gate: torch.Tensor | None = None  # (T, K, I) before the clamp
    up: torch.Tensor | None = None  # (T, K, I) before the clamp
    hidden: torch.Tensor | None = None  # (T, K, I) SwiGLU's result, weighted under before_requant, not requantised
    hidden_codes: torch.Tensor | None = None  # (T, K, I) uint8
    hidden_scales: torch.Tensor | None = None  # (T, K, I/16) uint8
    hidden_f16: torch.Tensor | None = None  # (T, K, I) f16
    wire_data: torch.Tensor | None = None  # (T, K, data_row_bytes) uint8
    wire_scales: torch.Tensor | None = None  # (T, K, scale_row_bytes) uint8


def oracle_forward(
    weights: OracleWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    options: OracleOptions,
) -> torch.Tensor:
    """The layer's output (T, H): bf16 with `round_output`, else the dtype of the top-k sum.

    Args:
        x: (T, H), any float dtype; T may be 0. All work happens on its device.
        topk_ids: (T, K) integers; a route with an id outside [0, E) is masked and its weight is not read.
        topk_weights: (T, K) float.
    """
    return _run(weights, x, topk_ids, topk_weights, options, keep=False).out


def oracle_trace(
    weights: OracleWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    options: OracleOptions,
) -> OracleTrace:
    """`oracle_forward` with its intermediates: several times the memory, for comparing an engine stage by stage."""
    return _run(weights, x, topk_ids, topk_weights, options, keep=True)


@dataclass(frozen=True, slots=True)
class _Operand:
    """Activations (N, columns) as the product sees them, and what undoes their scaling."""

    values: torch.Tensor  # float64
    scale: torch.Tensor | None = None  # float32 scalar that enters alpha; None stands for 1
    row_factor: torch.Tensor | None = None  # (N, 1) float32, multiplies the sum before alpha
    quantized: codecs.Nvfp4 | None = None
    f16: torch.Tensor | None = None
    exponents: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> _Operand:
        """What `_linear` needs of these rows."""
        factor = None if self.row_factor is None else self.row_factor[index]
        return _Operand(self.values[index], self.scale, factor)


def _nvfp4_operand(values: torch.Tensor, global_scale: torch.Tensor | None) -> _Operand:
    if global_scale is None:
        raise MegaMoeWeightError("nvfp4 activations need input scales, which these weights lack: use bf16 activations")
    quantized = codecs.nvfp4_quantize(values, global_scale)
    return _Operand(quantized.decode().double(), scale=global_scale, quantized=quantized)


def _fc1_operand(x: torch.Tensor, mode: ActivationMode | None, input_scale: torch.Tensor | None) -> _Operand:
    """x (T, H) as fc1 reads it: section 4.1 step 1 or 4.2 step 1."""
    if mode is ActivationMode.NVFP4:
        return _nvfp4_operand(x, input_scale)
    if mode is ActivationMode.BF16:
        exponents = codecs.row_exponent(x)
        f16 = codecs.f16_saturate(x.float() * codecs.power_of_two(exponents))
        factor = codecs.power_of_two(-exponents)
        return _Operand(f16.double(), row_factor=factor, f16=f16, exponents=exponents)
    return _Operand(x.double())


def _fc2_operand(hidden: torch.Tensor, mode: ActivationMode | None, input_scale: torch.Tensor | None) -> _Operand:
    """h (N, I) of one expert as fc2 reads it: section 4.1 step 6 or 4.2 step 6."""
    if mode is ActivationMode.NVFP4:
        return _nvfp4_operand(hidden, input_scale)
    if mode is ActivationMode.BF16:
        q = torch.tensor(0) if input_scale is None else codecs.requant_exponent(input_scale)
        f16 = codecs.f16_saturate(hidden.to(torch.bfloat16).float() * codecs.power_of_two(q).to(hidden.device))
        return _Operand(f16.double(), scale=codecs.power_of_two(-q), f16=f16)
    return _Operand(hidden.double())


def _linear(operand: _Operand, weights: OracleWeights, expert: int, name: str, fp32: bool) -> torch.Tensor:
    """One projection (N, rows) with its alpha: section 4.1 steps 2 and 7, 4.2 steps 2 and 7."""
    device = operand.values.device
    matrix = weights.projection(expert, name, device)
    acc = torch.zeros((operand.values.shape[0], matrix.shape[0]), dtype=torch.float64, device=device)
    for start in range(0, matrix.shape[1], _EXACT_TERMS):
        piece = slice(start, start + _EXACT_TERMS)
        acc += operand.values[:, piece] @ matrix[:, piece].T
    dtype = torch.float32 if fp32 else torch.float64
    acc = acc.to(dtype)
    if operand.row_factor is not None:
        acc = acc * operand.row_factor.to(dtype)
    alpha = weights.global_scale(expert, name).to(dtype)
    if operand.scale is not None:
        alpha = alpha * operand.scale.to(dtype)
    return acc * alpha.to(device)


def _swiglu(gate: torch.Tensor, up: torch.Tensor, options: OracleOptions) -> torch.Tensor:
    """Clamp and SwiGLU, evaluated in float64 and rounded once to the inputs' dtype."""
    if options.swiglu_limit is not None and not math.isinf(options.swiglu_limit):
        gate = gate.clamp(max=options.swiglu_limit)
        up = up.clamp(-options.swiglu_limit, options.swiglu_limit)
    g, u = gate.double(), up.double()
    return (g * torch.sigmoid(options.swiglu_alpha * g) * (u + options.swiglu_beta)).to(gate.dtype)


def _expert_routes(
    weights: OracleWeights, expert: int, operand: _Operand, route_weights: torch.Tensor, options: OracleOptions
) -> dict[str, torch.Tensor | None]:
    """All routes of one expert, N rows, under the field names of `OracleTrace`."""
    fp32 = options.fp32_epilogues
    gate = _linear(operand, weights, expert, "w1", fp32)
    up = _linear(operand, weights, expert, "w3", fp32)
    hidden = _swiglu(gate, up, options)
    if options.score_placement is ScorePlacement.BEFORE_REQUANT:
        hidden = hidden * route_weights.to(hidden.dtype).unsqueeze(1)
    scales = weights.down_input_scales
    requantized = _fc2_operand(hidden, options.fc2_activations, None if scales is None else scales[expert])
    routes = _linear(requantized, weights, expert, "w2", fp32)
    if options.round_routes:
        routes = routes.to(torch.bfloat16).to(routes.dtype)
    quantized = requantized.quantized
    return {
        "gate": gate,
        "up": up,
        "hidden": hidden,
        "hidden_codes": None if quantized is None else quantized.codes,
        "hidden_scales": None if quantized is None else quantized.scales,
        "hidden_f16": requantized.f16,
        "routes": routes,
    }


def _top_k_sum(
    decoded: torch.Tensor, live: torch.Tensor, topk_weights: torch.Tensor, options: OracleOptions
) -> torch.Tensor:
    """(T, K, H) rows to (T, H), slot by slot; section 5."""
    total = torch.zeros((decoded.shape[0], decoded.shape[2]), dtype=options.top_k_sum, device=decoded.device)
    for slot in range(decoded.shape[1]):
        term = decoded[:, slot].to(options.top_k_sum)
        if options.score_placement is ScorePlacement.AFTER_FC2:
            term = topk_weights[:, slot, None].to(options.top_k_sum) * term
        total = torch.where(live[:, slot, None], total + term, total)
    return total.to(torch.bfloat16) if options.round_output else total


def _check_inputs(weights: OracleWeights, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != weights.hidden_size or not x.is_floating_point():
        raise MegaMoeConfigError(f"x must be (T, {weights.hidden_size}) float, got {tuple(x.shape)} {x.dtype}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.is_floating_point():
        raise MegaMoeConfigError(f"topk_ids must be ({x.shape[0]}, K) integers, got {tuple(topk_ids.shape)}")
    if topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point():
        raise MegaMoeConfigError(
            f"topk_weights must be {tuple(topk_ids.shape)} float, got {tuple(topk_weights.shape)} {topk_weights.dtype}"
        )


def _run(
    weights: OracleWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    options: OracleOptions,
    *,
    keep: bool,
) -> OracleTrace:
    _check_inputs(weights, x, topk_ids, topk_weights)
    num_tokens, top_k = topk_ids.shape
    if options.round_x:
        x = x.to(torch.bfloat16)
    operand = _fc1_operand(x, options.fc1_activations, weights.input_scale)

    topk_weights = topk_weights.to(x.device)
    ids = topk_ids.to(x.device).long().flatten()
    live = (ids >= 0) & (ids < weights.num_experts)
    tensors: dict[str, torch.Tensor] = {}
    # Expert 0 without rows stands in for an empty batch: the shapes and dtypes below exist all the same.
    for expert in sorted(set(ids[live].tolist())) or [0]:
        routes = (ids == expert).nonzero().squeeze(1)
        fields = _expert_routes(weights, expert, operand.rows(routes // top_k), topk_weights.flatten()[routes], options)
        for name, value in fields.items():
            if value is not None and (keep or name == "routes"):
                if name not in tensors:
                    tensors[name] = value.new_zeros((len(ids), value.shape[1]))
                tensors[name][routes] = value

    decoded, wire = tensors["routes"], None
    if options.combine_format is not None:
        wire = codecs.wire_encode(decoded.to(torch.bfloat16), options.combine_format)
        decoded = codecs.wire_decode(wire, options.combine_format, weights.hidden_size).to(decoded.dtype)
    if keep and wire is not None:
        tensors |= {"wire_data": wire.data, "wire_scales": wire.scales}
    tensors["decoded"] = decoded
    per_slot = {name: value.view(num_tokens, top_k, value.shape[1]) for name, value in tensors.items()}
    live = live.view(num_tokens, top_k)
    quantized = operand.quantized
    return OracleTrace(
        out=_top_k_sum(per_slot["decoded"], live, topk_weights, options),
        live=live,
        x_codes=None if quantized is None else quantized.codes,
        x_scales=None if quantized is None else quantized.scales,
        x_f16=operand.f16,
        x_exponents=operand.exponents,
        **per_slot,
    )
