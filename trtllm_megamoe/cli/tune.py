# SPDX-License-Identifier: Apache-2.0
"""`tune`: measure the legal tactics of a model's buckets on this GPU, or on all ranks of an MPI job, into a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cli.explain import find_model, share_of
from trtllm_megamoe.cli.failure import debug_option, set_rank
from trtllm_megamoe.cli.text import table as text_table
from trtllm_megamoe.comm import Communicator, mpi, single
from trtllm_megamoe.comm.launch import detect
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.contract import require_eligible
from trtllm_megamoe.engines.registry import choose_engine
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.kernels.family import family_here
from trtllm_megamoe.kernels.selection import environment, table_path, tuning_target
from trtllm_megamoe.kernels.tactics import tile_of
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.presets import PRESETS
from trtllm_megamoe.tuning.runner import LayerRunner
from trtllm_megamoe.tuning.table import TacticTable, TuningEnvironment
from trtllm_megamoe.tuning.tuner import TunedBucket, tune
from trtllm_megamoe.tuning.workload import random_step, random_weights


@click.command("tune", short_help="Measure a model's tactics on a GPU; writes the table that serving looks up.")
@click.option("--preset", "presets", multiple=True, type=click.Choice(list(PRESETS)), help="Model; may be repeated.")
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False), help="Shape of a checkpoint directory.")
@click.option(
    "--share-of-ep",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="One rank's experts of an EP-way layer, alone on one GPU.",
)
@click.option("--max-tokens-per-rank", default=8192, show_default=True, type=click.IntRange(min=1), help="The cap.")
@click.option(
    "--combine-format",
    "wires",
    multiple=True,
    type=click.Choice([f.value for f in CombineFormat]),
    help="Wire format; may be repeated.  [default: bf16]",
)
@click.option(
    "--activations",
    "modes",
    multiple=True,
    type=click.Choice([m.value for m in ActivationMode]),
    help="Activation mode; may be repeated.  [default: both]",
)
@click.option(
    "--bucket", "buckets", multiple=True, type=click.IntRange(min=1), help="Only this bucket; may be repeated."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The table; what it holds already is not measured again.  [default: TRTLLM_MEGAMOE_TACTICS]",
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=60.0, help="Longest wait for a peer, s.")
@debug_option
def command(
    presets: tuple[str, ...],
    checkpoint: str | None,
    share_of_ep: int,
    max_tokens_per_rank: int,
    wires: tuple[str, ...],
    modes: tuple[str, ...],
    buckets: tuple[int, ...],
    out: Path | None,
    timeout_s: float,
) -> None:
    """Time every legal tactic of every bucket and keep the best, the same on all ranks.

    Start it alone (one GPU) or under mpirun (one GPU per rank). A second run with the same table measures nothing.
    """
    launch = detect()
    set_rank(launch.rank)
    path = out if out is not None else table_path()
    if path is None:
        raise MegaMoeConfigError("name the table to write: --out FILE, or TRTLLM_MEGAMOE_TACTICS")
    sources = [*presets, *([checkpoint] if checkpoint is not None else [])]
    if not sources:
        raise MegaMoeConfigError("name a model: --preset or --checkpoint")
    if share_of_ep > 1 and launch.size > 1:
        raise MegaMoeConfigError(f"--share-of-ep {share_of_ep} is one rank alone, but {launch.size} ranks run")
    comm = mpi() if launch.is_launched else single()
    configs = [
        (
            source,
            share_of(find_model(source), share_of_ep).layer_config(
                max_tokens_per_rank=max_tokens_per_rank,
                combine_format=wire,
                activations=mode,
                engine="cuda",
                timeout_s=timeout_s,
            ),
        )
        for source in sources
        for wire in wires or (CombineFormat.BF16.value,)
        for mode in modes or tuple(m.value for m in ActivationMode)
    ]
    choose_engine("cuda", comm.size)
    for source, config in configs:
        require_eligible(config, comm.size, source)
    ladder = BucketLadder.for_cap(max_tokens_per_rank)
    unknown = sorted(set(buckets) - set(ladder.rungs))
    if unknown:
        raise MegaMoeConfigError(f"--bucket {unknown} is not in the ladder of cap {ladder.cap}: {ladder.rungs}")
    here = gpu_environment()
    found = open_table(path, here) if comm.rank == 0 else None
    for source, config in configs:
        outcomes, facts, measured = tune_layer(config, buckets or ladder.rungs, here, found, comm)
        if found is not None:
            found = found.put(facts, outcomes)
            if measured:
                found.save(path)  # after each layer: an interrupted run keeps what it found
            click.echo(_describe(source, config, comm.size, outcomes, measured))
    if comm.rank == 0:
        click.echo(f"table: {path}; serve with TRTLLM_MEGAMOE_TACTICS={path}")


def gpu_environment() -> TuningEnvironment:
    """This machine's GPU and build, as tables record it."""
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return environment(facts.name, facts.multi_processor_count, family_here().arch)


