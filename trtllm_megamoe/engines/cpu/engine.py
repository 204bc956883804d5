# SPDX-License-Identifier: Apache-2.0
"""The layer's protocol on host memory: the same regions, cells, counters and order as the kernels.

One launch (design D6; every step names its region):

1. publish   one `size_cells` word per expert of every owner {epoch, count}, as soon as routes are counted
2. stage     own token rows into `payload` / `payload_scales` / `route_weights`, sorted routes into each owner's
             `index_rows`
3. offer     the epoch into every owner's `payload_tags`
4. pull      wait for all size cells of this epoch, then for all payload tags, copy rows from the sources' payloads into
             `pool` in expert order
5. compute   fc1, SwiGLU, requantisation into `fc1_out`, fc2
6. return    encode rows into the token owners' `result_data` / `result_scales`, then add to `return_counters`
7. reduce    wait for the cumulative return counters, sum the live slots in slot order

Nothing is reset between launches and there is no barrier. Ranks without tokens take every step. Every wait is bounded;
a rank that gives up marks `abort` on all ranks, so that no peer waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.base import Engine, SaturationReport, shared_weight_facts
from trtllm_megamoe.engines.cpu import numerics
from trtllm_megamoe.engines.cpu.experts import ExpertMath
from trtllm_megamoe.engines.cpu.memory import RegionViews
from trtllm_megamoe.errors import (
    MegaMoeAbortedError,
    MegaMoeError,
    MegaMoeRankDivergenceError,
    MegaMoeStateError,
    MegaMoeTimeoutError,
)
from trtllm_megamoe.formats import ScorePlacement, round_up
from trtllm_megamoe.regions import (
    COUNT_BITS,
    COUNTER_BANKS,
    HEADER_FACTS,
    HEADER_GENERATION,
    HEADER_LAYOUT,
    TOKEN_BLOCK_ROWS,
    launch_facts,
)
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.weights.calibration import ActivationObserver
from trtllm_megamoe.weights.store import WeightStore

_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3


@dataclass(frozen=True, slots=True)
class Missing:
    """What a wait is still waiting for."""

    peer: int
    index: int
    expected: int
    seen: int


@dataclass(frozen=True, slots=True)
class PooledExpert:
    """One local expert's rows in the pool."""

    expert: int
    first_row: int
    num_rows: int


