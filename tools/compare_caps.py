# SPDX-License-Identifier: Apache-2.0
"""Does decode pay for the prefill cap? The same layer built for two caps, timed on the same steps in turns.

    python tools/compare_caps.py [--preset NAME] [--share-of-ep N] [--caps 256,8192] [--tokens 1,2,4] [--out FILE.json]

Both layers hold the same weights and get the same tokens; results must be equal bit for bit. Times are medians of graph
replays (`tuning.runner.time_replays`), taken in turns over several rounds; `spread_pct` is what two rounds of one layer
differ by, so a difference below it is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from trtllm_megamoe.cli.explain import find_model, share_of
from trtllm_megamoe.comm import Communicator, single
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.tuning.runner import Timer, time_replays
from trtllm_megamoe.tuning.workload import random_step, random_weights

WAIT_S = 60.0


def time_host(run: Callable[[], object], comm: Communicator, timeout_s: float) -> float:
    """Microseconds of one call by the host's clock, for the CPU engine."""
    del comm, timeout_s
    times = []
    for _ in range(3):
        started = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def compare(configs: list[MegaMoeConfig], tokens: list[int], rounds: int, timer: Timer) -> Iterator[dict[str, Any]]:
    """One row per token count: median microseconds of each layer, their ratio, and the noise."""
    with contextlib.ExitStack() as stack:
        layers = [stack.enter_context(MegaMoELayer(config)) for config in configs]
        for layer in layers:
            layer.load_weights(random_weights(layer.config))
            layer.prepare()
        for num_tokens in tokens:
            yield _compare_at(layers, num_tokens, rounds, timer)


def _compare_at(layers: list[MegaMoELayer], num_tokens: int, rounds: int, timer: Timer) -> dict[str, Any]:
    step = random_step(layers[0].config, num_tokens, 0, layers[0].device)
    outs = [layer.forward(*step, num_tokens) for layer in layers]
    buckets = [layer.last_bucket for layer in layers]
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(rounds):
        for index, layer in enumerate(layers):
            times[index].append(timer(lambda layer=layer: layer.forward(*step, num_tokens), single(), WAIT_S))
    medians = [statistics.median(of_layer) for of_layer in times]
    return {
        "tokens": num_tokens,
        "caps": [layer.config.max_tokens_per_rank for layer in layers],
        "buckets": buckets,
        "us": [round(value, 3) for value in medians],
        "ratio": round(medians[-1] / medians[0], 4),
        "spread_pct": round(max(100 * (max(of_layer) - min(of_layer)) / min(of_layer) for of_layer in times), 2),
        "bits_equal": all(torch.equal(out, outs[0]) for out in outs),
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 when results differ; times are for the reader to judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3-235b")
    parser.add_argument("--share-of-ep", type=int, default=8)
    parser.add_argument("--caps", default="256,8192")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--activations", choices=["nvfp4", "bf16"], default="bf16")
    parser.add_argument("--engine", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    model = share_of(find_model(options.preset), options.share_of_ep)
    configs = [
        model.layer_config(
            max_tokens_per_rank=int(cap), activations=options.activations, engine=options.engine, timeout_s=WAIT_S
        )
        for cap in options.caps.split(",")
    ]
    timer = time_replays if options.engine == "cuda" else time_host
    rows = []
    for row in compare(configs, [int(count) for count in options.tokens.split(",")], options.rounds, timer):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.out is not None:
        facts = {"preset": options.preset, "share_of_ep": options.share_of_ep, "activations": options.activations}
        device = torch.cuda.get_device_name() if options.engine == "cuda" else "cpu"
        report = {"command": " ".join(sys.argv), "device": device, "torch": torch.__version__, **facts, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["bits_equal"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
