# SPDX-License-Identifier: Apache-2.0
"""One layer over all virtual ranks as a single callable, so that checks of one step can drive several ranks.

A step sends R * T rows: T to each rank, on a stream of its own that is forked from the caller's and joined with it.
Eager launches come from a thread per rank, because ranks meet before and after each; a capture takes all of them from
the caller's thread, as branches of one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.symmetric.workspace import Workspace

Weights = dict[str, torch.Tensor]


class OverRanks:
    """`config` and `forward` of a layer; rows of all ranks one after another."""

    def __init__(self, layers: Sequence[MegaMoELayer], streams: Sequence[torch.cuda.Stream | None]) -> None:
        self.config = layers[0].config
        self.layers, self.streams = layers, streams
        self._threads = ThreadPoolExecutor(len(layers))

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens_over_ranks: int
    ) -> torch.Tensor:
        """(R * T, H) in and out; `max_tokens_over_ranks` is R * T."""
        count = len(self.layers)
        parts = list(zip(x.chunk(count), topk_ids.chunk(count), topk_weights.chunk(count), strict=True))
        forked = [stream for stream in self.streams if stream is not None]
        caller = torch.cuda.current_stream() if forked else None
        for stream in forked:
            stream.wait_stream(caller)

        def run(rank: int) -> torch.Tensor:
            stream = self.streams[rank]
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return self.layers[rank].forward(*parts[rank], max_tokens_over_ranks // count)

        if forked and torch.cuda.is_current_stream_capturing():
            outs = [run(rank) for rank in range(count)]
        else:
            outs = list(self._threads.map(run, range(count)))
        for stream in forked:
            caller.wait_stream(stream)
        return torch.cat(outs)


def build_over_ranks(config: MegaMoeConfig, weights: Sequence[Weights], ep_size: int, wait_s: float) -> list[OverRanks]:
    """Layers with these weights over virtual ranks, all on one workspace per rank."""
    device = "cuda" if config.engine == "cuda" else None

    def body(comm: Communicator) -> list[MegaMoELayer]:
        workspace: Workspace = build_workspace(config, comm)
        layers = [MegaMoELayer(config, comm, workspace=workspace) for _ in weights]
        for layer, tensors in zip(layers, weights, strict=True):
            layer.load_weights(tensors)
            layer.prepare()
        return layers

    by_rank = run_threads(ep_size, body, wait_s, device)
    streams = [None if device is None else torch.cuda.Stream() for _ in range(ep_size)]
    return [OverRanks([layers[index] for layers in by_rank], streams) for index in range(len(weights))]
