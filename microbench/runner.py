# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a benchmark: build the layer, check every point, time what is right, describe it as rows.

Called by the command line once per rank with that rank's communicator. Drives the public path construct -> load_weights
-> forward; a result that the check refuses is never timed.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from microbench import phases, synthetic, timing_cuda
from microbench.autotune import autotune
from microbench.beside import measure_beside, measure_chain
from microbench.cases import Case
from microbench.check import CheckResult, Verdict, check_output
from microbench.clocks import ClockSampler, Reading, nvml_reader
from microbench.environment import device_name
from microbench.memory import MemoryWatch
from microbench.peaks import find_peaks
from microbench.ranges import marked
from microbench.roofline import expert_bytes
from microbench.routing import Batch, Load, Workload, count_routes, route, tokens_by_rank
from microbench.rows import Measurement, make_row
from microbench.sources import WeightSource, open_source
from microbench.timing import Forward, Mode, Timed, TimingSpec, time_host
from trtllm_megamoe.agreement import succeed_or_fail_together
from trtllm_megamoe.cli.text import format_bytes
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.config import ActivationRequest, EngineName, MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeVerificationError
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.kernels.family import family_here
from trtllm_megamoe.kernels.selection import tuning_target
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.selftest.checks import tolerance_of
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.tuning.tuner import TunedBucket
from trtllm_megamoe.weights.host_memory import available_host_bytes

logger = logging.getLogger(__name__)

MIN_FORWARDS_PER_GRAPH = 4


@dataclass(frozen=True, slots=True)
class Point:
    """One row to measure. `requested_rows` is what `--rows-per-expert` asked for, if it did."""

    workload: Workload
    combine_format: CombineFormat
    mode: Mode
    requested_rows: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What all points of a run share.

    `steps` inputs are rotated, each checked before timing; so are `num_layers` whole layers,
    which keeps weights out of the caches. `settle_s`: see :class:`microbench.timing.TimingSpec`.
    `expected_engine` None accepts any.
    """

    engine: EngineName
    activations: ActivationRequest
    warmup: int
    iters: int
    seed: int
    steps: int
    num_layers: int
    timeout_s: float
    virtual_ranks: int
    settle_s: float = 0.0
    use_cuda_graph: bool = False
    autotune: bool = False
    rivals: bool = False
    phases: bool = False
    expected_engine: str | None = None


def run_points(
    case: Case,
    points: Sequence[Point],
    settings: Settings,
    comm: Communicator,
    on_row: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Measure all points on this rank.

    Args:
        points: In any order; layers are built once per combine format, with the largest T of all points as bound.
        on_row: Called with every finished row, on every rank.

    Returns:
        One row per point in the schema's fields, the same on every rank.

    Raises:
        MegaMoeVerificationError: `expected_engine` is not the engine that runs.
        MegaMoeConfigError: The layer is not eligible, or the weights do not fit into memory.
        MegaMoeWeightError: A rank could not load; the same text on every rank.

    Collective: yes.
    """
    _require_memory(case, settings, comm)
    source: WeightSource | None = None
    rows: dict[int, dict[str, Any]] = {}
    for config in layer_configs(case, points, settings):
        combine_format = config.combine_format
        workspace = build_workspace(config, comm)  # one for all layers, as a serving engine has it
        device = workspace.device
        source = source or open_source(case, settings.seed, device)
        layers = [MegaMoELayer(config, comm, workspace=workspace) for _ in range(settings.num_layers)]
        _require_engine(layers[0], settings)
        for layer in layers:
            load_together(layer, source, comm, settings.timeout_s)
        mine = {index: point for index, point in enumerate(points) if point.combine_format is combine_format}
        tuned = _autotune(workspace, layers, source, mine.values(), settings, comm) if settings.autotune else {}
        for index, point in mine.items():
            rows[index] = _measure(point, case, layers, source, settings, comm, tuned)
            on_row(rows[index])
        for layer in layers:
            layer.close()
        workspace.close()  # not after an error: it is collective, and peers may be gone
    if settings.rivals:
        assert source is not None  # there is at least one point
        _add_rivals(case, points, rows, source, settings, comm, device)
    return [rows[index] for index in range(len(points))]


