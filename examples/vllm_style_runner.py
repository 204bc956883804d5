# SPDX-License-Identifier: Apache-2.0
"""Drives `MegaMoELayer` from a model runner in vLLM's style: bucketed captures, persistent buffers, expert parallelism.

The engine owns its ranks and adds up their partial results itself, so each rank builds a ONE-rank layer over its own
experts and hands it local ids: `remap_to_local` turns every foreign, padding or garbage id into -1, which the layer
masks. Here the engine's ranks live in one process, one after another; in an engine each is a process and the sum is an
all-reduce.

    python examples/vllm_style_runner.py --checkpoint tests/data/modelopt_nvfp4_qwen3_moe --ep-size 4

On a GPU every bucket is captured, largest first, into one memory pool; on the CPU the same functions run over the same
static buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch

from trtllm_megamoe import Checkpoint, MegaMoeConfig, MegaMoELayer, ScorePlacement
from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError
from trtllm_megamoe.graph.blocks import remap_to_local, route_top_k
from trtllm_megamoe.graph.region import BucketedRegions, Region

_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_FC1_INPUT_SCALE = re.compile(r"\.(gate_proj|up_proj|w1|w3)\.input_scale$")


def local_expert_tensors(
    checkpoint: Checkpoint, layer: int, first_expert: int, num_local: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """One rank's experts, numbered from 0.

    fc1's activation scale is the maximum over ALL experts of the model; a rank that saw only its own would quantise
    differently from its neighbours, so every rank gets the global one.
    """
    scales = [tensor for name, tensor in checkpoint.iter_layer(layer, []) if _FC1_INPUT_SCALE.search(name)]
    largest = torch.stack([scale.reshape(()) for scale in scales]).amax() if scales else None
    own = range(first_expert, first_expert + num_local)
    for name, tensor in checkpoint.iter_layer(layer, own):
        match = _EXPERT.search(name)
        if match is None or int(match[0]) not in own:
            continue  # other ranks' scales, already in `largest`
        local_name = _EXPERT.sub(str(int(match[0]) - first_expert), name)
        takes_largest = largest is not None and _FC1_INPUT_SCALE.search(name)
        yield local_name, (largest.reshape(tensor.shape) if takes_largest else tensor)


class ExpertRank:
    """One engine rank's experts of one model layer: global ids in, this rank's part of the sum out."""

    def __init__(
        self, checkpoint: Checkpoint, layer: int, ep_rank: int, ep_size: int, max_tokens: int, engine: str
    ) -> None:
        shape = checkpoint.layer_shape(layer)
        if shape.num_experts % ep_size:
            raise MegaMoeConfigError(f"{shape.num_experts} experts do not divide over {ep_size} ranks")
        self.num_local = shape.num_experts // ep_size
        self.first_expert = ep_rank * self.num_local
        config = MegaMoeConfig.create(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_experts=self.num_local,
            top_k=shape.top_k,
            max_tokens_per_rank=max_tokens,
            swiglu_limit=checkpoint.swiglu_limit,
            score_placement=ScorePlacement.for_architecture(checkpoint.architecture),
            engine=engine,
        )
        self.layer = MegaMoELayer(config, layer=layer)
        self.layer.load_weights(local_expert_tensors(checkpoint, layer, self.first_expert, self.num_local))

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """(T, H) bfloat16 of the routes that this rank owns; rows without one are zero."""
        local_ids = remap_to_local(topk_ids, self.first_expert, self.num_local)
        return self.layer.forward(x, local_ids, topk_weights, max_tokens_over_ranks=x.shape[0])


class ModelRunner:
    """Runs a stack of MoE layers for batches of any size up to `max_num_tokens`.

    Buffers that layers use one after another (hidden states, the sum over ranks) exist once, not once a layer; all
    buckets are views of the same ones, so their graphs coexist and replay in any order.

    Args:
        checkpoint: Where the experts come from.
        layers: Model layers to run, in order.
        ep_size: Ranks of the engine.
        capture_sizes: Buckets to capture.
        max_num_tokens: Most tokens of one step; more than the largest bucket run eagerly.
        engine: `auto`, `cpu` or `cuda`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: Sequence[int],
        *,
        ep_size: int,
        capture_sizes: Sequence[int],
        max_num_tokens: int,
        engine: str = "auto",
    ) -> None:
        self.max_num_tokens = max_num_tokens
        shape = checkpoint.layer_shape(layers[0])
        self.top_k = shape.top_k
        self.ranks = [
            [ExpertRank(checkpoint, layer, rank, ep_size, max_num_tokens, engine) for rank in range(ep_size)]
            for layer in layers
        ]
        self.device = self.ranks[0][0].layer.device
        generator = torch.Generator().manual_seed(0)
        size = (len(layers), shape.hidden_size, shape.num_experts)
        self.routers = (torch.randn(size, generator=generator) * shape.hidden_size**-0.5).to(self.device)
        self.hidden = torch.zeros(max_num_tokens, shape.hidden_size, dtype=torch.bfloat16, device=self.device)
        self.sum = torch.zeros(max_num_tokens, shape.hidden_size, device=self.device)
        self.num_live = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._row = torch.arange(max_num_tokens, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._pinned_live = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        self.buckets = BucketedRegions(
            [size for size in capture_sizes if size <= max_num_tokens],
            lambda bucket: Region(lambda: self.forward(bucket), self.device, name=f"{bucket} tokens"),
        )

    def capture_model(self) -> None:
        """Warm up and capture every bucket, before the first request."""
        self.buckets.capture()

    def forward(self, num_rows: int) -> torch.Tensor:
        """All layers over the first `num_rows` rows of the static buffers; rows behind `num_live` are masked routes."""
        hidden, total = self.hidden[:num_rows], self.sum[:num_rows]
        live = self._row[:num_rows] < self.num_live
        for layer, ranks in enumerate(self.ranks):
            ids, weights = route_top_k(hidden.float() @ self.routers[layer], self.top_k, live)
            total.zero_()
            for rank in ranks:  # an engine runs these side by side and all-reduces `total`
                total.add_(rank.forward(hidden, ids, weights))
            hidden.add_(total.to(torch.bfloat16))
        return hidden

    def execute_model(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """One step, in the smallest bucket that holds it.

        Args:
            hidden_states: Shape (T, H), bfloat16, on the runner's device, 0 <= T <= max_num_tokens.

        Returns:
            Shape (T, H), bfloat16, a copy.
        """
        if hidden_states.shape[0] > self.buckets.buckets[-1]:
            return self.execute_eagerly(hidden_states)
        bucket = self.buckets.select(hidden_states.shape[0])
        self._fill(hidden_states, bucket)
        self.buckets.region(bucket).run()
        return self.hidden[: hidden_states.shape[0]].clone()

    def execute_eagerly(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """One step without graphs and padding; shapes as in :meth:`execute_model`."""
        num_tokens = hidden_states.shape[0]
        if num_tokens > self.max_num_tokens:
            raise MegaMoeCapacityError(f"{num_tokens} tokens exceed max_num_tokens {self.max_num_tokens}; split them")
        self._fill(hidden_states, num_tokens)
        with torch.no_grad():
            return self.forward(num_tokens).clone()

    def _fill(self, hidden_states: torch.Tensor, num_rows: int) -> None:
        num_tokens = hidden_states.shape[0]
        self.hidden[:num_tokens].copy_(hidden_states)
        self.hidden[num_tokens:num_rows].zero_()
        self._pinned_live.fill_(num_tokens)
        self.num_live.copy_(self._pinned_live)  # blocking, so that the next step may refill the staging word


@click.command()
@click.option("--checkpoint", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--ep-size", default=4, show_default=True, help="Ranks of the engine.")
@click.option("--engine", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option("--capture-sizes", default="1,2,4,8,16", show_default=True, help="Buckets.")
@click.option("--batches", default="3,16,0,5,20,1", show_default=True, help="Tokens of each step.")
def main(checkpoint: Path, ep_size: int, engine: str, capture_sizes: str, batches: str) -> None:
    """Run steps of several sizes and check that buckets and eager runs agree bit for bit."""
    sizes, steps = ([int(number) for number in text.split(",")] for text in (capture_sizes, batches))
    opened = Checkpoint.open(checkpoint)
    limit = max(*sizes, *steps)
    runner = ModelRunner(
        opened, opened.moe_layers, ep_size=ep_size, capture_sizes=sizes, max_num_tokens=limit, engine=engine
    )
    runner.capture_model()
    name = runner.ranks[0][0].layer.engine_name
    click.echo(f"{len(runner.ranks)} layers x {ep_size} ranks, engine {name} on {runner.device}, buckets {sizes}")
    generator = torch.Generator().manual_seed(1)
    for number in steps:
        tokens = torch.randn(number, runner.hidden.shape[1], generator=generator).to(torch.bfloat16).to(runner.device)
        out = runner.execute_model(tokens)
        equal = torch.equal(out, runner.execute_eagerly(tokens))
        kind = f"bucket {runner.buckets.select(number)}" if number <= sizes[-1] else "eager"
        click.echo(f"{number:4d} tokens: {kind:10s} {'equal to' if equal else 'DIFFERS FROM'} the eager run")
        if not equal:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
