# SPDX-License-Identifier: Apache-2.0
"""A toy decoder with random weights, built from the blocks: its step runs eagerly or as two captured regions.

    region 1: embed, project, update KV cache and both compressors, choose and fetch compressed entries
    eager:    attention over as many cached tokens as the host knows there are
    region 2: output projection, stream mixing, experts, logits, sampling, advance tokens and positions

It shows the pattern of docs/cuda-graphs.md and is what the checks run on; it is no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trtllm_megamoe.graph.blocks import (
    Compressor,
    DecodeIO,
    Sampler,
    TopKSelector,
    doubly_stochastic,
    gather_rows,
    route_top_k,
)
from trtllm_megamoe.graph.dynamic.backends import Backend
from trtllm_megamoe.graph.region import Region

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ToyShape:
    """Sizes of the toy decoder; `ratios` are the windows of its two compressors."""

    num_rows: int = 4
    vocab_size: int = 211
    hidden_size: int = 32
    num_streams: int = 4
    num_experts: int = 8
    top_k: int = 2
    max_positions: int = 256
    ratios: tuple[int, int] = (4, 128)
    num_chosen: int = 8
    penalty_window: int = 16


class ToyDecoder:
    """One decode step over static buffers.

    Args:
        shape: Sizes.
        device: Where it runs.
        seed: For the weights; equal seeds give equal decoders.
        experts: `(x (T, H), topk_ids (T, K), topk_weights (T, K)) -> (T, H)`; default: small dense experts. A
            `MegaMoELayer.forward` fits.
    """

    def __init__(
        self, shape: ToyShape, device: torch.device | str, *, seed: int = 0, experts: Experts | None = None
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        rows, width = shape.num_rows, shape.hidden_size
        generator = torch.Generator().manual_seed(seed)

        def weight(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).mul_(float(size[-2]) ** -0.5).to(device)

        self.embedding = weight(shape.vocab_size, width) * shape.vocab_size**0.5
        self.unembed = weight(width, shape.vocab_size)
        self.project = weight(width, 3 * width)
        self.gate = weight(width, 2)
        self.merge = weight(width, width)
        self.mixer = weight(width, shape.num_streams**2)
        self.router = weight(width, shape.num_experts)
        self.expert_in = weight(shape.num_experts, width, width)
        self.expert_out = weight(shape.num_experts, width, width)
        self.experts = experts or self._dense_experts

        self.io = DecodeIO(rows, device)
        self.sampler = Sampler(rows, shape.vocab_size, shape.penalty_window, device)
        slots = [max(shape.max_positions // ratio, 1) for ratio in shape.ratios]
        self.compressors = [
            Compressor(rows, ratio, width, count, device) for ratio, count in zip(shape.ratios, slots, strict=True)
        ]
        self.selectors = [TopKSelector(count, shape.num_chosen, device) for count in slots]
        # One more column takes the keys of idle rows; attention never reads it.
        self.keys = torch.zeros(rows, shape.max_positions + 1, width, device=device)
        self.values = torch.zeros(rows, shape.max_positions + 1, width, device=device)
        self._columns = torch.arange(shape.max_positions, device=device)
        chosen = sum(selector.k for selector in self.selectors)
        self.hidden = torch.zeros(rows, width, device=device)
        self.query = torch.zeros(rows, width, device=device)
        self.fetched = torch.zeros(rows, chosen, width, device=device)
        self.fetched_valid = torch.zeros(rows, chosen, dtype=torch.bool, device=device)
        self.attended = torch.zeros(rows, width, device=device)
        self.logits = torch.zeros(rows, shape.vocab_size, device=device)

    def state(self) -> list[torch.Tensor]:
        """All tensors that survive from one step to the next."""
        kept = [self.keys, self.values, *self.io.state(), *self.sampler.state()]
        return kept + [tensor for compressor in self.compressors for tensor in compressor.state()]

    def before_attention(self) -> None:
        """Region 1."""
        positions = self.io.positions
        self.hidden.copy_(self.embedding.index_select(0, self.io.tokens))
        query, key, value = (self.hidden @ self.project).chunk(3, dim=1)
        self.query.copy_(query)
        place = torch.where(positions >= 0, positions, self.shape.max_positions)
        wide = place.view(-1, 1, 1).expand(-1, 1, key.shape[1])
        self.keys.scatter_(1, wide, key.unsqueeze(1))
        self.values.scatter_(1, wide, value.unsqueeze(1))
        gates = self.hidden @ self.gate
        fetched, valid = [], []
        for index, (compressor, selector) in enumerate(zip(self.compressors, self.selectors, strict=True)):
            compressor.step(value, gates[:, index], positions)
            scores = torch.einsum("rh,rsh->rs", query, compressor.entries)
            chosen = selector(scores, compressor.num_entries(positions))
            entries, exists = gather_rows(compressor.entries, chosen)
            fetched.append(entries)
            valid.append(exists)
        torch.cat(fetched, dim=1, out=self.fetched)
        torch.cat(valid, dim=1, out=self.fetched_valid)

    def attention(self, num_tokens: int) -> None:
        """Eager break: attend over the first `num_tokens` cached tokens (a host number) and the fetched entries."""
        keys, values = self.keys[:, :num_tokens], self.values[:, :num_tokens]
        visible = self._columns[:num_tokens] <= self.io.positions.unsqueeze(1)
        scores = torch.cat(
            (torch.einsum("rh,rsh->rs", self.query, keys), torch.einsum("rh,rsh->rs", self.query, self.fetched)), dim=1
        )
        allowed = torch.cat((visible, self.fetched_valid), dim=1)
        scores = (scores * self.shape.hidden_size**-0.5).masked_fill(~allowed, -1e30)
        everything = torch.cat((values, self.fetched), dim=1)
        self.attended.copy_(torch.einsum("rs,rsh->rh", scores.softmax(dim=1), everything))

    def after_attention(self) -> None:
        """Region 2."""
        rows, streams = self.shape.num_rows, self.shape.num_streams
        x = self.hidden + self.attended @ self.merge
        mixing = doubly_stochastic((self.hidden @ self.mixer).view(rows, streams, streams))
        x = x + torch.einsum("rij,rjw->riw", mixing, x.view(rows, streams, -1)).reshape(rows, -1)
        ids, weights = route_top_k(x @ self.router, self.shape.top_k, self.io.positions >= 0)
        x = x + self.experts(x, ids, weights)
        torch.matmul(x, self.unembed, out=self.logits)
        self.io.advance(self.sampler(self.logits, self.io.positions))

    def _dense_experts(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        safe = topk_ids.clamp(min=0)
        hidden = torch.einsum("th,tkhi->tki", x, self.expert_in[safe]).relu()
        routes = torch.einsum("tki,tkih->tkh", hidden, self.expert_out[safe])
        return (routes * topk_weights.unsqueeze(-1)).sum(dim=1)

    def step(self, num_tokens: int) -> None:
        """One eager step; `num_tokens` is the longest row's length including this token, known to the host."""
        with torch.no_grad():
            self.before_attention()
            self.attention(num_tokens)
            self.after_attention()


class RegionDecoder:
    """The same step as two captured regions around the eager attention.

    Args:
        decoder: The decoder whose buffers are used.
        backends: Makes the backend of each region; default: CUDA graphs on a GPU, plain execution on the CPU.
    """

    def __init__(self, decoder: ToyDecoder, backends: Callable[[], Backend] | None = None) -> None:
        self.decoder = decoder
        self.regions = [
            Region(function, decoder.device, name=function.__name__, backend=backends() if backends else None)
            for function in (decoder.before_attention, decoder.after_attention)
        ]

    def capture(self) -> None:
        """Capture both regions into one pool; the decoder's state is as before afterwards."""
        saved = [tensor.clone() for tensor in self.decoder.state()]
        pool = None
        for region in self.regions:
            region.capture(pool=pool)
            pool = region.pool
        with torch.no_grad():
            for tensor, value in zip(self.decoder.state(), saved, strict=True):
                tensor.copy_(value)

    def step(self, num_tokens: int) -> None:
        """One step: replay, attend eagerly, replay."""
        self.regions[0].run()
        with torch.no_grad():
            self.decoder.attention(num_tokens)
        self.regions[1].run()