def _autotune(
    workspace: Workspace,
    layers: Sequence[MegaMoELayer],
    source: WeightSource,
    points: Iterable[Point],
    settings: Settings,
    comm: Communicator,
) -> dict[int, TunedBucket]:
    """Tune the buckets that these points will run."""
    layer = layers[0]
    num_sms = torch.cuda.get_device_properties(layer.device).multi_processor_count
    if comm.transport == "threads":
        num_sms //= comm.size  # virtual ranks share one GPU
    space, _ = tuning_target(layer.config, layer.activation_mode, comm.size, num_sms, family_here().arch)
    fullest = {
        max(tokens_by_rank(point.workload, step)) for point in points for step in range(settings.steps)
    }  # fmt: skip
    buckets = sorted({layer.ladder.select(count) for count in fullest})
    return autotune(
        workspace,
        layers,
        lambda fresh: load_together(fresh, source, comm, settings.timeout_s),
        space,
        buckets,
        comm,
        settings.timeout_s,
    )


def _add_rivals(
    case: Case,
    points: Sequence[Point],
    rows: dict[int, dict[str, Any]],
    source: WeightSource,
    settings: Settings,
    comm: Communicator,
    device: torch.device,
) -> None:
    """Put the rivals' times beside the layer's: experts alone on one rank, the unfused chain over several."""
    specs = [
        TimingSpec(
            mode=point.mode,
            warmup=settings.warmup,
            iters=settings.iters,
            forwards_per_graph=MIN_FORWARDS_PER_GRAPH,
            timeout_s=settings.timeout_s,
            settle_s=settings.settle_s,
        )
        for point in points
    ]
    if comm.size > 1:
        # the chain has one wire and one kind of activations
        chosen = [index for index, point in enumerate(points) if point.combine_format is CombineFormat.BF16]
        if not chosen or settings.activations == "nvfp4":
            return
        firsts = [_make_steps(case, points[i].workload, replace(settings, steps=1), comm, device)[0] for i in chosen]
        inputs = [(step.x, step.batch, step.load) for step in firsts]
        timer = choose_timer("cpu" if device.type == "cpu" else "cuda", settings.use_cuda_graph)
        found = measure_chain(case, source, inputs, [specs[i] for i in chosen], timer, comm, device)
        for index, row in zip(chosen, found, strict=True):
            rows[index]["rivals"] = [row]
        return
    batches = [
        count_routes(route(point.workload, 0, 0).topk_ids, point.workload.num_experts).tolist() for point in points
    ]
    timer = timing_cuda.time_graph if settings.use_cuda_graph else timing_cuda.time_eager
    beside = measure_beside(case, batches, specs, timer, settings.num_layers, settings.seed, comm)
    for index, row_list in enumerate(beside):
        rows[index]["rivals"] = row_list


def layer_configs(case: Case, points: Sequence[Point], settings: Settings) -> list[MegaMoeConfig]:
    """The layers that these points run on: one per combine format, built for the largest T of all points."""
    return [
        MegaMoeConfig.create(
            hidden_size=case.hidden_size,
            intermediate_size=case.intermediate_size,
            num_experts=case.num_experts,
            top_k=case.top_k,
            max_tokens_per_rank=max(1, *(point.workload.tokens_per_rank for point in points)),
            combine_format=combine_format,
            activations=settings.activations,
            score_placement=case.score_placement,
            swiglu_limit=case.swiglu_limit,
            swiglu_alpha=case.swiglu_alpha,
            swiglu_beta=case.swiglu_beta,
            engine=settings.engine,
            timeout_s=settings.timeout_s,
        )
        for combine_format in dict.fromkeys(point.combine_format for point in points)
    ]


def _require_memory(case: Case, settings: Settings, comm: Communicator) -> None:
    """Refuse weights that cannot fit before any are made: all ranks' layers, and one more in flight while loading."""
    needed = (settings.num_layers + 1) * case.num_experts * expert_bytes(case.hidden_size, case.intermediate_size)
    available = comm.allgather(available_host_bytes(), settings.timeout_s)[0]  # one rank's word: all decide alike
    if available is not None and needed > available:
        raise MegaMoeConfigError(
            f"{case.label} needs about {format_bytes(int(needed))} for its weights, {format_bytes(available)} are "
            "available; shrink it with --scale-experts and --scale-channels, or take one rank: --share-of-ep"
        )


def _require_engine(layer: MegaMoELayer, settings: Settings) -> None:
    if settings.expected_engine is not None and layer.engine_name != settings.expected_engine:
        raise MegaMoeVerificationError(
            f"engine {layer.engine_name!r} runs, --expect-engine says {settings.expected_engine!r}; nothing was timed"
        )
    choose_timer(layer.engine_name, settings.use_cuda_graph)
    if settings.autotune and layer.engine_name == "cpu":
        raise MegaMoeConfigError("--autotune: engine 'cpu' has no tactics to choose from; leave the option out")
    if settings.phases and layer.engine_name == "cpu":
        raise MegaMoeConfigError("--phases: engine 'cpu' has no time stamps; leave the option out")


