# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench`: options, ranks, output. The work is in :mod:`microbench.runner`.

Exit codes are those of `python -m trtllm_megamoe`: 0 every row verified and timed, 1 a wrong or unverified result,
2 bad input, 3 the run could not finish.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from microbench import axes, compare, environment, links, plot, report, sweep
from microbench.axes import Axis, command_of
from microbench.needs import distinct, kernels_of
from microbench.plan import DEFAULT_TOKENS, choose_case, count_ranks, make_points, make_settings
from microbench.routing import RoutingName
from microbench.runner import layer_configs, run_points
from microbench.timing import SETTLE_S, Mode
from trtllm_megamoe import comm as communicators
from trtllm_megamoe.cli.failure import EXIT_WRONG_ANSWER, Failure, debug_option, set_rank
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.comm.launch import Launch, detect
from trtllm_megamoe.config import EngineName
from trtllm_megamoe.engines.registry import choose_engine
from trtllm_megamoe.envs import log_level
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.kernels.hopper import kernel_name
from trtllm_megamoe.presets import PRESETS
from vendored_kernels.sm90.config import KernelConfig

_VIRTUAL_RANKS_S = 24 * 3600.0  # waits inside are bounded one by one; this only bounds honest work


_ARGUMENTS = "microbench.arguments"  # of a run inside a sweep, which are not those of the process


