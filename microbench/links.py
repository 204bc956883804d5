# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench links`: what a step between GPUs costs at least, item by item, beside the layer's own.

Called by the command line under mpirun. Flags and loads are timed by kernels of one program between ranks 0 and 1,
copies by CUDA events, the layer as everywhere else. An item that cannot be measured here says why.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch

from microbench.axes import SHARES
from microbench.cases import Case, preset_case
from microbench.routing import RoutingName, by_tokens
from microbench.runner import (
    Point,
    Settings,
    choose_timer,
    forward_of_nothing,
    layer_configs,
    load_together,
    run_points,
)
from microbench.sources import open_source
from microbench.timing import SETTLE_S, Mode, TimingSpec
from trtllm_megamoe.comm import Communicator, single
from trtllm_megamoe.config import EngineName, MegaMoeConfig
from trtllm_megamoe.engines.registry import choose_engine, engine_device
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.regions import Geometry, RegionTable
from trtllm_megamoe.symmetric import allocate_symmetric
from trtllm_megamoe.symmetric.base import SymmetricMemory

logger = logging.getLogger(__name__)

_ROUNDS = (200, 2200)  # the difference of two lengths: a launch and its skew cancel out
_MOST_POLLS = 1 << 22  # seconds, not for ever, when the peer is gone
_COPY_BYTES = 256 << 20
_COPIES = 5
_WORD_BYTES = 8