def timing_name(engine_name: str, use_cuda_graph: bool) -> str:
    """The schema's word for how an engine is timed."""
    if engine_name == "cpu":
        return "cpu"
    return "cuda_graph" if use_cuda_graph else "eager"


def choose_timer(engine_name: str, use_cuda_graph: bool) -> Callable[[Forward, TimingSpec, Communicator], Timed]:
    """How an engine is timed.

    Raises:
        MegaMoeConfigError: a graph was asked for and the engine does not run on a GPU.
    """
    if engine_name == "cpu":
        if use_cuda_graph:
            raise MegaMoeConfigError("--cuda-graph: engine 'cpu' has no CUDA graph; leave the option out")
        return time_host
    return timing_cuda.time_graph if use_cuda_graph else timing_cuda.time_eager


def load_together(layer: MegaMoELayer, source: WeightSource, comm: Communicator, timeout_s: float) -> None:
    """Load this rank's experts, on all ranks or on none."""
    num_local = source.case.num_experts // comm.size
    mine = range(comm.rank * num_local, (comm.rank + 1) * num_local)
    succeed_or_fail_together(lambda: layer.load_weights(source.for_rank(mine)), comm, timeout_s, source.case.label)


@dataclass(frozen=True, slots=True)
class _Step:
    """One rank's input of one step."""

    x: torch.Tensor
    batch: Batch
    load: Load  # of all ranks
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]  # of the layer, on its device

    def run(self, layer: MegaMoELayer) -> torch.Tensor:
        """One forward; collective."""
        return layer.forward(*self.arguments)


def _make_steps(
    case: Case, workload: Workload, settings: Settings, comm: Communicator, device: torch.device
) -> list[_Step]:
    steps = []
    for step in range(settings.steps):
        batch = route(workload, comm.rank, step)
        sent = comm.allgather(count_routes(batch.topk_ids, workload.num_experts), settings.timeout_s)
        num_tokens = batch.topk_ids.shape[0]
        x = synthetic.tokens(case, num_tokens, seed=settings.seed, step=step, rank=comm.rank, device=device)
        routed = (batch.topk_ids.to(device), batch.topk_weights.to(device))
        fullest = max(tokens_by_rank(workload, step))
        steps.append(_Step(x, batch, Load(torch.stack(sent)), (x, *routed, fullest)))
    return steps


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one point."""

    check: CheckResult
    bucket: int | None = None
    timed: Timed | None = None
    clocks: Mapping[str, float] | None = None
    memory: Mapping[str, int | None] | None = None
    phases: Mapping[str, Any] | None = None


def _measure(
    point: Point,
    case: Case,
    layers: Sequence[MegaMoELayer],
    source: WeightSource,
    settings: Settings,
    comm: Communicator,
    tuned: Mapping[int, TunedBucket],
) -> dict[str, Any]:
    """Check and time one point, and describe it. One rank alone survives a point that fails: its row says why."""
    steps = _make_steps(case, point.workload, settings, comm, layers[0].device)
    try:
        outcome = _check_and_time(point, steps, layers, source, settings, comm)
    except Exception as err:
        if comm.size > 1:  # peers are in the middle of a collective
            raise
        logger.exception("%s %d", point.workload.routing.value, point.workload.tokens_per_rank)
        reason = f"{type(err).__name__}: {err}"
        tolerance = tolerance_of(layers[0].device.type, layers[0].config.combine_format.value)
        total = sum(tokens_by_rank(point.workload))
        outcome = _Outcome(CheckResult(Verdict.NOT_VERIFIED, None, None, tolerance, 0, total, 0, reason))
    bucket = outcome.bucket
    return make_row(
        Measurement(
            case=case,
            workload=point.workload,
            requested_rows=point.requested_rows,
            tokens_by_rank=tokens_by_rank(point.workload),
            combine_format=point.combine_format,
            activations=layers[0].activation_mode,
            requested_engine=settings.engine,
            engine=layers[0].engine_name,
            virtual_ranks=settings.virtual_ranks,
            max_tokens_per_rank=layers[0].config.max_tokens_per_rank,
            bucket=bucket,
            mode=point.mode,
            warmup=settings.warmup,
            iters=settings.iters,
            settle_s=settings.settle_s,
            num_layers=len(layers),
            loads=tuple(step.load for step in steps),
            check=outcome.check,
            timing=timing_name(layers[0].engine_name, settings.use_cuda_graph),
            timed=outcome.timed,
            peaks=find_peaks(device_name(layers[0].engine_name)),
            choice=None if bucket is None else layers[0].launch_choice(bucket),
            clocks=outcome.clocks,
            memory=outcome.memory,
            phases=outcome.phases,
            tuned=None if bucket is None else tuned.get(bucket),
        )
    )


def _check_and_time(
    point: Point,
    steps: Sequence[_Step],
    layers: Sequence[MegaMoELayer],
    source: WeightSource,
    settings: Settings,
    comm: Communicator,
) -> _Outcome:
    """Check every (layer, step), then time."""

    def forward(index: int) -> torch.Tensor:
        return steps[index % len(steps)].run(layers[index % len(layers)])

    # the layer returns fresh memory, so nothing it does later can turn this result into another one
    first = forward(0)
    bucket = layers[0].last_bucket
    name = f"{point.workload.routing.value} {point.workload.tokens_per_rank}"
    with marked(f"check {name}"):
        check = _check_steps(first, point, steps, layers, source, settings, comm)
    timed: Timed | None = None
    meet = _meeting_in(layers[0], comm)
    sampler, memory = ClockSampler(_clock_reader(layers[0], comm)), MemoryWatch(layers)
    if check.has_passed:
        rotation = math.lcm(len(layers), len(steps))
        spec = TimingSpec(
            mode=point.mode,
            warmup=settings.warmup,
            iters=settings.iters,
            forwards_per_graph=rotation * math.ceil(MIN_FORWARDS_PER_GRAPH / rotation),
            timeout_s=settings.timeout_s,
            settle_s=settings.settle_s,
            meet=meet,
        )
        timer = choose_timer(layers[0].engine_name, settings.use_cuda_graph)
        with marked(f"time {name}"), sampler, memory:
            timed = timer(forward, spec, comm)
        for layer in layers:
            layer.raise_if_failed()  # replays of a failed launch are short, and leave the output as it was
        check = _check_again(check, first, timed.repeated, comm, settings.timeout_s)
    if not check.has_passed:
        timed = None
        logger.info("rank %d: no time given: %s", comm.rank, check.reason)
    clocks, held = comm.allgather((sampler.summary(), memory.summary()), settings.timeout_s)[0]
    found = None
    if settings.phases and check.has_passed:
        found = phases.measure(layers[0], lambda: forward(0), first, comm, settings.timeout_s, meet)
    return _Outcome(check, bucket, timed, clocks, held, found)


def forward_of_nothing(layer: MegaMoELayer) -> Callable[[], torch.Tensor]:
    """A forward without tokens: the protocol alone, which no rank leaves before all have come. Collective."""
    config, device = layer.config, layer.device
    x = torch.empty(0, config.hidden_size, dtype=torch.bfloat16, device=device)
    ids = torch.empty(0, config.top_k, dtype=torch.int64, device=device)
    weights = torch.empty(0, config.top_k, dtype=torch.float32, device=device)
    return lambda: layer.forward(x, ids, weights)


def _meeting_in(layer: MegaMoELayer, comm: Communicator) -> Callable[[], object] | None:
    """How several ranks' GPUs meet."""
    return forward_of_nothing(layer) if comm.size > 1 and layer.device.type == "cuda" else None


