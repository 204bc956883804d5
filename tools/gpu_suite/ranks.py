# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks: R ranks of one layer on one GPU, as R launches on R streams or as one launch of all (design D9).

Every rank has shared and local memory of its own with poisoned guard bytes behind; holds no check of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.gpu_suite.layer import GUARD_BYTES, POISON, GpuLayer, Tensors, region_table, scale_table
from trtllm_megamoe.formats import round_up
from trtllm_megamoe.regions import header_words
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.launch import RANK_OPERANDS, Launch
from vendored_kernels.registry import load_kernel
from vendored_kernels.sm90.config import TILES, KernelConfig, TileConfig
from vendored_kernels.timeline import CTA_WORDS

GENERATION = 77


@dataclass(frozen=True, slots=True)
class Inputs:
    """One rank's inputs of one launch: x (T, H) bf16, ids (T, K), weights (T, K) fp32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.x.shape[0]


def one_rank_spec(spec: LayerSpec) -> LayerSpec:
    """The same layer on one rank."""
    return dataclasses.replace(spec, ep_size=1, num_local_experts=spec.num_experts)


def join(inputs: Sequence[Inputs]) -> Inputs:
    """All ranks' tokens as one rank's."""
    parts = ([i.x for i in inputs], [i.ids for i in inputs], [i.weights for i in inputs])
    return Inputs(*(torch.cat(part) for part in parts))


class RankGroup:
    """R ranks of one layer; `workspace` lends another group's memory, for layers that take turns on it."""

    def __init__(
        self,
        spec: LayerSpec,
        tensors: Tensors,
        max_tokens: int,
        cache_dir: Path,
        workspace: RankGroup | None = None,
        *,
        ctas: int | None = None,
        packed: Sequence[dict[str, torch.Tensor]] | None = None,
        scales: torch.Tensor | None = None,
        tiles: Mapping[str, TileConfig] = TILES,
        timestamps: bool = False,
    ) -> None:
        self.spec, self.cache_dir, self.max_tokens = spec, cache_dir, max_tokens
        ranks, local = spec.ep_size, spec.num_local_experts
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.ctas = ctas or num_sms // ranks
        self.table = region_table(spec, max_tokens)
        self.stride = round_up(self.table.total_bytes("local") + GUARD_BYTES, 256)
        if workspace is None:
            self.locals = torch.full((ranks * self.stride,), POISON, dtype=torch.uint8, device="cuda")
        else:
            self.locals = workspace.locals
        if scales is None:
            scales = scale_table(tensors, spec.num_experts, spec.activation_mode)
        facts = 1 if workspace is None else 2  # which of the layers on the workspace
        self.timeline = None
        if timestamps:
            self.timeline = torch.zeros(ranks * self.ctas, CTA_WORDS, dtype=torch.int64, device="cuda")
        self.layers = []
        for r in range(ranks):
            own = {
                f"{e}.{name}": tensors[f"{r * local + e}.{name}"]
                for e in range(local)
                for name in ([] if packed else sorted({key.split(".", 1)[1] for key in tensors}))
            }
            rows = torch.cat([scales[r * local : (r + 1) * local], scales[-1:]])
            rows[-1, 2:].view(torch.int64)[0] = facts
            space = self.locals[r * self.stride : (r + 1) * self.stride]
            shared = None if workspace is None else workspace.layers[r].spaces["shared"]
            layer = GpuLayer(
                spec,
                own,
                max_tokens,
                cache_dir,
                rank=r,
                ctas=self.ctas,
                local=space,
                shared=shared,
                scales=rows,
                packed=packed[r] if packed else None,
                tiles=tiles,
                timeline=None if self.timeline is None else self.timeline[r * self.ctas : (r + 1) * self.ctas],
            )
            self.layers.append(layer)
        bases = [layer.spaces["shared"].data_ptr() for layer in self.layers]
        self.peers = torch.tensor(bases, dtype=torch.int64, device="cuda")
        for layer in self.layers:
            layer.peers = self.peers
        self.counts = torch.arange(max_tokens + 1, dtype=torch.int32, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        self.errors = torch.zeros(ranks, 8, dtype=torch.int64, device="cuda")
        self.operands = torch.zeros(ranks, len(RANK_OPERANDS), dtype=torch.int64, device="cuda")
        self._together: dict[str, Launch] = {}
        self.reset()

    def reset(self, epoch: int = 0, returned: int = 0) -> None:
        """The state before a first launch; `epoch` and `returned` start the counters elsewhere."""
        words = torch.tensor(header_words(self.table, GENERATION), dtype=torch.int64)
        for layer in self.layers:
            layer.reset()
            layer.region("header").view(torch.int64).copy_(words)
            layer.region("epoch").view(torch.int64).fill_(epoch)
            layer.region("return_counters").view(torch.int64).fill_(returned)
            layer.region("expected_returns").view(torch.int64).fill_(returned)
        self.errors.zero_()
        torch.cuda.synchronize()

    def poison(self) -> None:
        """Rubbish into everything that a launch must write before it reads."""
        for layer in self.layers:
            layer.poison()

    def outputs(self, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
        """NaN-filled outputs, one row more than a rank has tokens."""
        return [
            torch.full((i.tokens + 1, self.spec.hidden_size), float("nan"), dtype=torch.bfloat16, device="cuda")
            for i in inputs
        ]

    def enqueue(self, rank: int, tile: str, inputs: Inputs, y: torch.Tensor, **extra: int) -> None:
        """One rank's launch on the current stream."""
        self.layers[rank].enqueue(
            tile,
            inputs.x,
            inputs.ids,
            inputs.weights,
            y,
            num_tokens=self.counts.data_ptr() + 4 * inputs.tokens,
            error=self.errors.data_ptr() + 64 * rank,
            **extra,
        )

    def load(self, tiles: Sequence[str]) -> None:
        """Load the code of these tiles: no launch that waits for others may be the first of its kernel."""
        for tile in tiles:
            self.layers[0].launch(tile)(dry=1)
            for layer in self.layers:
                layer.launch(tile)
        torch.cuda.synchronize()

    def run(self, tile: str, inputs: Sequence[Inputs], outputs: Sequence[torch.Tensor], **extra: int) -> None:
        """R launches on R streams, ordered behind and before the current stream."""
        main = torch.cuda.current_stream()
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self.enqueue(rank, tile, inputs[rank], outputs[rank], **extra)
        for stream in self.streams:
            main.wait_stream(stream)

    def set_operands(self, inputs: Sequence[Inputs], outputs: Sequence[torch.Tensor]) -> None:
        """What the next all-ranks launches work on."""
        rows = [
            [
                i.x.data_ptr(),
                i.ids.data_ptr(),
                i.weights.data_ptr(),
                self.counts.data_ptr() + 4 * i.tokens,
                y.data_ptr(),
                layer.packed["fc1_records"].data_ptr(),
                layer.packed["fc2_records"].data_ptr(),
                layer.scales.data_ptr(),
            ]
            for layer, i, y in zip(self.layers, inputs, outputs, strict=True)
        ]
        self.operands.copy_(torch.tensor(rows))

    def together(self, tile: str, ids_are_64: bool, **extra: int) -> None:
        """One launch of all ranks on what `set_operands` named."""
        if tile not in self._together:
            tile_config = self.layers[0].tiles[tile]
            config = KernelConfig(self.spec, tile_config, all_ranks=True, timestamps=self.timeline is not None)
            fixed = self.layers[0].arguments(tile) | {
                "grid": self.ctas * self.spec.ep_size,
                "error": self.errors.data_ptr(),
                "rank_operands": self.operands.data_ptr(),
                "local_stride": self.stride,
            }
            function = load_kernel(config, "sm_90a", self.cache_dir)
            self._together[tile] = Launch(function, self.locals[:256], fixed)
        self._together[tile](ids_are_64=int(ids_are_64), **extra)

    def records(self) -> list[dict[str, int]]:
        """Error records of all ranks as numbers."""
        from vendored_kernels.launch import ERROR_FIELDS

        return [dict(zip(ERROR_FIELDS, row, strict=True)) for row in self.errors.tolist()]

    def guards_are_intact(self) -> bool:
        """Whether nothing was written behind any rank's memory."""
        behind = [layer.spaces["shared"][self.table.total_bytes("shared") :] for layer in self.layers]
        behind += [layer.spaces["local"][self.table.total_bytes("local") :] for layer in self.layers]
        return all(bool((guard == POISON).all()) for guard in behind)