class ListOf(click.ParamType):  # type: ignore[type-arg]  # generic in new click only
    """A comma-separated list, each entry parsed by `parse`."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(self._parse(entry.strip()) for entry in value.split(","))
        except ValueError as err:
            self.fail(f"{value!r}: {err}", param, ctx)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is not at least 1")
    return value


class _DefaultGroup(click.Group):
    """Runs the benchmark when the first word is no other command, and gives every error to :class:`Failure`."""

    default = "run"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            raise Failure(error, ctx) from error


@click.group(cls=_DefaultGroup)
def main() -> None:
    """Benchmark of one MoE layer over expert-parallel ranks."""
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s: %(message)s")


_FILE = click.Path(dir_okay=False, path_type=Path)
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)
_COUNTS = ListOf("n,n,...", _positive)


@main.command(
    epilog="`python -m microbench compare A.json B.json` sets two results side by side; "
    "`python -m microbench plot RESULT.json --output FIGURE.svg` draws one.",
    context_settings={"show_default": True},
)
@click.option("--engine", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Shape of a known model, synthetic NVFP4 weights.")
@click.option("--checkpoint", type=_DIRECTORY, help="NVFP4 checkpoint directory; needs --layer.")
@click.option("--layer", type=click.IntRange(min=0), help="Model layer of the checkpoint.")
@click.option("--tokens-per-rank", type=_COUNTS, help=f"T of every rank; {DEFAULT_TOKENS} when nothing is said.")
@click.option("--rows-per-expert", type=_COUNTS, help="Mean rows per expert, instead of T.")
@click.option("--share-of-ep", type=_COUNT, default=1, help="One rank's experts of an EP-way layer, alone on one rank.")
@click.option(
    "--routing",
    "routings",
    type=ListOf("name,...", RoutingName),
    default="uniform",
    help=f"Any of {', '.join(RoutingName)}.",
)
@click.option(
    "--imbalance", "imbalances", type=ListOf("x,x,...", float), help="For hot-rank: that rank's rows over the mean."
)
@click.option(
    "--combine-format",
    "combine_formats",
    type=ListOf("name,...", CombineFormat.parse),
    default="bf16",
    help="Wire formats of the results: bf16, fp8, fp4.",
)
@click.option("--activations", type=click.Choice(["auto", "nvfp4", "bf16"]), default="auto")
@click.option(
    "--mode",
    "modes",
    type=ListOf("name,...", Mode),
    default="lockstep",
    help="lockstep: a barrier before every iteration; burst: one before the first.",
)
@click.option("--cuda-graph", "use_cuda_graph", is_flag=True, help="Replay a graph instead of launching (CUDA engine).")
@click.option(
    "--autotune", is_flag=True, help="Tune the buckets first, on scratch that is gone before anything is timed."
)
@click.option("--rivals", is_flag=True, help="Time public parts beside it; over several ranks the unfused chain.")
@click.option("--phases", is_flag=True, help="Split one launch by time stamps from inside it (CUDA engine).")
@click.option("--iters", type=_COUNT, default=10, help="Timed iterations.")
@click.option("--warmup", type=click.IntRange(min=0), default=2, help="Iterations before the timed ones.")
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0),
    default=SETTLE_S,
    help="On a GPU: seconds of replays before the timed ones, at least, until clocks and power stay.",
)
@click.option("--seed", type=int, default=0)
@click.option("--steps", type=_COUNT, default=1, help="Different inputs to rotate through.")
@click.option(
    "--layers",
    "num_layers",
    type=_COUNT,
    default=1,
    help="Whole layers to rotate through, so that weights come from memory, not from caches.",
)
@click.option("--scale-experts", type=_COUNT, default=1, help="Divide a preset's experts; the output says so.")
@click.option("--scale-channels", type=_COUNT, default=1, help="Divide a preset's hidden and intermediate size.")
@click.option("--virtual-ranks", type=_COUNT, default=1, help="Ranks as threads of this one process.")
@click.option("--threads-per-rank", type=_COUNT, help="CPU threads of a rank; cores / ranks when nothing is said.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, help="Longest wait for any peer, seconds."
)
@click.option("--expect-engine", type=click.Choice(["cpu", "cuda"]), help="Fail when another engine runs.")
@click.option("--json", "json_path", type=_FILE, help="Write megamoe-bench/1 JSON.")
@click.option("--csv", "csv_path", type=_FILE, help="Write the flat subset as CSV.")
@debug_option
@click.pass_context
def run(ctx: click.Context, /, **options: Any) -> None:
    """Check one MoE layer against the oracle, then time it.

    Start it under mpirun (one process per rank) or alone (one rank, or --virtual-ranks).
    """
    launch = detect()
    set_rank(launch.rank)
    for target in (options["json_path"], options["csv_path"]):
        if target is not None and not target.parent.is_dir():
            raise MegaMoeConfigError(f"cannot write {target}: no directory {target.parent}")
    ep_size = count_ranks(launch, options["virtual_ranks"], options["share_of_ep"])
    case = choose_case(options)
    points = make_points(case, ep_size, options)
    settings = make_settings(options)
    threads = options["threads_per_rank"] or max(1, len(os.sched_getaffinity(0)) // ep_size)
    torch.set_num_threads(threads)

    def body(comm: Communicator) -> list[dict[str, Any]]:
        hidden = None if comm.rank == 0 else True  # None: tqdm hides itself where stderr is no terminal
        with tqdm(total=len(points), unit="row", leave=False, disable=hidden) as bar:
            return run_points(case, points, settings, comm, on_row=lambda _: bar.update())

    transport = "threads"
    if launch.is_launched:
        comm = communicators.mpi()
        launch.require_world(comm.rank, comm.size)
        transport, rows = comm.transport, body(comm)
    elif options["virtual_ranks"] > 1:
        is_gpu = choose_engine(options["engine"], ep_size).name == "cuda"
        ranks = options["virtual_ranks"]
        rows = communicators.run_threads(ranks, body, _VIRTUAL_RANKS_S, device="cuda" if is_gpu else None)[0]
    else:
        rows = body(communicators.single())
    if launch.rank == 0:
        env = environment.collect(rows, threads, _launcher_phrase(launch), transport)
        typed = ctx.meta.get(_ARGUMENTS, sys.argv[1:])
        _publish(env, rows, repeat_command(launch, typed), options["json_path"], options["csv_path"])
    if any(row["status"] != "ok" for row in rows):
        ctx.exit(EXIT_WRONG_ANSWER)


@main.command("sweep", context_settings={"show_default": True})
@click.option("--out", type=_DIRECTORY, help="Existing directory for JSON, CSV and figures; a sweep goes on there.")
@click.option("--engine", type=click.Choice(["cpu", "cuda"]), default="cuda")
@click.option("--only", type=ListOf("name,...", str), help="Only these axes.")
@click.option("--time-limit", "start_s", type=click.FloatRange(min=1), help="Start no axis later than this, s.")
@click.option(
    "--axis-limit", "axis_s", type=click.FloatRange(min=1), help="End the process when one axis takes longer, s."
)
@click.option("--small", "is_small", is_flag=True, help="A rehearsal: few rows and narrow layers, for a CPU.")
@click.option("--needs", is_flag=True, help="Print the kernels that the CUDA engine needs for it, and run nothing.")
@click.option("--ranks", type=_COUNT, help="With --needs: of so many GPUs; else the launcher says.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@debug_option
@click.pass_context
def sweep_axes(
    ctx: click.Context,
    /,
    out: Path | None,
    engine: str,
    only: tuple[str, ...] | None,
    start_s: float | None,
    axis_s: float | None,
    is_small: bool,
    needs: bool,
    ranks: int | None,
    extra: tuple[str, ...],
) -> None:
    """Measure one axis at a time around a default point; what stands behind -- is passed to every run.

    Alone it measures one GPU, under mpirun the GPUs of all ranks. Started again with the same directory it goes on
    where it ended; an axis that has an outcome is not measured again.
    """
    launch = detect()
    set_rank(launch.rank)
    size = ranks or launch.size
    known = axes.one_gpu() if size == 1 else axes.several_gpus(size)
    chosen = [axis for axis in known if only is None or axis.name in only]
    unknown = sorted(set(only or ()) - {axis.name for axis in chosen})
    if unknown:
        raise MegaMoeConfigError(f"no axis is called {', '.join(unknown)}; known: {[axis.name for axis in known]}")
    if needs:
        names = [kernel_name(kernel) for kernel in sweep_kernels(chosen, size, extra)]
        click.echo("\n".join([*names, f"{len(names)} kernels"]))
        return
    if out is None:
        raise MegaMoeConfigError("name the directory of the results: --out DIR")

    def run_one(arguments: Sequence[str]) -> int:
        command = main.commands.get(arguments[0], run)
        words = list(arguments if command is run else arguments[1:])
        ctx.meta[_ARGUMENTS] = arguments
        with command.make_context(command.name, words, parent=ctx) as inner:
            try:
                command.invoke(inner)
            except click.exceptions.Exit as leave:
                return leave.exit_code
        return 0

    # an axis with ranks on one GPU needs a hardware queue for each, and the first axis makes the GPU's context
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    comm = communicators.mpi() if launch.is_launched else communicators.single()
    command = repeat_command(launch, sys.argv[1:])
    limits = sweep.Limits(start_s, axis_s, is_small)
    outcomes = sweep.run_axes(chosen, engine, extra, out, run_one, limits, command, comm)
    if comm.rank == 0:
        click.echo("\n" + "\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    if any(outcome != "ok" for outcome in outcomes.values()):
        ctx.exit(EXIT_WRONG_ANSWER)


def sweep_kernels(chosen: Sequence[Axis], ranks: int, extra: Sequence[str] = ()) -> list[KernelConfig]:
    """Every kernel that these axes launch on H200s, once. Pure."""
    found: list[KernelConfig] = []
    for axis in chosen:
        launch = Launch("openmpi" if ranks > 1 else "none", 0, ranks)
        if not axis.is_run:
            for config, ep_size in links.layers(links.links_case("cuda", ranks), ranks):
                found += kernels_of(config, ep_size)
            continue
        options = run.make_context("run", command_of(axis, "cuda", extra)).params
        ep_size = count_ranks(launch, options["virtual_ranks"], options["share_of_ep"])
        case = choose_case(options)
        points = make_points(case, ep_size, options)
        fullest = {point.workload.tokens_per_rank for point in points} if options["phases"] else set()
        for config in layer_configs(case, points, make_settings(options)):
            found += kernels_of(config, ep_size, share_one_gpu=ranks == 1, timed_tokens=fullest)
    return distinct(found)


@main.command("links", context_settings={"show_default": True})
@click.option("--engine", type=click.Choice(["cpu", "cuda"]), default="cuda")
@click.option("--iters", type=_COUNT, default=30, help="Timed iterations.")
@click.option("--json", "json_path", type=_FILE, help="Write the result.")
@debug_option
def measure_links(engine: EngineName, iters: int, json_path: Path | None) -> None:
    """What a step between GPUs costs at least, item by item: start it under mpirun, a rank a GPU."""
    launch = detect()
    set_rank(launch.rank)
    comm = communicators.mpi() if launch.is_launched else communicators.single()
    found = links.measure(links.links_case(engine, comm.size), links.links_settings(engine, iters), comm)
    if comm.rank == 0:
        click.echo(json.dumps(found, indent=1))
        if json_path is not None:
            json_path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@main.command("compare")
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@click.option(
    "--fail-above", type=click.FloatRange(min=0), help="Fail when B is slower on any row by more than this, %."
)
@click.option(
    "--agreement", "must_agree", is_flag=True, help="Fail when a row differs by more than two runs of one command may."
)
@debug_option
@click.pass_context
def compare_results(ctx: click.Context, /, a: Path, b: Path, fail_above: float | None, must_agree: bool) -> None:
    """Set two results (JSON) side by side, row by row."""
    comparison = compare.compare(report.read_json(a), report.read_json(b))
    click.echo(compare.describe(comparison))
    if must_agree and not compare.agreement(comparison)["agrees"]:
        ctx.exit(EXIT_WRONG_ANSWER)
    if fail_above is not None and max(comparison.ratios) > 1 + fail_above / 100:
        click.echo(f"B is more than {fail_above:g} % slower on at least one row", err=True)
        ctx.exit(EXIT_WRONG_ANSWER)


@main.command("plot")
@click.argument("result", type=_FILE)
@click.option("--output", type=_FILE, required=True, help=f"Figure to write: {' or '.join(plot.SUFFIXES)}.")
@debug_option
def plot_result(result: Path, output: Path) -> None:
    """Draw a result (JSON): time over tokens with the floor."""
    plot.draw(report.read_json(result), output)
    click.echo(f"wrote {output}")


def repeat_command(launch: Launch, arguments: Sequence[str]) -> str:
    """The command line that repeats this run."""
    starter = ["mpirun", "-n", str(launch.size)] if launch.is_launched else []
    return shlex.join([*starter, "python", "-m", "microbench", *arguments])


def _launcher_phrase(launch: Launch) -> str:
    return launch.launcher if launch.is_launched else launch.describe()


def _publish(
    env: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    command: str,
    json_path: Path | None,
    csv_path: Path | None,
) -> None:
    click.echo(report.header(env, rows[0]))
    click.echo(report.text_table(rows))
    click.echo()
    click.echo(report.footer(rows, command))
    if json_path is not None:
        report.write_json(json_path, report.document(env, command, rows))
    if csv_path is not None:
        report.write_csv(csv_path, rows)
