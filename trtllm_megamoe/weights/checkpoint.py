# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory: what it holds, and its routed experts tensor by tensor.

Opening reads JSON and file headers only; tensors are read one at a time, by layer and expert, into their own memory.
Callers: the CLI, the layer's users, the audit. Judging what the tensors contain is staging's and the audit's work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.weights.faults import id_ranges
from trtllm_megamoe.weights.model_facts import ModelFacts, check_nvfp4, read_json, read_model_facts
from trtllm_megamoe.weights.read_ahead import Read, read_in_order
from trtllm_megamoe.weights.safetensors_file import SafetensorsFile, TensorEntry
from trtllm_megamoe.weights.spec import (
    AuxFamily,
    Component,
    LayerShape,
    ModuleSpec,
    TensorKey,
    parse_name,
    split_layer,
)

__all__ = ["Checkpoint", "LayerShape"]

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


class StoredTensor(NamedTuple):
    """One routed-expert tensor of the files."""

    key: TensorKey
    name: str
    file: SafetensorsFile
    reciprocal: bool

    @property
    def entry(self) -> TensorEntry:
        """Dtype, shape and place."""
        return self.file.entries[self.name]

    def read(self) -> torch.Tensor:
        """The tensor in fresh CPU memory."""
        with self.file.descriptor() as descriptor:
            return self.file.read(self.name, descriptor)


@dataclass(slots=True)
class LayerContents:
    """Everything under one layer's `experts.`: understood tensors by identity, and names of no supported dialect."""

    tensors: dict[TensorKey, StoredTensor] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)