def links_case(engine: str, ranks: int) -> Case:
    """DeepSeek-V3, every rank with its share of an EP 8 layer; of a CPU one only learns that it runs."""
    factor = 1 if engine == "cuda" else 64
    return preset_case("deepseek-v3", scale_experts=max(1, SHARES // ranks), scale_channels=factor)


def links_settings(engine: EngineName, iters: int) -> Settings:
    """How its layers are timed."""
    return Settings(
        engine=engine, activations="bf16", warmup=3, iters=iters, settle_s=SETTLE_S, seed=0, steps=1, num_layers=1,
        timeout_s=60.0, virtual_ranks=1, use_cuda_graph=engine == "cuda",
    )  # fmt: skip


def layers(case: Case, ranks: int) -> list[tuple[MegaMoeConfig, int]]:
    """The layers that are timed, with their numbers of ranks."""
    settings = links_settings("cuda", 1)
    return [
        (layer_configs(layer_case, [_one_token(layer_case, size)], settings)[0], size)
        for layer_case, size in ((case, ranks), (_alone(case, ranks), 1))
    ]


def _alone(case: Case, ranks: int) -> Case:
    return case.cut_to_share(ranks) if ranks > 1 else case


def _one_token(case: Case, ranks: int) -> Point:
    experts = {"num_experts": case.num_experts, "top_k": case.top_k, "ep_size": ranks}
    return Point(by_tokens(RoutingName.UNIFORM, 1, **experts, seed=0), CombineFormat.BF16, Mode.BURST)


def measure(case: Case, settings: Settings, comm: Communicator) -> dict[str, Any]:
    """All items, the same on every rank.

    Args:
        case: The layer over all ranks; each rank's share of it is also run alone.

    Returns:
        `flag_us`: one way of a flag between ranks 0 and 1; `load_ns`: a dependent load from own and from the peer's
        memory; `copy_gbs`: a copy out of the peer's memory, by one rank and by all at once; `layer_us`: medians of
        graph replays without tokens and with one token a rank, over all ranks and alone. Null where it could not be
        measured; `skipped` says why.

    Collective: yes.
    """
    found: dict[str, Any] = {"ranks": comm.size, "hidden": case.hidden_size, "skipped": {}}
    device = engine_device(choose_engine(settings.engine, comm.size), comm, settings.timeout_s)
    found["layer_us"] = _layer_times(case, settings, comm, device)
    obstacle = "the ranks have no GPU of their own" if device.type != "cuda" or comm.transport == "threads" else None
    items: dict[str, Callable[[SymmetricMemory, Communicator, torch.device, float], Any]] = {
        "flag_us": _flag, "load_ns": _loads, "copy_gbs": _copies,
    }  # fmt: skip
    if obstacle is not None:
        return found | dict.fromkeys(items) | {"skipped": dict.fromkeys(items, obstacle)}
    table = _table(comm.size)
    memory = allocate_symmetric(table, comm, device, settings.timeout_s)
    for name, item in items.items():
        memory.own.zero_()
        torch.cuda.synchronize()
        comm.barrier(settings.timeout_s)
        value, fault = None, None
        try:
            value = item(memory, comm, device, settings.timeout_s)
        except Exception as err:  # no Triton, for one: the other items stay
            logger.exception("%s", name)
            fault = f"{type(err).__name__}: {err}"
        results = comm.allgather((value, fault), settings.timeout_s)
        faults = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(results) if text is not None]
        found[name] = None if faults else results[0][0]
        if faults:
            found["skipped"][name] = faults[0]
    memory.close()
    return found


def _table(ranks: int) -> RegionTable:
    """Any table whose shared space holds what is copied."""
    return RegionTable(Geometry(8192, 128, 8 * ranks, 8, 2048, ranks, CombineFormat.BF16, "bf16"))


def _elapsed_us(enqueue: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    enqueue()
    end.record()
    torch.cuda.synchronize()
    return float(1e3 * start.elapsed_time(end))


def _flag(memory: SymmetricMemory, comm: Communicator, device: torch.device, timeout_s: float) -> float | None:
    """Half a round trip between ranks 0 and 1; None on other ranks."""
    from microbench.triton_code.links import ping_pong

    half = memory.own.numel() // 2 // _WORD_BYTES * _WORD_BYTES  # away from what the table put there
    own = memory.own[half : half + _WORD_BYTES].view(torch.int64)
    peer = memory.views[1 - comm.rank if comm.rank < 2 else 0][half : half + _WORD_BYTES].view(torch.int64)
    gave_up = torch.zeros(1, dtype=torch.int32, device=device)
    run = functools.partial(
        ping_pong[(1,)], own, peer, gave_up, begins=comm.rank == 0, most_polls=_MOST_POLLS, num_warps=1
    )
    run(first_round=1, rounds=0)  # compiles
    times, number = [], 1
    for rounds in (_ROUNDS[0], *_ROUNDS):
        torch.cuda.synchronize()
        comm.barrier(timeout_s)
        if comm.rank < 2:
            times.append(_elapsed_us(functools.partial(run, first_round=number, rounds=rounds)))
            if int(gave_up):
                raise RuntimeError("the peer did not answer in time")
        number += rounds
    return None if comm.rank > 1 else (times[-1] - times[-2]) / (_ROUNDS[1] - _ROUNDS[0]) / 2


def _loads(memory: SymmetricMemory, comm: Communicator, device: torch.device, timeout_s: float) -> dict[str, float]:
    """Nanoseconds of a dependent load of one word."""
    from microbench.triton_code.links import chase

    result = torch.zeros(1, dtype=torch.int64, device=device)
    times = {}
    for name, rank in (("own", comm.rank), ("peer", (comm.rank + 1) % comm.size)):
        words = memory.views[rank].view(torch.int64)
        chase[(1,)](words, result, 0, num_warps=1)
        comm.barrier(timeout_s)
        short, long = (_elapsed_us(functools.partial(chase[(1,)], words, result, n, num_warps=1)) for n in _ROUNDS)
        times[name] = 1e3 * (long - short) / (_ROUNDS[1] - _ROUNDS[0])
    return times


def _copies(memory: SymmetricMemory, comm: Communicator, device: torch.device, timeout_s: float) -> dict[str, float]:
    """GB/s of a copy out of the next rank's memory: rank 0 alone, then all ranks at once (the slowest)."""
    num_bytes = min(_COPY_BYTES, memory.own.numel())
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    source = memory.views[(comm.rank + 1) % comm.size][:num_bytes]

    def copy() -> None:
        for _ in range(_COPIES):
            target.copy_(source)

    rates = {}
    for name, ranks in (("one", 1), ("all", comm.size)):
        us = float("nan")
        for _ in range(2):  # the first one warms up
            torch.cuda.synchronize()
            comm.barrier(timeout_s)
            if comm.rank < ranks:
                us = _elapsed_us(copy)
        rates[name] = _COPIES * num_bytes / 1e3 / max(comm.allgather(us, timeout_s)[:ranks])
    return rates


def _layer_times(case: Case, settings: Settings, comm: Communicator, device: torch.device) -> dict[str, Any]:
    """Microseconds by tokens a rank (0, 1), over all ranks (`together`) and of one rank's share alone (`alone`)."""
    times: dict[str, Any] = {}
    for name, layer_case, group in (("together", case, comm), ("alone", _alone(case, comm.size), single())):
        points = [_one_token(layer_case, group.size)]
        us = run_points(layer_case, points, settings, group, lambda _: None)[0]["us"]
        empty = _empty_time(layer_case, points, settings, group, device)
        times[name] = {"0": empty, "1": None if us is None else us["p50"]}
        comm.barrier(settings.timeout_s)
    return times


def _empty_time(case: Case, points: list[Point], settings: Settings, comm: Communicator, device: torch.device) -> float:
    """Median microseconds of a forward without tokens: the protocol alone."""
    config = layer_configs(case, points, settings)[0]
    source = open_source(case, settings.seed, device)
    with MegaMoELayer(config, comm) as layer:
        load_together(layer, source, comm, settings.timeout_s)
        nothing = forward_of_nothing(layer)
        spec = TimingSpec(Mode.BURST, settings.warmup, settings.iters, 8, settings.timeout_s, settings.settle_s)
        timer = choose_timer(layer.engine_name, settings.use_cuda_graph)
        samples = timer(lambda _: nothing(), spec, comm).samples
        return statistics.median(samples.slowest_us)