def _clock_reader(layer: MegaMoELayer, comm: Communicator) -> Callable[[], Reading] | None:
    """Rank 0 watches its GPU; nobody watches a CPU."""
    return nvml_reader(torch.cuda.current_device()) if layer.device.type == "cuda" and comm.rank == 0 else None


def _check_steps(
    first: torch.Tensor,
    point: Point,
    steps: Sequence[_Step],
    layers: Sequence[MegaMoELayer],
    source: WeightSource,
    settings: Settings,
    comm: Communicator,
) -> CheckResult:
    """The worst verdict over all layers and steps, or the first that is no pass; `first` is the output of (0, 0)."""
    results: list[CheckResult] = []
    for layer, step in itertools.product(layers, steps):
        out = first if not results else step.run(layer)
        results.append(
            check_output(
                out,
                step.x,
                step.batch,
                source,
                layer.activation_mode,
                point.combine_format,
                comm,
                settings.timeout_s,
            )
        )
        if not results[-1].has_passed:
            return results[-1]
    return max(results, key=lambda result: result.rel_l2 or 0.0)


def _check_again(
    check: CheckResult, first: torch.Tensor, last: torch.Tensor, comm: Communicator, timeout_s: float
) -> CheckResult:
    """The same input must give the same bits after all timed forwards, on every rank; else the times are of nothing."""
    changed = [r for r, equal in enumerate(comm.allgather(torch.equal(first, last), timeout_s)) if not equal]
    if not changed:
        return check
    reason = f"the first result does not repeat after the timed forwards; rank(s): {', '.join(map(str, changed))}"
    return replace(check, verdict=Verdict.WRONG, reason=reason)
