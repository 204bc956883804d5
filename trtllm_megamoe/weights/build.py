# SPDX-License-Identifier: Apache-2.0
"""One-shot load: named tensors of one layer to one rank's :class:`ExpertWeights`, strictly.

`MegaMoELayer.load_weights` calls this. Streaming, reload and packing are the lifecycle's.
"""

from __future__ import annotations

from trtllm_megamoe.weights.experts import ExpertWeights
from trtllm_megamoe.weights.faults import FaultKind
from trtllm_megamoe.weights.spec import LayerShape, ModuleSpec, parse_name
from trtllm_megamoe.weights.staging import (
    ExpertStaging,
    NamedTensors,
    iter_named,
    one_shot_faults,
    staged_expert_weights,
)


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
    staging = ExpertStaging(ModuleSpec(shape, first_expert, num_local_experts))
    layers: set[int] = set()
    for name, tensor in iter_named(named_tensors):
        parsed = parse_name(name)
        if parsed is not None and parsed.layer is not None:
            layers.add(parsed.layer)
        staging.stage_named(name, tensor)
    log = one_shot_faults(staging)
    if len(layers) > 1:
        log.add(FaultKind.UNEXPECTED, "tensors of several layers", None, f"layers {sorted(layers)}; load one at a time")
    log.raise_if_any(where, "Nothing was loaded; fix the checkpoint or the delivery and load again")
    return staged_expert_weights(staging)
