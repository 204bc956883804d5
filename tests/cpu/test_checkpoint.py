# SPDX-License-Identifier: Apache-2.0
"""Opening checkpoint directories: spellings, shards, facts, and each refusal with its own message."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import (
    COMPRESSED_QUANT,
    DEEPSEEK,
    QWEN,
    model_config,
    spell,
    to_compressed,
    write_checkpoint,
)
from tests.helpers.synthetic import make_layer_tensors, seeded
from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.weights.checkpoint import Checkpoint
from trtllm_megamoe.weights.safetensors_file import SafetensorsFile
from trtllm_megamoe.weights.spec import LayerShape, parse_name

HID, INT, EXP, TOPK = 64, 32, 4, 2
CONFIG = model_config(HID, INT, EXP, TOPK, layers=2)


def u8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def small_layer(seed: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    return make_layer_tensors(seeded(seed), HID, INT, EXP, **options)


def refusal(path: Path) -> str:
    with pytest.raises(MegaMoeWeightError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


@pytest.mark.parametrize("directory", [QWEN, DEEPSEEK], ids=lambda p: p.name)
def test_checkpoint_of_modelopt_yields_the_bytes_of_the_file(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    stored = load_file(directory / "model.safetensors")
    seen = 0
    for layer in checkpoint.moe_layers:
        for name, tensor in checkpoint.iter_layer(layer):
            assert tensor.dtype == stored[name].dtype and tensor.shape == stored[name].shape
            assert torch.equal(u8(tensor), u8(stored[name]))
            seen += 1
    shape = checkpoint.layer_shape(checkpoint.moe_layers[0])
    assert seen == 12 * shape.num_experts * len(checkpoint.moe_layers)
    assert seen + len(checkpoint.ignored) == len(stored)


def test_checkpoint_facts_of_data_models_are_right() -> None:
    qwen, deepseek = Checkpoint.open(QWEN), Checkpoint.open(DEEPSEEK)
    assert qwen.layer_shape(1) == LayerShape(256, 128, 16, 4)
    assert deepseek.layer_shape(1) == LayerShape(512, 256, 32, 6)
    assert (qwen.moe_layers, qwen.expected_moe_layers) == ([0, 1], [0, 1])
    assert (deepseek.moe_layers, deepseek.expected_moe_layers) == ([1], [1, 2])
    assert deepseek.architecture == "DeepseekV3ForCausalLM"
    assert qwen.swiglu_limit is None and qwen.has_input_scales(0)


@pytest.mark.parametrize(
    ("prefix", "hf"),
    [
        ("model.layers.{}.mlp.experts.", True),
        ("model.layers.{}.block_sparse_moe.experts.", False),
        ("layers.{}.ffn.experts.", False),
        ("language_model.model.layers.{}.mlp.experts.", True),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_checkpoint_spellings_and_shards_read_alike(tmp_path: Path, prefix: str, hf: bool, shards: int) -> None:
    layers = [small_layer(0), small_layer(1)]
    tensors = {"model.norm.weight": torch.ones(HID)}
    for index, layer in enumerate(layers):
        tensors |= spell(layer, prefix.format(index), hf=hf)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, CONFIG, shards=shards))
    assert checkpoint.moe_layers == [0, 1] and checkpoint.ignored == ["model.norm.weight"]
    for index, layer in enumerate(layers):
        got = {parse_name(name).key.name: tensor for name, tensor in checkpoint.iter_layer(index)}  # type: ignore[union-attr]
        assert got.keys() == layer.keys()
        assert all(torch.equal(u8(got[n]), u8(layer[n])) for n in layer)


def test_checkpoint_iter_of_some_experts_is_by_expert_and_keeps_all_fc1_input_scales(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, spell(small_layer(), "model.layers.0.mlp.experts.", hf=True), CONFIG)
    keys = [parse_name(name).key for name, _ in Checkpoint.open(path).iter_layer(0, experts=[1, 2])]  # type: ignore[union-attr]
    assert [key.expert for key in keys] == sorted(key.expert for key in keys)
    others = [key for key in keys if key.expert in (0, 3)]
    assert {key.parameter for key in others} == {"w1.input_scale", "w3.input_scale"} and len(others) == 4
    assert len(keys) == 2 * 12 + 4


def test_checkpoint_of_compressed_tensors_opens_with_its_scheme(tmp_path: Path) -> None:
    tensors = spell(to_compressed(small_layer()), "model.layers.0.mlp.experts.", hf=True)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, CONFIG, quant=COMPRESSED_QUANT))
    assert checkpoint.scheme.startswith("compressed-tensors") and checkpoint.has_input_scales(0)


@pytest.mark.parametrize(
    ("changes", "shape", "moe_layers", "limit"),
    [
        ({"n_routed_experts": 8, "num_experts": None, "first_k_dense_replace": 1}, (HID, INT, 8, TOPK), [1], None),
        ({"num_experts": None, "num_local_experts": 8, "experts_per_token": 3, "num_experts_per_tok": None,
          "moe_intermediate_size": None, "intermediate_size": 48, "swiglu_limit": 7.0}, (HID, 48, 8, 3), [0, 1], 7.0),
        ({"decoder_sparse_step": 2}, (HID, INT, EXP, TOPK), [1], None),
        ({"mlp_only_layers": [1], "swiglu_limit": float("inf")}, (HID, INT, EXP, TOPK), [0], None),
        ({"moe_layer_freq": [0, 1]}, (HID, INT, EXP, TOPK), [1], None),
    ],
    ids=["deepseek", "gpt-oss", "sparse-step", "mlp-only", "frequency-list"],
)  # fmt: skip
def test_checkpoint_config_dialects_give_shape_and_layers(
    tmp_path: Path, changes: dict[str, Any], shape: tuple[int, ...], moe_layers: list[int], limit: float | None
) -> None:
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    path = write_checkpoint(tmp_path, spell(small_layer(), "model.layers.1.mlp.experts.", hf=True), config)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.layer_shape(1) == LayerShape(*shape)
    assert checkpoint.expected_moe_layers == moe_layers and checkpoint.swiglu_limit == limit


def test_checkpoint_sizes_inside_text_config_are_found(tmp_path: Path) -> None:
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": CONFIG}
    path = write_checkpoint(
        tmp_path, spell(small_layer(), "language_model.model.layers.0.mlp.experts.", hf=True), outer
    )
    assert Checkpoint.open(path).layer_shape(0) == LayerShape(HID, INT, EXP, TOPK)


def test_checkpoint_mtp_layers_are_not_mistaken_for_model_layers(tmp_path: Path) -> None:
    tensors = spell(small_layer(0), "model.layers.0.mlp.experts.", hf=True)
    tensors |= spell(small_layer(1), "mtp.layers.0.mlp.experts.", hf=True)
    tensors["model.layers.0.mlp.shared_experts.0.gate_proj.weight"] = torch.zeros(1)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, CONFIG))
    assert len(list(checkpoint.iter_layer(0))) == 12 * EXP and len(checkpoint.ignored) == 12 * EXP + 1


def test_checkpoint_missing_layer_names_those_that_exist() -> None:
    with pytest.raises(MegaMoeWeightError, match=r"layer 2 has no routed experts.*layers that have: 1"):
        Checkpoint.open(DEEPSEEK).layer_shape(2)


@pytest.mark.parametrize("keep", [3, 700, -1], ids=["no-header", "inside-header", "last-byte"])
def test_checkpoint_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write_checkpoint(tmp_path, spell(small_layer(), "model.layers.0.mlp.experts.", hf=True), CONFIG)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:keep])
    message = refusal(path)
    assert "truncated" in message and "model.safetensors" in message


def test_checkpoint_file_shrinking_after_open_is_an_error_not_garbage(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, spell(small_layer(), "model.layers.0.mlp.experts.", hf=True), CONFIG)
    checkpoint = Checkpoint.open(path)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(MegaMoeWeightError, match="truncated while reading"):
        list(checkpoint.iter_layer(0))


def test_checkpoint_garbage_header_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, spell(small_layer(), "model.layers.0.mlp.experts.", hf=True), CONFIG)
    (path / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"{not json at all" + bytes(100))
    assert "not the JSON of a safetensors file" in refusal(path)


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, "says FP8"),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "group size 32"),
        ({"quantization": {"quant_algo": "NVFP4_AWQ", "group_size": 16}}, "says NVFP4_AWQ"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "says FP8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format is pack-quantized"),
        ({"quantization": {}}, "states a quantisation"),
    ],
)
def test_checkpoint_that_is_not_nvfp4_is_refused_by_name(tmp_path: Path, quant: dict[str, Any], expected: str) -> None:
    tensors = spell(small_layer(), "model.layers.0.mlp.experts.", hf=True)
    message = refusal(write_checkpoint(tmp_path, tensors, CONFIG, quant=quant))
    assert "not an NVFP4 checkpoint" in message and expected in message


def test_checkpoint_mixed_precision_with_nvfp4_experts_opens(tmp_path: Path) -> None:
    quant = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4", "group_size": 16}}}}  # fmt: skip
    path = write_checkpoint(tmp_path, spell(small_layer(), "model.layers.0.mlp.experts.", hf=True), CONFIG, quant=quant)
    assert Checkpoint.open(path).moe_layers == [0]


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "MXFP4"),
        ("model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv", "block-FP8"),
        ("model.layers.0.mlp.experts.0.gate_proj.pre_quant_scale", "AWQ"),
        ("model.layers.0.mlp.experts.0.gate_proj.bias", "biases"),
        ("model.layers.0.mlp.experts.zero.weight", "unknown dialect"),
    ],
)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "among-good"])
def test_checkpoint_unknown_dialect_names_first_unknown_and_missing(
    tmp_path: Path, name: str, dialect: str, alone: bool
) -> None:
    tensors = {} if alone else spell(small_layer(), "model.layers.0.mlp.experts.", hf=True)
    tensors.pop("model.layers.0.mlp.experts.1.down_proj.weight", None)
    path = write_checkpoint(tmp_path, tensors | {name: torch.zeros(4)}, CONFIG)
    with pytest.raises(MegaMoeWeightError) as caught:
        list(Checkpoint.open(path).iter_layer(0))
    missing = "0.w1.weight" if alone else "1.w2.weight"
    assert (
        dialect in str(caught.value) and name in str(caught.value) and f"first missing {missing}" in str(caught.value)
    )


def test_checkpoint_same_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = spell(small_layer(), "model.layers.0.mlp.experts.", hf=True)
    tensors["model.layers.0.mlp.experts.0.w1.weight"] = tensors["model.layers.0.mlp.experts.0.gate_proj.weight"]
    with pytest.raises(MegaMoeWeightError, match="under two names"):
        list(Checkpoint.open(write_checkpoint(tmp_path, tensors, CONFIG)).iter_layer(0))


def test_checkpoint_index_faults_are_named(tmp_path: Path) -> None:
    tensors = spell(small_layer(), "model.layers.0.mlp.experts.", hf=True)
    path = write_checkpoint(tmp_path, tensors, CONFIG, shards=2)
    shard, index_path = path / "model-00002-of-00002.safetensors", path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.layers.0.mlp.experts.0.extra"] = shard.name
    index_path.write_text(json.dumps(index))
    assert "places there are absent, first 'model.layers.0.mlp.experts.0.extra'" in refusal(path)
    index["weight_map"]["model.layers.0.mlp.experts.0.extra"] = "../secret.safetensors"
    index_path.write_text(json.dumps(index))
    assert "leaves the checkpoint directory" in refusal(path)
    del index["weight_map"]["model.layers.0.mlp.experts.0.extra"]
    index_path.write_text(json.dumps(index))
    shard.unlink()
    assert "No such file" in refusal(path) and shard.name in refusal(path)


def test_checkpoint_absent_parts_are_each_refused(tmp_path: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "nowhere")
    assert "config.json does not exist" in refusal(tmp_path)
    shutil.copy(QWEN / "config.json", tmp_path / "config.json")
    assert "neither model.safetensors.index.json nor model.safetensors" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    assert "cannot read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "num_experts_per_tok"}))
    assert "num_experts_per_tok" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 40}))
    assert "hidden_size=40 is not a multiple of 16" in refusal(tmp_path)


def test_checkpoint_reading_is_lazy_and_closes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path, spell(small_layer(), "model.layers.0.mlp.experts.", hf=True), CONFIG)
    read: list[str] = []
    original = SafetensorsFile.read

    def spy(self: SafetensorsFile, name: str, descriptor: int) -> torch.Tensor:
        read.append(name)
        return original(self, name, descriptor)

    monkeypatch.setattr(SafetensorsFile, "read", spy)
    checkpoint = Checkpoint.open(path)

    def open_files() -> list[str]:
        return [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]

    stream = checkpoint.iter_layer(0)
    next(stream)
    assert len(read) == 1
    stream.close()
    assert len(read) == 1 and not any("model.safetensors" in name for name in open_files())
