# SPDX-License-Identifier: Apache-2.0
"""One rank's layer on one GPU through the launch interface: packed weights, workspace from the region table, one call.

Used by every check and benchmark of the suite; holds no check of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from trtllm_megamoe.engines.cuda.arguments import LOCAL_REGIONS, SHARED_REGIONS, layout_numbers
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.regions import Geometry, RegionTable
from trtllm_megamoe.weights.layout_base import ExpertBulk
from trtllm_megamoe.weights.layout_sm90 import Sm90Layout
from trtllm_megamoe.weights.spec import LayerShape
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.launch import ERROR_FIELDS, Launch
from vendored_kernels.registry import load_kernel
from vendored_kernels.sm90.config import TILES, KernelConfig, TileConfig, fc1_lag

Tensors = dict[str, torch.Tensor]


def requant_exponent(down_input_scale: float | None) -> int:
    """q of docs/numerics.md 4.2 step 6."""
    if down_input_scale is None:
        return 0
    mantissa, exponent = math.frexp(2688.0 * down_input_scale)
    return min(max(10 - (exponent if mantissa > 0.5 else exponent - 1), -14), 30)


def scale_table(tensors: Tensors, num_experts: int, mode: str) -> torch.Tensor:
    """(E + 1, 4) fp32: alphas times 2^14 and qs2 or 2^q of each expert, then {qs1, 0, 0, 0}; all fp32 products."""
    table = torch.zeros(num_experts + 1, 4, dtype=torch.float32)
    has_inputs = "0.w2.input_scale" in tensors
    one = torch.ones((), dtype=torch.float32)
    a1 = one
    if has_inputs:
        names = [f"{e}.{w}.input_scale" for e in range(num_experts) for w in ("w1", "w3")]
        a1 = torch.stack([tensors[n].float().cpu().reshape(()) for n in names]).max()
    for e in range(num_experts):
        gate, up, down = (tensors[f"{e}.{w}.weight_scale_2"].float().cpu().reshape(()) for w in ("w1", "w3", "w2"))
        a2 = tensors[f"{e}.w2.input_scale"].float().cpu().reshape(()) if has_inputs else None
        if mode == "nvfp4":
            if a2 is None:
                raise ValueError("nvfp4 activations need input scales")
            table[e] = torch.stack([gate * a1 * 2**14, up * a1 * 2**14, down * a2 * 2**14, one / a2])
        else:
            q = requant_exponent(None if a2 is None else float(a2))
            table[e] = torch.stack([gate * 2**14, up * 2**14, down * 2.0**-q * 2**14, one * 2.0**q])
    table[num_experts, 0] = one / a1
    return table


GUARD_BYTES = 4096
POISON = 0xFF


def region_table(spec: LayerSpec, max_tokens: int) -> RegionTable:
    """The workspace of a layer."""
    wire = CombineFormat(spec.combine_format)
    shape = (spec.hidden_size, spec.intermediate_size, spec.num_experts, spec.top_k)
    return RegionTable(Geometry(*shape, max_tokens, spec.ep_size, wire, spec.activation_mode))


class GpuLayer:
    """Weights and workspace of one layer on the current GPU; `forward` is one launch.

    `timeline` (CTAs, CTA_WORDS) i64: the kernels are those with timestamps, and write there.
    """

    def __init__(
        self,
        spec: LayerSpec,
        tensors: Tensors,
        max_tokens: int,
        cache_dir: Path,
        *,
        guard_bytes: int = GUARD_BYTES,
        packed: dict[str, torch.Tensor] | None = None,
        scales: torch.Tensor | None = None,
        rank: int = 0,
        ctas: int | None = None,
        local: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        tiles: Mapping[str, TileConfig] = TILES,
        timeline: torch.Tensor | None = None,
    ) -> None:
        self.spec, self.cache_dir, self.tiles, self.timeline = spec, cache_dir, tiles, timeline
        self.device = torch.device("cuda")
        self.rank = rank
        self.num_ctas = ctas or torch.cuda.get_device_properties(0).multi_processor_count
        self.table = region_table(spec, max_tokens)
        self.max_tokens = max_tokens
        if shared is None:
            size = self.table.total_bytes("shared") + guard_bytes
            shared = torch.full((size,), POISON, dtype=torch.uint8, device=self.device)
        if local is None:
            size = self.table.total_bytes("local") + guard_bytes
            local = torch.full((size,), POISON, dtype=torch.uint8, device=self.device)
        self.spaces = {"shared": shared, "local": local}
        self.peers = torch.zeros(spec.ep_size, dtype=torch.int64, device=self.device)
        self.reset()
        self.packed = packed if packed is not None else self._pack(tensors)
        table = scales if scales is not None else scale_table(tensors, spec.num_local_experts, spec.activation_mode)
        self.scales = table.to(self.device)
        self.num_tokens = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._launches: dict[str, Launch] = {}

    def _pack(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        spec = self.spec
        shape = LayerShape(spec.hidden_size, spec.intermediate_size, spec.num_local_experts, spec.top_k)
        layout = Sm90Layout()
        packed = {
            name: torch.empty(spec.num_local_experts, *dims, dtype=torch.uint8, device=self.device)
            for name, dims in layout.buffer_shapes(shape).items()
        }
        for e in range(spec.num_local_experts):
            fields = [
                tensors[f"{e}.{w}.{part}"].view(torch.uint8).to(self.device).unsqueeze(0)
                for w in ("w1", "w3", "w2")
                for part in ("weight", "weight_scale")
            ]
            layout.pack(ExpertBulk(*fields), {name: buffer[e : e + 1] for name, buffer in packed.items()})
        return packed

    def region(self, name: str) -> torch.Tensor:
        """Bytes of a region."""
        region = self.table[name]
        return self.spaces[region.space][region.offset_bytes : region.end_bytes]

    def address(self, name: str) -> int:
        """Base + offset of a region."""
        region = self.table[name]
        return self.spaces[region.space].data_ptr() + region.offset_bytes

    def reset(self) -> None:
        """What the table says must be zero at start; everything else stays poisoned."""
        for space in ("shared", "local"):
            for region in self.table.regions(space):
                if region.zero_at_start:
                    self.region(region.name).zero_()

    def poison(self) -> None:
        """NaN patterns into every region that a launch must write before it reads."""
        for name in (
            "pool",
            "fc1_out",
            "result_data",
            "result_scales",
            "pool_row_scale",
            "pool_weight",
            "pool_meta",
            "route_rows",
            "index_rows",
            "payload",
            "payload_scales",
            "route_weights",
        ):
            self.region(name).fill_(0xFF)

    def error_record(self) -> dict[str, int]:
        """The error record as numbers."""
        return dict(zip(ERROR_FIELDS, self.region("error_record").view(torch.int64).tolist(), strict=True))

    def launch(self, tile_name: str) -> Launch:
        """The launch of one tile configuration."""
        if tile_name not in self._launches:
            config = KernelConfig(self.spec, self.tiles[tile_name], timestamps=self.timeline is not None)
            fixed = self.arguments(tile_name) | {"grid": self.num_ctas}
            function = load_kernel(config, "sm_90a", self.cache_dir)
            self._launches[tile_name] = Launch(function, self.spaces["local"][:256], fixed)
        return self._launches[tile_name]

    def arguments(self, tile_name: str) -> dict[str, int]:
        """Launch arguments that stay; ranks must be connected (`peers`) before."""
        base = self.spaces["shared"].data_ptr() if self.spec.ep_size == 1 else 0
        return {
            **{argument: self.address(region) for argument, region in LOCAL_REGIONS.items()},
            **{argument: base + self.table[region].offset_bytes for argument, region in SHARED_REGIONS.items()},
            **layout_numbers(self.table),
            "w1": self.packed["fc1_records"].data_ptr(),
            "w2": self.packed["fc2_records"].data_ptr(),
            "scales": self.scales.data_ptr(),
            "num_tokens": self.num_tokens.data_ptr(),
            "error": self.address("error_record"),
            "timeout_ns": 2_000_000_000,
            "peers": self.peers.data_ptr(),
            "lag": fc1_lag(self.spec, self.tiles[tile_name], self.num_ctas),
            "timestamps": 0 if self.timeline is None else self.timeline.data_ptr(),
            "rank": self.rank,
            "ctas_per_rank": self.num_ctas,
        }

    def set_tokens(self, count: int) -> None:
        """Write T to device memory."""
        if count > self.max_tokens:
            raise ValueError(f"{count} tokens do not fit {self.max_tokens}")
        self.num_tokens.fill_(count)

    def enqueue(
        self, tile_name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor, **extra: int
    ) -> None:
        """One launch over caller-owned tensors; T comes from `set_tokens` where `num_tokens` is not given."""
        self.launch(tile_name)(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            route_weights=weights.data_ptr(),
            y=y.data_ptr(),
            ids_are_64=int(ids.dtype == torch.int64),
            **extra,
        )

    def forward(self, tile_name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Set T, poison the output, launch, return the output (T, H)."""
        self.set_tokens(x.shape[0])
        y = torch.full(
            (max(x.shape[0], 1), self.spec.hidden_size), float("nan"), dtype=torch.bfloat16, device=self.device
        )
        self.enqueue(tile_name, x, ids, weights, y)
        return y[: x.shape[0]]
