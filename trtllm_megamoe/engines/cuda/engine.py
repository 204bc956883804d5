# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine: addresses from the workspace, one kernel launch per rank and forward.

The kernel does everything between `x` and the output (`vendored_kernels/sm90/kernel.py`); this module owns the
addresses and the launch. A forward synchronises nothing, copies nothing to the host and allocates only its output: it
can be captured.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from trtllm_megamoe.agreement import succeed_or_fail_together
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cache.store import BUILD_WAIT_S, ObjectCache
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.base import Engine, SaturationReport, shared_weight_facts
from trtllm_megamoe.engines.cuda.arguments import SHARED_REGIONS, WEIGHTS_OF, layout_numbers, local_regions
from trtllm_megamoe.engines.cuda.failure import failure_of
from trtllm_megamoe.errors import MegaMoeError, MegaMoeStateError, MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import hopper
from trtllm_megamoe.kernels.family import Family
from trtllm_megamoe.kernels.prepared import LaunchChoice, PreparedLaunch
from trtllm_megamoe.kernels.selection import environment, select_tactics
from trtllm_megamoe.regions import launch_facts
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.tuning.table import ResolvedTactic
from trtllm_megamoe.tuning.tactic import Tactic
from trtllm_megamoe.weights.calibration import ActivationObserver
from trtllm_megamoe.weights.store import WeightStore
from vendored_kernels.timeline import CTA_WORDS

_SCALE_ROWS = "scale_rows"
"""Name of the table of factors among the slot tensors."""

logger = logging.getLogger(__name__)


@functools.cache
def _warn_once(caution: str) -> None:
    logger.warning("%s: check it first with `python -m trtllm_megamoe selftest`", caution)