def open_table(path: Path, here: TuningEnvironment) -> TacticTable:
    """The table to go on with: the file's, or an empty one where there is no file.

    Raises:
        MegaMoeConfigError: The file was made in another environment, or is no table.
    """
    if not path.exists():
        return TacticTable(here)
    found = TacticTable.load(path)
    hard, soft = found.environment.mismatches(here)
    if hard or soft:
        raise MegaMoeConfigError(
            f"{path} was made elsewhere ({'; '.join(hard + soft)}); its times cannot be mixed with new ones. Write to "
            "another file, or remove it"
        )
    return found


def tune_layer(
    config: MegaMoeConfig,
    buckets: Sequence[int],
    here: TuningEnvironment,
    found: TacticTable | None,
    comm: Communicator,
) -> tuple[list[TunedBucket], dict[str, Any], int]:
    """Outcomes of one layer's buckets, the layer's facts, and how many buckets had to be measured. Collective.

    Args:
        found: Rank 0's table; the others' word is not asked.
    """
    mode = config.activation_mode
    assert mode is not None  # tuned layers name their mode
    space, facts = tuning_target(config, mode, comm.size, here.num_sms, here.arch)
    known = found.of_layer(facts) if found is not None else {}
    known = comm.allgather(known, config.timeout_s)[0]
    missing = [bucket for bucket in buckets if bucket not in known]
    if not missing:
        return [known[bucket] for bucket in buckets], facts, 0
    total = sum(len(space.legal_candidates(bucket)) for bucket in missing)
    hidden = None if comm.rank == 0 else True  # None: tqdm hides itself where stderr is no terminal
    with (
        make_runner(config, comm) as runner,
        tqdm(total=total, unit="tactic", leave=False, disable=hidden) as bar,
    ):

        def advance(bucket: int, done: int) -> None:
            bar.set_description(f"bucket {bucket}")
            bar.update()

        outcomes = tune(space, buckets, runner, comm, config.timeout_s, known=known, progress=advance)
    return outcomes, facts, len(missing)


def make_runner(config: MegaMoeConfig, comm: Communicator) -> LayerRunner:
    """A runner over the real layer. Collective."""

    def build() -> MegaMoELayer:
        layer = MegaMoELayer(config, comm)
        layer.load_weights(random_weights(config))
        return layer

    device = torch.device("cuda", torch.cuda.current_device())

    def step(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return random_step(config, num_tokens, comm.rank, device)

    return LayerRunner(build, step, comm, config.timeout_s)


def _describe(source: str, config: MegaMoeConfig, ep_size: int, outcomes: Sequence[TunedBucket], measured: int) -> str:
    rows = []
    for tuned in outcomes:
        gain = None
        if tuned.time_us is not None and tuned.heuristic_us is not None:
            gain = 100 * (1 - tuned.time_us / tuned.heuristic_us)
        rows.append(
            (
                str(tuned.bucket),
                tile_of(tuned.tactic).name,
                str(tuned.tactic.fc1_lag),
                "-" if tuned.time_us is None else f"{tuned.time_us:,.1f}",
                "-" if tuned.heuristic_us is None else f"{tuned.heuristic_us:,.1f}",
                "-" if gain is None else f"{gain:.1f}",
                f"{len(tuned.failures)} of {tuned.num_candidates}",
            )
        )
    head = (
        f"\n{source}, {config.num_experts} experts on {ep_size} rank(s), {config.activations} activations, "
        f"{config.combine_format.value} wire: {measured} of {len(outcomes)} buckets measured, the rest looked up"
    )
    titles = ("bucket", "tile", "fc1 lag", "us", "heuristic us", "gain %", "failed")
    return f"{head}\n{text_table(titles, rows, right=(0, 2, 3, 4, 5))}"