class Checkpoint:
    """An opened checkpoint. Build it with :meth:`open`; it holds no file handles and needs no closing."""

    def __init__(
        self,
        path: Path,
        facts: ModelFacts,
        scheme: str,
        layers: dict[int, LayerContents],
        ignored: list[str],
    ) -> None:
        self.path = path
        self.facts = facts
        self.scheme = scheme
        self.contents = layers
        self.ignored = ignored
        """Names of tensors that are not routed experts."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a directory with `config.json` and one `model.safetensors` or shards with an index.

        Raises:
            MegaMoeWeightError: no such directory, no configuration, not NVFP4, no or truncated files, or expert
                tensors in no supported dialect (with the first unknown and the first missing name).
        """
        directory = Path(path)
        if not directory.is_dir():
            raise MegaMoeWeightError(f"{directory} is not a directory; give the directory that holds config.json")
        facts, config = read_model_facts(directory)
        scheme = check_nvfp4(directory, config)
        layers: dict[int, LayerContents] = {}
        ignored: list[str] = []
        for file, names in _open_files(directory):
            for name in names:
                layer, _ = split_layer(name)
                if layer is None:
                    ignored.append(name)
                else:
                    _add(layers.setdefault(layer, LayerContents()), name, file)
        checkpoint = cls(directory, facts, scheme, dict(sorted(layers.items())), ignored)
        if checkpoint.contents and not checkpoint.moe_layers:
            checkpoint._require_dialect(next(iter(checkpoint.contents)))
        return checkpoint

    @property
    def architecture(self) -> str:
        """First entry of `architectures`, e.g. `DeepseekV3ForCausalLM`."""
        return self.facts.architecture

    @property
    def swiglu_limit(self) -> float | None:
        """The configuration's clamp; None means no clamp."""
        return self.facts.swiglu_limit

    @property
    def moe_layers(self) -> list[int]:
        """Layers whose routed experts are in the files, ascending."""
        return [layer for layer, contents in self.contents.items() if contents.tensors]

    @property
    def expected_moe_layers(self) -> list[int]:
        """Layers that should have routed experts by the configuration."""
        return list(self.facts.expected_moe_layers)

    def layer_shape(self, layer: int) -> LayerShape:
        """Sizes of one layer's experts.

        Raises:
            MegaMoeWeightError: the files hold no routed experts of that layer.
        """
        self.layer_contents(layer)
        return self.facts.shape

    def layer_contents(self, layer: int) -> LayerContents:
        """What the files hold of one layer, read or not.

        Raises:
            MegaMoeWeightError: nothing; the text says which layers exist.
        """
        contents = self.contents.get(layer)
        if contents is None or not contents.tensors:
            if contents is not None:
                self._require_dialect(layer)
            have = id_ranges(self.moe_layers) or "none"
            raise MegaMoeWeightError(
                f"{self.path}: layer {layer} has no routed experts in the files; layers that have: {have}"
            )
        return contents

    def has_input_scales(self, layer: int) -> bool:
        """Whether the layer carries any `input_scale`; a weight-only checkpoint does not (R61)."""
        return any(key.component is Component.INPUT_SCALE for key in self.layer_contents(layer).tensors)

    def layer_tensors(self, layer: int, experts: Iterable[int] | None = None) -> list[StoredTensor]:
        """Descriptions, not data, of what :meth:`iter_layer` yields, in the same order.

        Raises:
            MegaMoeWeightError: no such layer, or tensor names of no supported dialect in it.
        """
        contents = self.layer_contents(layer)
        self._require_dialect(layer)
        wanted = None if experts is None else set(experts)
        return [
            stored
            for key, stored in sorted(contents.tensors.items())
            if wanted is None or key.expert in wanted or key.family is AuxFamily.FC1_INPUT
        ]

    def iter_layer(self, layer: int, experts: Iterable[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Read one layer's routed experts lazily, expert by expert; threads read a few large tensors ahead.

        Args:
            layer: model layer.
            experts: global ids to read; None reads all. Gate and up `input_scale` of every expert come in any case,
                because a1 is their maximum over all experts (R27).

        Yields:
            (name as in the file, tensor in fresh CPU memory).

        Raises:
            MegaMoeWeightError: no such layer, an unknown dialect, or a file that shrank meanwhile.
        """
        tensors = self.layer_tensors(layer, experts)
        with ExitStack() as stack:
            files = {stored.file for stored in tensors}
            descriptors = {file: stack.enter_context(file.descriptor()) for file in files}
            reads = (
                Read(stored.entry.nbytes, partial(stored.file.read, stored.name, descriptors[stored.file]))
                for stored in tensors
            )
            # The inner iterator is closed first: its threads use the descriptors.
            contents = stack.enter_context(closing(read_in_order(reads)))
            for stored in tensors:
                yield stored.name, next(contents)

    def _require_dialect(self, layer: int) -> None:
        contents = self.contents[layer]
        if contents.duplicates:
            raise MegaMoeWeightError(
                f"{self.path}: layer {layer} holds the same expert tensor under two names: {contents.duplicates[0]}"
            )
        if not contents.unknown:
            return
        shape = self.facts.shape
        wanted = ModuleSpec(shape, 0, shape.num_experts)
        expected = (*wanted.bulk_keys(), *wanted.family_keys(AuxFamily.GLOBAL))
        missing = next((key.name for key in expected if key not in contents.tensors), None)
        raise MegaMoeWeightError(
            f"{self.path}: layer {layer} uses {_describe_dialect(contents.unknown)}: first unknown tensor "
            f"{contents.unknown[0]!r}, first missing {missing or 'none'}; supported: ModelOpt NVFP4 and "
            "compressed-tensors nvfp4-pack-quantized, one tensor per expert and projection"
        )


def _describe_dialect(unknown: list[str]) -> str:
    """Name the dialect where its spelling gives it away."""
    signs = (
        ("_blocks", "the MXFP4 dialect of gpt-oss (fused experts)"),
        ("weight_scale_inv", "the block-FP8 dialect of DeepSeek"),
        ("pre_quant_scale", "the AWQ dialect (pre-quantisation scales)"),
        ("qweight", "a GPTQ or AWQ integer dialect"),
        ("gate_up_proj", "a fused gate-and-up dialect"),
        (".bias", "expert biases"),
    )
    first = unknown[0]
    return next((what for sign, what in signs if sign in first), "an unknown dialect")


def _add(contents: LayerContents, name: str, file: SafetensorsFile) -> None:
    parsed = parse_name(name)
    if parsed is None:
        contents.unknown.append(name)
    elif parsed.key in contents.tensors:
        contents.duplicates.append(f"{contents.tensors[parsed.key].name} and {name}")
    else:
        contents.tensors[parsed.key] = StoredTensor(parsed.key, name, file, parsed.reciprocal)


def _open_files(directory: Path) -> Iterator[tuple[SafetensorsFile, list[str]]]:
    """Every file with the names it is responsible for, checked against the index where there is one."""
    index_path = directory / _INDEX_NAME
    index = read_json(index_path)
    if index is None:
        single = directory / _SINGLE_NAME
        if not single.is_file():
            found = ", ".join(sorted(p.name for p in directory.glob("*.safetensors"))) or "no safetensors file"
            raise MegaMoeWeightError(f"{directory} has neither {_INDEX_NAME} nor {_SINGLE_NAME} (found: {found})")
        file = SafetensorsFile(single)
        yield file, list(file.entries)
        return
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise MegaMoeWeightError(f"{index_path}: no `weight_map` object")
    by_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        by_file.setdefault(str(file_name), []).append(name)
    for file_name, names in sorted(by_file.items()):
        if Path(file_name).name != file_name:
            raise MegaMoeWeightError(f"{index_path}: shard name {file_name!r} leaves the checkpoint directory")
        file = SafetensorsFile(directory / file_name)
        absent = [name for name in names if name not in file.entries]
        if absent:
            raise MegaMoeWeightError(
                f"{file.path}: {len(absent)} tensors that {_INDEX_NAME} places there are absent, first {absent[0]!r}"
            )
        yield file, names