class CpuEngine(Engine):
    """See the module docstring. Collective: forward, in the same order on all ranks."""

    name = "cpu"
    layout = "reference"
    device = torch.device("cpu")

    def __init__(self, config: MegaMoeConfig, workspace: Workspace) -> None:
        table = workspace.table
        self._config = config
        self._workspace = workspace
        self._layer_index = workspace.add_layer()
        self._geometry = table.geometry
        self._comm = workspace.comm
        self._rank = self._comm.rank
        self._local = RegionViews(table, "local", workspace.local)
        self._shared = [RegionViews(table, "shared", memory) for memory in workspace.shared.views]
        self._own = self._shared[self._rank]
        self._facts = 0
        self._weights: WeightStore | None = None
        self._math: ExpertMath | None = None
        self._saturation = SaturationReport()

    def bind(self, weights: WeightStore) -> None:
        self._weights = weights
        self._math = ExpertMath(weights, self._config)
        self._saturation = SaturationReport()
        self._facts = launch_facts(self._layer_index, shared_weight_facts(weights))

    def slot_tensors(self, weights: WeightStore) -> dict[str, torch.Tensor]:
        return weights.migratable()

    def adopt_slot_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._weights is not None  # the layer has loaded
        self._weights.relocate(tensors)
        self.bind(self._weights)

    def observe(self, observer: ActivationObserver | None) -> None:
        if self._math is None:
            raise MegaMoeStateError(f"rank {self._rank}: nothing to observe before load_weights")
        self._math.observer = observer

    def saturation(self) -> SaturationReport:
        return self._saturation

    def close(self) -> None:
        """All memory is the workspace's."""

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, bucket: int) -> torch.Tensor:
        if self._math is None:
            raise MegaMoeStateError(f"rank {self._rank}: forward before load_weights")
        self._workspace.require_open()
        self._raise_if_aborted("entry", 0)
        self._workspace.require_launchable()
        self.last_bucket = bucket  # one configuration serves all buckets here
        epoch = int(self._local["epoch"][0]) + 1
        try:
            topk_ids = topk_ids.long()
            own_routes = self._publish(topk_ids, epoch)
            self._stage(x, topk_weights, own_routes)
            self._offer(epoch)
            experts = self._pull(epoch)
            for pooled in experts:
                self._compute_and_return(pooled)
            out = self._reduce(topk_ids, topk_weights, epoch)
        except MegaMoeError:
            self._workspace.invalidate()
            self._tell_peers_to_stop()
            raise
        self._local["epoch"][0] = epoch
        return out

    # -- 1. publish

    def _publish(self, topk_ids: torch.Tensor, epoch: int) -> list[torch.Tensor]:
        """Tell every owner how many routes it gets; returns them per owner, by expert."""
        g = self._geometry
        ids = topk_ids.flatten()
        live = (ids >= 0) & (ids < g.num_experts)
        routes = live.nonzero().flatten()
        order = torch.argsort(ids[routes], stable=True)
        routes, experts = routes[order], ids[routes][order]
        counts = torch.bincount(experts, minlength=g.num_experts).view(g.ep_size, g.num_local_experts)
        self._own["header"][HEADER_FACTS + epoch % COUNTER_BANKS] = self._facts
        self._comm.fence()  # facts before the cells that announce them
        for owner in range(g.ep_size):
            cells = (epoch << COUNT_BITS) | counts[owner]
            self._shared[owner]["size_cells"][epoch % COUNTER_BANKS, self._rank] = cells
        self._comm.fence()
        sent = counts.sum(1)
        self._local["expected_returns"].add_(sent)
        return [routes[end - count : end] for count, end in zip(sent.tolist(), sent.cumsum(0).tolist(), strict=True)]

    # -- 2. stage

    def _stage(self, x: torch.Tensor, topk_weights: torch.Tensor, own_routes: Sequence[torch.Tensor]) -> None:
        """Safe without a wait: this rank's previous launch ended, so every row it sent has been pulled and returned."""
        assert self._math is not None
        t = x.shape[0]
        data, scales, report = self._math.stage_tokens(x)
        self._own["payload"][:t, : data.shape[1]] = data
        self._own["payload_scales"][:t, : scales.shape[1]] = scales
        self._own["route_weights"][:t] = topk_weights
        for owner, mine in enumerate(own_routes):
            self._shared[owner]["index_rows"][self._rank, : mine.numel()] = mine.int()
        self._saturation = self._saturation + report

    # -- 3. offer

    def _offer(self, epoch: int) -> None:
        self._comm.fence()  # index rows and payload before the tags that announce them
        for shared in self._shared:
            shared["payload_tags"][self._rank] = epoch
        self._comm.fence()

    # -- 4. pull

    def _pull(self, epoch: int) -> list[PooledExpert]:
        assert self._math is not None
        g = self._geometry
        cells = self._own["size_cells"][epoch % COUNTER_BANKS]

        def missing_cell() -> Missing | None:
            stale = ((cells >> COUNT_BITS) != epoch).nonzero()
            if stale.numel() == 0:
                return None
            source, expert = stale[0].tolist()
            return Missing(source, expert, epoch, int(cells[source, expert]) >> COUNT_BITS)

        self._wait("size_cells", epoch, missing_cell)
        self._check_headers(epoch)
        tags = self._own["payload_tags"]

        def missing_payload() -> Missing | None:
            late = (tags < epoch).nonzero()
            return None if late.numel() == 0 else Missing(int(late[0]), int(late[0]), epoch, int(tags[late[0]]))

        self._wait("payload_tags", epoch, missing_payload)
        counts = cells & ((1 << COUNT_BITS) - 1)
        starts = counts.cumsum(1) - counts  # of each expert inside each source's index row
        experts: list[PooledExpert] = []
        first_row = 0
        for expert in range(g.num_local_experts):
            row = first_row
            # sources rotated from rank + 1, so that all ranks do not pull from the same one at once
            for source in [(self._rank + 1 + i) % g.ep_size for i in range(g.ep_size)]:
                count, start = int(counts[source, expert]), int(starts[source, expert])
                self._pull_rows(source, start, row, count)
                row += count
            if row > first_row:
                experts.append(PooledExpert(expert, first_row, row - first_row))
            first_row += round_up(row - first_row, TOKEN_BLOCK_ROWS)
        return experts

    def _pull_rows(self, source: int, start: int, row: int, count: int) -> None:
        assert self._math is not None
        if count == 0:
            return
        peer, local = self._shared[source], self._local
        routes = self._own["index_rows"][source, start : start + count]
        tokens = routes.long() // self._geometry.top_k
        rows = slice(row, row + count)
        pool, row_scale = self._math.decode_tokens(peer["payload"][tokens], peer["payload_scales"][tokens])
        local["pool"][rows] = pool
        local["pool_row_scale"][rows] = row_scale
        local["pool_weight"][rows] = peer["route_weights"].flatten()[routes.long()]
        local["pool_meta"][rows, 0] = source
        local["pool_meta"][rows, 1] = routes

    def _check_headers(self, epoch: int) -> None:
        """Once a peer's cells of this launch are here, so are its facts; see `regions.launch_facts` for their banks."""
        facts = HEADER_FACTS + epoch % COUNTER_BANKS
        own = self._own["header"].tolist()
        for peer, shared in enumerate(self._shared):
            theirs = shared["header"].tolist()
            where = f"rank {self._rank}: rank {peer} in launch {epoch}: "
            for word, what in ((HEADER_GENERATION, "allocation"), (HEADER_LAYOUT, "layout")):
                if theirs[word] != own[word]:
                    raise MegaMoeRankDivergenceError(
                        f"{where}another {what} of the workspace ({theirs[word]:#x}, own {own[word]:#x}); build the "
                        "workspace and its layers anew on all ranks"
                    )
            layer, own_layer = theirs[facts] >> 32, own[facts] >> 32
            if layer != own_layer:
                raise MegaMoeRankDivergenceError(
                    f"{where}it runs layer {layer - 1} of the workspace, this rank runs layer {own_layer - 1}; call "
                    "the layers in the same order on every rank"
                )
            if theirs[facts] != own[facts]:
                raise MegaMoeRankDivergenceError(
                    f"{where}it loaded weights with other shared facts (activation mode or fc1 input scale): digest "
                    f"{theirs[facts]:#x}, own {own[facts]:#x}; load the same checkpoint on every rank"
                )

    # -- 5. and 6. compute and return

    def _compute_and_return(self, pooled: PooledExpert) -> None:
        assert self._math is not None
        local = self._local
        rows = slice(pooled.first_row, pooled.first_row + pooled.num_rows)
        weight = local["pool_weight"][rows] if self._config.score_placement is ScorePlacement.BEFORE_REQUANT else None
        hidden, report = self._math.fc1(pooled.expert, local["pool"][rows], local["pool_row_scale"][rows], weight)
        local["fc1_out"][rows] = hidden
        self._saturation = self._saturation + report
        data, scales = numerics.encode_wire(
            self._math.fc2(pooled.expert, local["fc1_out"][rows]), self._geometry.combine_format
        )
        sources, routes = local["pool_meta"][rows, 0], local["pool_meta"][rows, 1].long()
        returned = torch.bincount(sources, minlength=self._geometry.ep_size)
        for source, peer in enumerate(self._shared):
            chosen = (sources == source).nonzero().flatten()
            if chosen.numel():
                peer["result_data"][routes[chosen]] = data[chosen]
                peer["result_scales"][routes[chosen], : scales.shape[1]] = scales[chosen]
        self._comm.fence()  # rows before the counters that announce them
        for source, peer in enumerate(self._shared):
            peer["return_counters"][self._rank] += returned[source]  # this rank is the cell's only writer
        self._comm.fence()

    # -- 7. reduce

    def _reduce(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, epoch: int) -> torch.Tensor:
        g = self._geometry
        expected, counters = self._local["expected_returns"], self._own["return_counters"]

        def missing_rows() -> Missing | None:
            late = (counters < expected).nonzero()
            if late.numel() == 0:
                return None
            owner = int(late[0])
            return Missing(owner, owner, int(expected[owner]), int(counters[owner]))

        self._wait("return_counters", epoch, missing_rows)
        total = torch.zeros(topk_ids.shape[0], g.hidden_size)
        for slot in range(g.top_k):
            ids = topk_ids[:, slot]
            tokens = ((ids >= 0) & (ids < g.num_experts)).nonzero().flatten()
            routes = tokens * g.top_k + slot
            rows = numerics.decode_wire(
                self._own["result_data"][routes], self._own["result_scales"][routes], g.combine_format, g.hidden_size
            )
            if self._config.score_placement is ScorePlacement.AFTER_FC2:
                rows = topk_weights[tokens, slot].unsqueeze(-1) * rows
            total[tokens] = total[tokens] + rows
        return total.bfloat16()

    # -- waits

    def _wait(self, site: str, epoch: int, missing: Callable[[], Missing | None]) -> None:
        """Poll until nothing is missing; every poll sees what peers have released before it."""
        deadline = time.monotonic() + self._config.timeout_s
        nap_s = _FIRST_NAP_S
        while True:
            self._comm.fence()
            still = missing()
            if still is None:
                return
            self._raise_if_aborted(site, epoch)
            if time.monotonic() > deadline:
                record = [1, self._rank, still.peer, still.index, epoch, still.expected, still.seen, 0]
                self._local["error_record"].copy_(torch.tensor(record))
                raise MegaMoeTimeoutError(
                    f"rank {self._rank}: waited {self._config.timeout_s:g} s at {site} for rank {still.peer} in launch "
                    f"{epoch} (index {still.index}: expected {still.expected}, seen {still.seen}); "
                    "that rank did not launch, stopped, or is slower than timeout_s"
                )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _raise_if_aborted(self, site: str, epoch: int) -> None:
        culprit = int(self._own["abort"][0])
        if culprit:
            raise MegaMoeAbortedError(
                f"rank {self._rank}: rank {culprit - 1} gave up; stopped at {site} of launch {epoch}. "
                "Build the layer anew on all ranks"
            )

    def _tell_peers_to_stop(self) -> None:
        for peer in self._shared:
            if int(peer["abort"][0]) == 0:
                peer["abort"][0] = self._rank + 1
        self._comm.fence()
