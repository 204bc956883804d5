# SPDX-License-Identifier: Apache-2.0
"""Small models of several layers for lifecycle tests, and what a store must hold after a load of them.

The expectation goes through the one-shot build and whole-module packing, not through stores or loaders.
"""

from __future__ import annotations

import functools

import torch

from tests.helpers.synthetic import make_layer_tensors, seeded
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.weights.build import build_expert_weights
from trtllm_megamoe.weights.layouts import pack_weights
from trtllm_megamoe.weights.loader import WeightLoader
from trtllm_megamoe.weights.spec import LayerShape, ModuleSpec, TensorKey, parse_name
from trtllm_megamoe.weights.store import WeightStore

SHAPE = LayerShape(hidden_size=32, intermediate_size=16, num_experts=4, top_k=2)
SPEC = ModuleSpec(SHAPE, first_expert=1, num_local_experts=2)
LAYERS = (3, 5, 8)
LAYER = 3
Named = dict[str, torch.Tensor]


@functools.cache
def layer_tensors(model: str, layer: int) -> Named:
    """Canonical names of one layer of model `A`, `B`, ...; read only."""
    return make_layer_tensors(
        seeded(1000 * ord(model) + layer), SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_experts
    )


def full_name(layer: int, canonical: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{canonical}"


def model_tensors(model: str, layers: tuple[int, ...] = LAYERS) -> Named:
    """All layers of a model under their file names."""
    return {full_name(n, name): tensor for n in layers for name, tensor in layer_tensors(model, n).items()}


def key_of(name: str) -> TensorKey:
    parsed = parse_name(name)
    assert parsed is not None
    return parsed.key


def layer_of(name: str) -> int:
    parsed = parse_name(name)
    assert parsed is not None and parsed.layer is not None
    return parsed.layer


def expected_store(
    layer: int, layout: str, *, bulk: str, scales: str, fc1_input: str | None, fc2_input: bool = True
) -> Named:
    """Packed buffers and alphas of a store whose parts come from the named models; `fc1_input` None: it has no a1.

    Mode as a store decides it: nvfp4 with both input-scale families, else bf16.
    """
    tensors = dict(layer_tensors(bulk, layer))
    for name in tensors:
        key = key_of(name)
        if key.family is not None:
            tensors[name] = layer_tensors(scales, layer)[name]
    dropped = []
    for name in tensors:
        parameter = key_of(name).parameter
        if parameter in ("w1.input_scale", "w3.input_scale"):
            if fc1_input is None:
                dropped.append(name)
            else:
                tensors[name] = layer_tensors(fc1_input, layer)[name]
        elif parameter == "w2.input_scale" and not fc2_input:
            dropped.append(name)
    for name in dropped:
        del tensors[name]
    weights = build_expert_weights(tensors, SHAPE, SPEC.first_expert, SPEC.num_local_experts)
    mode = ActivationMode.NVFP4 if weights.has_input_scales else ActivationMode.BF16
    return {**pack_weights(layout, weights), **expected_alphas(weights, mode)}


def expected_alphas(weights: object, mode: ActivationMode) -> Named:
    """docs/numerics.md 4.1 and 4.2 restated in fp64 with one rounding each."""
    gate, up, down = (getattr(weights, f"{p}_global").double() for p in ("gate", "up", "down"))
    a1, a2 = weights.input_global, weights.down_input_global  # type: ignore[attr-defined]
    fc1 = torch.stack((gate, up), 1)
    if mode is ActivationMode.NVFP4:
        a2 = a2.double()
        return {
            "fc1_alpha": (fc1 * a1).float(),
            "fc2_alpha": (down * a2).float(),
            "fc1_norm_const": (1.0 / a2).float(),
        }
    q = torch.zeros_like(down)
    if a2 is not None:
        q = (10 - torch.ceil(torch.log2(2688 * a2.double()))).clamp(-14, 30)
    return {"fc1_alpha": fc1.float(), "fc2_alpha": (down * 2**-q).float(), "fc1_norm_const": (2**q).float()}


def store_bytes(store: WeightStore) -> Named:
    """Everything an engine can see of a store."""
    return {**store.packed, **store.alphas}


def same(left: Named, right: Named) -> bool:
    """Bitwise equality of two sets of named tensors."""
    return left.keys() == right.keys() and all(
        torch.equal(left[n].reshape(-1).view(torch.uint8), right[n].reshape(-1).view(torch.uint8)) for n in left
    )


def make_store(layout: str = "reference", **options: object) -> WeightStore:
    """A store that takes names of any one layer."""
    return WeightStore(SPEC, layout=layout, **options)  # type: ignore[arg-type]


def make_loader(layout: str = "reference", **options: object) -> WeightLoader:
    """Stores of all layers under one loader."""
    stores = {layer: WeightStore(SPEC, layout=layout, layer=layer) for layer in LAYERS}
    return WeightLoader(stores, **options)  # type: ignore[arg-type]


def load_all(loader: WeightLoader, tensors: Named, **options: object) -> None:
    """One window from begin to end."""
    with loader.open(**options) as window:  # type: ignore[arg-type]
        window.deliver(tensors)


def whole(layer: int, model: str, layout: str = "reference") -> Named:
    """A store after a load of everything of one model."""
    return expected_store(layer, layout, bulk=model, scales=model, fc1_input=model)


def without(tensors: Named, *parts: str) -> Named:
    """All tensors but those whose name contains a part."""
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def only(tensors: Named, *parts: str) -> Named:
    """Only the tensors whose name contains a part."""
    return {name: tensor for name, tensor in tensors.items() if any(part in name for part in parts)}


def bulk_of(tensors: Named) -> Named:
    """Codes and block scales."""
    return {name: tensor for name, tensor in tensors.items() if key_of(name).family is None}


def aux_of(tensors: Named) -> Named:
    """Scalars."""
    return {name: tensor for name, tensor in tensors.items() if key_of(name).family is not None}


def suffix_order(tensors: Named) -> Named:
    """All layers of one tensor kind, then the next kind."""
    return dict(sorted(tensors.items(), key=lambda item: (key_of(item[0]).parameter, layer_of(item[0]))))
