# SPDX-License-Identifier: Apache-2.0
"""`compile`: fill the kernel cache for a model ahead of time, on a machine with or without a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from tqdm import tqdm

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.cli.explain import find_model, share_of
from trtllm_megamoe.cli.failure import debug_option
from trtllm_megamoe.comm import single
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.contract import require_eligible
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.kernels import blackwell, hopper
from trtllm_megamoe.kernels.family import FAMILIES
from trtllm_megamoe.kernels.selection import NO_GPU, environment, select_tactics
from trtllm_megamoe.kernels.tactics import tactic_space, tile_of
from trtllm_megamoe.presets import PRESETS
from trtllm_megamoe.selftest.objects import Bar, obtain_all
from trtllm_megamoe.selftest.plan import Target, needed_kernels

logger = logging.getLogger(__name__)

Obtain = Callable[[hopper.Progress], dict[str, Path]]
"""Gets one kernel's object; reports its name and state."""

H200_SMS = 132
"""Multiprocessors of H100 SXM and H200: they choose between whole and half tiles."""


def _blackwell_kernels(
    arch: str, config: MegaMoeConfig, ep_size: int, ladder: BucketLadder, cache: ObjectCache
) -> list[Obtain]:
    """Every token block that any bucket of the ladder takes."""
    spec = blackwell.layer_spec(config, ep_size)
    tiles = {tile.name: tile for tile in blackwell.tiles_of_ladder(spec, ladder).values()}
    return [partial(blackwell.obtain, arch, spec, [tile], cache) for tile in tiles.values()]


def _compile_selftest(target: Target, cache: ObjectCache, jobs: int) -> None:
    """Every kernel that `selftest` launches on this target."""
    family, kernels = target.family, needed_kernels(target)
    assert family is not None
    started = time.perf_counter()

    def bar(count: int) -> Bar:
        made: Bar = tqdm(total=count, desc=f"compile {family.arch}", unit="kernel", disable=None)
        return made

    obtain_all(family, kernels, cache, jobs, bar)
    logger.info("%d kernels for %s in %.1f s", len(kernels), family.arch, time.perf_counter() - started)
    click.echo(f"{len(kernels)} kernels of the self-test ({family.arch}) in {cache.root}")


@click.command("compile", short_help="Compile a model's kernels into the cache; needs no GPU.")
@click.option(
    "--arch",
    type=click.Choice([hopper.ARCH, *blackwell.ARCHS]),
    default=hopper.ARCH,
    show_default=True,
    help="GPU target. Blackwell kernels (sm_100a, sm_103a) have not run on hardware.",
)
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Shape of a known model.")
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False), help="Shape of a checkpoint directory.")
@click.option(
    "--ep-size", default=8, show_default=True, type=click.IntRange(min=1), help="Ranks the experts are split over."
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
    "--share-of-ep",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="One rank's experts of an EP-way layer, alone: the layer that `tune --share-of-ep` measures.",
)
@click.option("--selftest", "is_selftest", is_flag=True, help="The kernels of `selftest` instead of a model's.")
@click.option("--quick", is_flag=True, help="With --selftest: those of `selftest --quick`.")
@click.option("--jobs", default=0, help="With --selftest: kernels at a time.  [default: all cores, at most 16]")
@click.option("--for-tuning", is_flag=True, help="Also every tile configuration that `tune` measures.")
@click.option(
    "--num-sms", default=H200_SMS, show_default=True, type=click.IntRange(min=1), help="GPU's multiprocessors."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Cache directory.  [default: TRTLLM_MEGAMOE_CACHE_DIR, or the user's cache directory]",
)
@debug_option
def command(
    arch: str,
    preset: str | None,
    checkpoint: str | None,
    ep_size: int,
    max_tokens_per_rank: int,
    wires: tuple[str, ...],
    modes: tuple[str, ...],
    share_of_ep: int,
    is_selftest: bool,
    quick: bool,
    jobs: int,
    for_tuning: bool,
    num_sms: int,
    out: Path | None,
) -> None:
    """Compile every kernel that a layer of this model can launch, over all buckets; what is there already is kept.

    That is the heuristic's kernels, and those of the tactic table that TRTLLM_MEGAMOE_TACTICS names.
    """
    if [preset is not None, checkpoint is not None, is_selftest].count(True) != 1:
        raise MegaMoeConfigError("give exactly one of --preset, --checkpoint and --selftest")
    if is_selftest:
        _compile_selftest(Target(FAMILIES[arch], num_sms, quick, ep_size), ObjectCache(out), jobs)
        return
    model = find_model(preset or checkpoint or "")
    if share_of_ep > 1:
        model, ep_size = share_of(model, share_of_ep), 1
    cache = ObjectCache(out)
    ladder = BucketLadder.for_cap(max_tokens_per_rank)
    wanted: list[Obtain] = []
    here = environment(NO_GPU, num_sms)
    for wire in wires or (CombineFormat.BF16.value,):
        config = model.layer_config(max_tokens_per_rank=max_tokens_per_rank, combine_format=wire)
        require_eligible(config, ep_size, model.name)
        if arch != hopper.ARCH:
            if modes and ActivationMode.NVFP4.value not in modes:
                raise MegaMoeConfigError(f"{arch} kernels take nvfp4 activations only, --activations asks for {modes}")
            wanted += _blackwell_kernels(arch, config, ep_size, ladder, cache)
            continue
        selection = select_tactics(config, ladder.rungs, here, single(), ep_size=ep_size)
        for mode in map(ActivationMode, modes or tuple(ActivationMode)):
            spec = hopper.layer_spec(config, ep_size, mode)
            tiles = [*hopper.tiles_of_ladder(spec, ladder, num_sms).values()]
            tiles += [tile_of(resolved.tactic) for resolved in selection[mode].values()]
            if for_tuning:
                space = tactic_space(spec, num_sms)
                tiles += [tile_of(tactic) for rung in ladder.rungs for tactic in space.legal_candidates(rung)]
            distinct = {tile.name: tile for tile in tiles}.values()
            wanted += [partial(hopper.obtain, spec, [tile], cache) for tile in distinct]
    begun = time.perf_counter()
    for obtain in tqdm(wanted, desc=f"compile {arch}", unit="kernel", disable=None):
        started = time.perf_counter()

        def report(name: str, state: str, started: float = started) -> None:
            tqdm.write(f"{state:9s} {time.perf_counter() - started:6.1f} s  {name}")

        obtain(report)
    logger.info("%d kernels for %s in %.1f s", len(wanted), arch, time.perf_counter() - begun)
    click.echo(f"{len(wanted)} kernels for {model.name} ({arch}, EP {ep_size}) in {cache.root}")
