# SPDX-License-Identifier: Apache-2.0
"""One-shot load: named tensors of one layer to one rank's :class:`ExpertWeights`, strictly.

For callers that need no reload and no packed layout. Streaming, reload and packing are the store's and the loader's.
"""

from __future__ import annotations

import torch

from trtllm_megamoe.weights.experts import ExpertWeights
from trtllm_megamoe.weights.faults import FaultKind, FaultLog
from trtllm_megamoe.weights.layouts import allocate_packed, expert_rows, get_layout, pack_staged
from trtllm_megamoe.weights.scales import LayerScales, resolve_scales
from trtllm_megamoe.weights.spec import LayerShape, ModuleSpec, parse_name
from trtllm_megamoe.weights.staging import ExpertStaging, NamedTensors, iter_named


def build_expert_weights(
    named_tensors: NamedTensors,
    shape: LayerShape,
    first_expert: int,
    num_local_experts: int,
    *,
    where: str = "layer",
) -> ExpertWeights:
    """Collect one rank's experts of ONE layer from named tensors; every fault is reported together.

    Args:
        named_tensors: mapping or iterable of (name, tensor) in any supported spelling (docs/weights.md section 1).
            Tensors of other ranks' experts may be present and are not copied, except gate and up `input_scale`, which
            every rank needs of ALL experts (a1, R27).
        shape: the layer's sizes.
        first_expert: global id of the first local expert; never defaulted.
        num_local_experts: L.
        where: how error texts name this delivery, e.g. `layer 3, rank 2`.

    Returns:
        Weights in the reference layout, in memory of their own on the CPU. `input_global` and `down_input_global` are
        None for a weight-only checkpoint.

    Raises:
        MegaMoeWeightError: anything missing, extra, mis-shaped, mis-typed or degenerate, all in one message.
        MegaMoeConfigError: the expert range is not inside the layer.
    """
    spec = ModuleSpec(shape, first_expert, num_local_experts)
    staging = ExpertStaging(spec)
    layers: set[int] = set()
    for name, tensor in iter_named(named_tensors):
        parsed = parse_name(name)
        if parsed is not None and parsed.layer is not None:
            layers.add(parsed.layer)
        staging.stage_named(name, tensor)
    scales, scale_faults = resolve_scales(staging, None)
    log = FaultLog()
    for part in (staging.faults, staging.missing_bulk(), scale_faults):
        log.extend(part)
    if len(layers) > 1:
        log.add(FaultKind.UNEXPECTED, "tensors of several layers", None, f"layers {sorted(layers)}; load one at a time")
    log.raise_if_any(where, "Nothing was loaded; fix the checkpoint or the delivery and load again")
    assert scales is not None  # no fault was found
    layout = get_layout("reference")
    packed = allocate_packed(layout, shape, num_local_experts, torch.device("cpu"))
    pack_staged(layout, staging, torch.device("cpu"), expert_rows(packed, num_local_experts))
    return reference_weights(spec, packed, scales)


def reference_weights(spec: ModuleSpec, packed: dict[str, torch.Tensor], scales: LayerScales) -> ExpertWeights:
    """View reference-layout buffers and scales as :class:`ExpertWeights`; nothing is copied."""
    return ExpertWeights(
        first_expert=spec.first_expert,
        **packed,
        gate_global=scales.gate_global,
        up_global=scales.up_global,
        down_global=scales.down_global,
        input_global=scales.input_global,
        down_input_global=scales.down_input_global,
    )