class CudaEngine(Engine):
    """See the module docstring. Graph-safe once weights are loaded, which loads the GPU code as well."""

    name = "cuda"

    def __init__(self, config: MegaMoeConfig, workspace: Workspace, ladder: BucketLadder, family: Family) -> None:
        if family.caution is not None:
            _warn_once(family.caution)
        self._family, self.layout, self.auto_mode = family, family.layout, family.auto_mode
        self._config, self._workspace, self._ladder = config, workspace, ladder
        self._table, self._rank, self.device = workspace.table, workspace.comm.rank, workspace.device
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        # ranks that are threads of one process share its GPU: all their CTAs must be resident at once
        self._num_ctas = num_sms // workspace.comm.size if workspace.comm.transport == "threads" else num_sms
        self._spaces = {"shared": workspace.shared.own, "local": workspace.local}
        # T lives in device memory: entry t of this table is t, so no launch has to write it first
        # one rank's shared regions are given to the kernel as addresses, so its table says 0
        bases = workspace.shared.peer_addresses if workspace.comm.size > 1 else (0,)
        self._peers = torch.tensor(bases, dtype=torch.int64, device=self.device)
        self._layer_index = workspace.add_layer()
        self._token_counts = torch.arange(config.max_tokens_per_rank + 1, dtype=torch.int32, device=self.device)
        self._scales: torch.Tensor | None = None
        self._weights: WeightStore | None = None
        # collective, so here and not in bind: every rank must run the same
        here = environment(torch.cuda.get_device_name(self.device), self._num_ctas, family.arch)
        self._tactics = select_tactics(config, ladder.rungs, here, workspace.comm)
        self._obtain_kernels(config.activation_mode or family.auto_mode)
        self._addresses: dict[str, int] = {}
        self._launches: dict[int, PreparedLaunch] = {}
        self._mode: ActivationMode | None = None

    def bind(self, weights: WeightStore) -> None:
        mode = weights.activation_mode
        assert mode is not None  # a loaded store has one
        scales = self._scale_rows(weights, mode)
        if self._scales is None:
            self._scales = scales
            self._weights = weights
            self._mode = mode
            self._addresses = self._find_addresses(weights)
            self._launches = self._load(mode, self._tactics[mode])
        else:
            self._scales.copy_(scales)  # same address: captured graphs read it

    def slot_tensors(self, weights: WeightStore) -> dict[str, torch.Tensor]:
        assert self._mode is not None and self._scales is not None  # the layer has loaded
        rows = self._scales if weights is self._weights else self._scale_rows(weights, self._mode)
        return {**weights.packed, _SCALE_ROWS: rows}

    def adopt_slot_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._weights is not None and self._mode is not None and self._scales is not None  # loaded
        self._scales = tensors[_SCALE_ROWS].view(self._scales.shape)
        self._weights.relocate(tensors)
        self._addresses = self._find_addresses(self._weights)
        self._launches = self._load(self._mode, self._tactics[self._mode])

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, bucket: int) -> torch.Tensor:
        self._workspace.require_launchable()
        self.raise_if_failed()
        if self._scales is None:
            raise MegaMoeStateError(f"rank {self._rank}: forward before load_weights")
        prepared = self._prepared(bucket)
        self.last_bucket = bucket
        topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
        out = torch.empty_like(x)  # graph-ok[GR401]: the caller's result; a capture takes it from the graph's pool
        launch = partial(
            prepared.launch,
            x=x.data_ptr(),
            ids=topk_ids.data_ptr(),
            route_weights=topk_weights.data_ptr(),
            num_tokens=self._token_counts.data_ptr() + 4 * x.shape[0],
            y=out.data_ptr(),
            ids_are_64=int(topk_ids.dtype == torch.int64),
        )
        if torch.cuda.is_current_stream_capturing():
            launch()
        else:
            self._workspace.comm.launch_together(launch, self._config.timeout_s)
        return out

    def observe(self, observer: ActivationObserver | None) -> None:
        if observer is not None:
            raise MegaMoeUnavailableError(
                f"rank {self._rank}: the CUDA engine cannot calibrate, its fc1 output never leaves the kernel; "
                "calibrate with engine 'cpu' and write the scales into the checkpoint"
            )

    def launch_choice(self, bucket: int) -> LaunchChoice | None:
        return self._launches[bucket].choice if bucket in self._launches else None

    def pin_tactic(self, bucket: int, tactic: Tactic) -> None:
        if self._mode is None:
            raise MegaMoeStateError(f"rank {self._rank}: pin_tactic before load_weights")
        spec = self._family.layer_spec(self._config, self._workspace.comm.size, self._mode)
        space = self._family.tactic_space(spec, self._num_ctas)
        resolved = ResolvedTactic(space.resolve(tactic, bucket), "pinned")
        self._launches.update(self._load(self._mode, {bucket: resolved}))

    def stop_before(self, step: str) -> None:
        fault = {"fault_step": hopper.fault_step(step)}
        self._launches = {
            bucket: replace(prepared, launch=partial(prepared.launch, **fault))
            for bucket, prepared in self._launches.items()
        }

    @contextmanager
    def record_timeline(self, bucket: int) -> Iterator[torch.Tensor]:
        if self._mode is None:
            raise MegaMoeStateError(f"rank {self._rank}: record_timeline before load_weights")
        if "timestamps" not in self._family.arguments:
            raise MegaMoeUnavailableError(f"rank {self._rank}: {self._family.name} kernels write no time stamps")
        plain = self._prepared(bucket)
        buffer = torch.zeros(self._num_ctas, CTA_WORDS, dtype=torch.int64, device=self.device)
        spec = self._family.layer_spec(self._config, self._workspace.comm.size, self._mode)
        addresses = {**self._addresses, "timestamps": buffer.data_ptr()}
        tactics = {bucket: plain.choice.resolved}
        anchor = self._spaces["local"][:256]
        self._launches |= self._family.load_launches(spec, tactics, self._num_ctas, anchor, addresses, timestamps=True)
        try:
            yield buffer
        finally:
            self._launches[bucket] = plain

    def saturation(self) -> SaturationReport | None:
        """The kernel does not count saturated blocks; the CPU engine does."""
        return None

    def close(self) -> None:
        if self._launches and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a launch may be under way, and its failure be unknown
            try:
                self.raise_if_failed()
            except MegaMoeError as err:
                logger.warning("closed after a failed launch: %s", err)
        self._launches.clear()
        self._spaces.clear()

    def _scale_rows(self, weights: WeightStore, mode: ActivationMode) -> torch.Tensor:
        """(L + 1, 4) fp32: {gate, up, down factors, fc1 output's factor} per expert; last {qs1, 0, launch facts}."""
        alphas, num_local = weights.alphas, weights.spec.num_local_experts
        rows = torch.zeros(num_local + 1, 4, dtype=torch.float32, device=weights.device)
        rows[:num_local, :2] = alphas["fc1_alpha"] / self._family.accumulator_scale
        rows[:num_local, 2] = alphas["fc2_alpha"] / self._family.accumulator_scale
        rows[:num_local, 3] = alphas["fc1_norm_const"]
        if mode is ActivationMode.NVFP4:
            assert weights.scales.input_global is not None
            rows[num_local, 0] = torch.reciprocal(torch.tensor(weights.scales.input_global, dtype=torch.float32))
        rows[num_local, 2:].view(torch.int64)[0] = launch_facts(self._layer_index, shared_weight_facts(weights))
        return rows

    def _find_addresses(self, weights: WeightStore) -> dict[str, int]:
        """Launch arguments that stay: operands, regions, strides."""
        assert self._scales is not None
        table, packed, local = self._table, weights.packed, self._spaces["local"].data_ptr()
        base = self._spaces["shared"].data_ptr() if self._workspace.comm.size == 1 else 0
        return {
            **{
                argument: packed[buffer].data_ptr()
                for argument, buffer in WEIGHTS_OF[table.geometry.pool_layout].items()
            },
            "scales": self._scales.data_ptr(),
            "num_tokens": self._token_counts.data_ptr(),  # none; every forward names its own
            "error": self._workspace.error_record.data_ptr(),
            "timeout_ns": int(self._config.timeout_s * 1e9),
            "peers": self._peers.data_ptr(),
            "rank": self._rank,
            **{argument: local + table[region].offset_bytes for argument, region in local_regions(table).items()},
            **{argument: base + table[region].offset_bytes for argument, region in SHARED_REGIONS.items()},
            **layout_numbers(table),
        }

    def _obtain_kernels(self, mode: ActivationMode) -> None:
        """Find or compile every bucket's kernel before a checkpoint is read; all ranks have them or none goes on."""
        spec = self._family.layer_spec(self._config, self._workspace.comm.size, mode)
        tiles = [self._family.tile_of(resolved.tactic) for resolved in self._tactics[mode].values()]
        succeed_or_fail_together(
            lambda: self._family.obtain(spec, tiles, ObjectCache()),
            self._workspace.comm,
            max(self._config.timeout_s, BUILD_WAIT_S),
            error=MegaMoeUnavailableError,
        )

    def _load(self, mode: ActivationMode, tactics: Mapping[int, ResolvedTactic]) -> dict[int, PreparedLaunch]:
        spec = self._family.layer_spec(self._config, self._workspace.comm.size, mode)
        return self._family.load_launches(spec, tactics, self._num_ctas, self._spaces["local"][:256], self._addresses)

    def _prepared(self, bucket: int) -> PreparedLaunch:
        """The bucket's launch, code loaded: a launch must not load it, for peers would wait and a capture cannot."""
        if bucket in self._launches:
            return self._launches[bucket]
        where = "in a graph capture" if torch.cuda.is_current_stream_capturing() else "eager forward"
        loaded = ", ".join(map(str, sorted(self._launches))) or "none, as after close()"
        raise MegaMoeStateError(
            f"rank {self._rank}: kernel {self._kernel_name(bucket)} of bucket {bucket} is not prepared ({where}), "
            f"buckets prepared: {loaded}; nothing was launched. Build the layer, load its weights and call prepare() "
            "on all ranks before the first capture"
        )

    def _kernel_name(self, bucket: int) -> str:
        """What a bucket would launch, for error texts."""
        assert self._mode is not None  # weights are bound
        resolved = self._tactics[self._mode].get(bucket)
        if resolved is None:  # not of this layer's ladder
            return self._family.kernel_name
        spec = self._family.layer_spec(self._config, self._workspace.comm.size, self._mode)
        return self._family.object_key(self._family.kernel(spec, self._family.tile_of(resolved.tactic))).name

    def raise_if_failed(self) -> None:
        """A launch of any layer on this workspace leaves its error record in host memory; it surfaces here."""
        record = self._workspace.error_record
        if int(record[0]) == 0:
            return
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # the kernel sets the first word before it writes the others
            torch.cuda.synchronize(self.device)  # graph-ok[GR601]: a launch has failed, nothing goes on
        self._workspace.invalidate()
        raise failure_of(record.tolist(), self._table.geometry.num_local_experts, self._config.timeout_s)
