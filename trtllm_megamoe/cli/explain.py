# SPDX-License-Identifier: Apache-2.0
"""`explain`: what a layer will allocate and who computes what, before anything runs.

Everything printed is a pure function of shape and options, taken from the region table, the weight specification and
the eligibility rules; nothing is allocated and no engine is built.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

import trtllm_megamoe
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cli.failure import debug_option
from trtllm_megamoe.cli.host import explain_host
from trtllm_megamoe.cli.text import format_bytes, table
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.contract import require_eligible
from trtllm_megamoe.engines.registry import EngineChoice, choose_engine
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.presets import PRESETS, ModelShape
from trtllm_megamoe.regions import Geometry, RegionTable, Space
from trtllm_megamoe.weights.checkpoint import Checkpoint
from trtllm_megamoe.weights.spec import LayerShape, ModuleSpec

_SPACES: tuple[Space, ...] = ("shared", "local")


def find_model(source: str) -> ModelShape:
    """A preset by name, or the shape of a checkpoint directory.

    Raises:
        MegaMoeConfigError: Neither.
        MegaMoeWeightError: A directory that is no usable checkpoint.
    """
    if source in PRESETS:
        return PRESETS[source]
    if not Path(source).is_dir():
        raise MegaMoeConfigError(f"{source!r} is neither a checkpoint directory nor a preset ({', '.join(PRESETS)})")
    checkpoint = Checkpoint.open(source)
    shape = checkpoint.facts.shape
    return ModelShape(
        name=source,
        architecture=checkpoint.architecture,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_moe_layers=len(checkpoint.moe_layers),
        swiglu_limit=checkpoint.swiglu_limit,
    )


def share_of(model: ModelShape, share: int) -> ModelShape:
    """One rank's experts of a `share`-way layer, as a layer of its own.

    Raises:
        MegaMoeConfigError: The experts do not divide, or too few are left for a token.
    """
    if model.num_experts % share or model.num_experts // share < model.top_k:
        raise MegaMoeConfigError(
            f"--share-of-ep {share} does not fit {model.name}: it must divide {model.num_experts} experts and leave at "
            f"least top-k {model.top_k}"
        )
    return replace(model, num_experts=model.num_experts // share)


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of a launch: what happens, which rank does it, and the region it writes."""

    name: str
    rank: str
    writes: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What `explain` prints, for one layer on one rank."""

    model: ModelShape
    config: MegaMoeConfig
    engine: EngineChoice
    regions: RegionTable
    layer_weight_bytes: int

    @property
    def geometry(self) -> Geometry:
        """The facts behind every offset."""
        return self.regions.geometry

    @property
    def buckets(self) -> list[int]:
        """Token capacities a launch can choose from, ascending; the last one is the cap."""
        return list(BucketLadder.for_cap(self.config.max_tokens_per_rank).rungs)

    @property
    def return_row_bytes(self) -> int:
        """Bytes of one route's result on the wire."""
        wire, hidden = self.config.combine_format, self.config.hidden_size
        return wire.data_row_bytes(hidden) + wire.scale_row_bytes(hidden)

    @property
    def dispatch_row_bytes(self) -> int:
        """Stride of one staged token row and its scales; `auto` activations reserve the larger of both modes."""
        return self.geometry.payload_row_bytes + self.geometry.payload_scale_row_bytes

    def experts_of(self, rank: int) -> range:
        """Global expert ids of a rank."""
        num_local = self.geometry.num_local_experts
        return range(rank * num_local, (rank + 1) * num_local)

    def steps(self) -> list[Step]:
        """The launch in order."""
        requant = "fc1, SwiGLU" if self.config.activations == ActivationMode.BF16.value else "fc1, SwiGLU, requantise"
        return [
            Step("count routes, publish the counts", "token owner", "size_cells"),
            Step("stage x and ids, offer them", "token owner", "payload, index_rows, payload_tags"),
            Step("pull rows into expert order", "expert owner", "pool, pool_meta"),
            Step(requant, "expert owner", "fc1_out"),
            Step("fc2, round, encode for the wire", "expert owner", "result_data of the token owner"),
            Step("sum the K routes of each token", "token owner", "the output"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, schema `megamoe-explain/1`."""
        return {
            "schema": "megamoe-explain/1",
            "version": trtllm_megamoe.__version__,
            "model": asdict(self.model),
            "config": self.config.model_dump(mode="json"),
            "ep_size": self.geometry.ep_size,
            "engine": asdict(self.engine),
            "buckets": self.buckets,
            "max_pool_rows": self.geometry.max_pool_rows,
            "dispatch_row_bytes": self.dispatch_row_bytes,
            "return_row_bytes": self.return_row_bytes,
            "regions": [asdict(region) for region in self.regions.regions()],
            "total_bytes": {space: self.regions.total_bytes(space) for space in _SPACES},
            "weight_bytes": {
                "layer": self.layer_weight_bytes,
                "all_layers": self.layer_weight_bytes * self.model.num_moe_layers,
            },
            "ranks": [
                {"rank": rank, "first_expert": self.experts_of(rank).start, "num_experts": len(self.experts_of(rank))}
                for rank in range(self.geometry.ep_size)
            ],
            "steps": [asdict(step) for step in self.steps()],
        }


def make_plan(model: ModelShape, ep_size: int, config: MegaMoeConfig) -> Plan:
    """Plan one layer.

    Raises:
        MegaMoeConfigError: The layer is not eligible; every reason is named.
    """
    require_eligible(config, ep_size, model.name)
    shape = LayerShape(config.hidden_size, config.intermediate_size, config.num_experts, config.top_k)
    engine = choose_engine(config.engine, ep_size)
    return Plan(
        model=model,
        config=config,
        engine=engine,
        regions=RegionTable(Geometry.from_config(config, ep_size, engine.pool_layout)),
        layer_weight_bytes=ModuleSpec(shape, 0, config.num_experts // ep_size).source_bytes,
    )


@click.command("explain", short_help="Memory by region, buckets, and who computes what.")
@click.argument("source", metavar="PRESET|DIRECTORY", required=False)
@click.option("--ep-size", default=8, show_default=True, type=click.IntRange(min=1), help="Expert-parallel ranks.")
@click.option("--max-tokens-per-rank", default=1024, show_default=True, type=click.IntRange(min=1), help="The cap.")
@click.option("--combine-format", default="bf16", show_default=True, help="Wire: bf16, fp8 or fp4.")
@click.option("--activations", default="auto", show_default=True, type=click.Choice(["auto", "nvfp4", "bf16"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema megamoe-explain/1) instead of tables.")
@click.option("--host", "is_host", is_flag=True, help="Explain what the plug-in does to an installed tensorrt_llm.")
@debug_option
def command(
    source: str | None,
    ep_size: int,
    max_tokens_per_rank: int,
    combine_format: str,
    activations: str,
    as_json: bool,
    is_host: bool,
) -> None:
    """Show a layer's memory by region, its buckets, and who computes what; runs nothing.

    PRESET is one of deepseek-v3, deepseek-v4-pro, deepseek-v4-flash, kimi-k2, qwen3-235b, gpt-oss-120b.
    """
    if is_host:
        explain_host(as_json)
        return
    if source is None:
        raise click.UsageError("name a PRESET or a checkpoint DIRECTORY, or ask with --host")
    model = find_model(source)
    config = model.layer_config(
        max_tokens_per_rank=max_tokens_per_rank, combine_format=combine_format, activations=activations
    )
    plan = make_plan(model, ep_size, config)
    click.echo(json.dumps(plan.to_dict(), indent=2) if as_json else _describe(plan))


def _describe(plan: Plan) -> str:
    config, geometry, model = plan.config, plan.geometry, plan.model
    head = [
        ("model", f"{model.name} ({model.architecture}), {model.num_moe_layers} MoE layers"),
        ("layer", f"H {config.hidden_size}, I {config.intermediate_size}, E {config.num_experts}, K {config.top_k}"),
        ("numerics", f"{config.activations} activations, {config.combine_format.value} wire, scores "
                     f"{config.score_placement.value}, clamp {config.swiglu_limit or 'none'}"),
        ("engine", f"{plan.engine.name} ({plan.engine.reason})"),
        ("buckets", f"{', '.join(map(str, plan.buckets))} tokens a rank; the last is the cap"),
        ("worst routing", f"{geometry.max_pool_rows} pool rows on one rank: "
                          f"{geometry.ep_size} ranks x {geometry.routes_per_rank} routes, and padding"),
    ]  # fmt: skip
    regions = [
        (r.space, r.name, f"{r.dtype} {list(r.shape)}", format_bytes(r.num_bytes), "zero" if r.zero_at_start else "")
        for r in plan.regions.regions()
    ]
    totals = [(f"{space} workspace", format_bytes(plan.regions.total_bytes(space))) for space in _SPACES]
    totals += [
        ("weights, one layer", format_bytes(plan.layer_weight_bytes)),
        (f"weights, {model.num_moe_layers} layers", format_bytes(plan.layer_weight_bytes * model.num_moe_layers)),
    ]
    last = plan.experts_of(geometry.ep_size - 1)
    owners = [
        ("rank 0", f"experts {plan.experts_of(0).start} to {plan.experts_of(0).stop - 1}, and its own tokens"),
        (f"rank {geometry.ep_size - 1}", f"experts {last.start} to {last.stop - 1}, and its own tokens"),
    ][: geometry.ep_size]
    wire = f"a staged row has room for {plan.dispatch_row_bytes} bytes, a returned one has {plan.return_row_bytes}"
    return "\n\n".join(
        (
            table((), head),
            "Memory of one rank, by region:\n"
            + table(("space", "region", "type", "bytes", "at start"), regions, right=(3,)),
            table((), totals, right=(1,)),
            f"Who owns what ({geometry.num_local_experts} experts a rank):\n" + table((), owners),
            f"One launch ({wire}):\n"
            + table(("step", "done by", "writes"), [(s.name, s.rank, s.writes) for s in plan.steps()]),
        )
    )
