# SPDX-License-Identifier: Apache-2.0
"""What runs under compute-sanitizer: `python -m tools.gpu_suite.sanitized PART MODE --cache DIR`, one launch each.

As small as it can be while all of the kernel runs: seven tokens, one of them masked, so spread over experts that tiles
of every width occur, whole and partial blocks, and (with ranks) experts without rows; all rings wrap, CTAs have one
token or two, and one rank's tokens are staged by its first CTA alone. Between them the four cases have both activation
modes, all wires, and every option.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tools.gpu_suite import cases
from tools.gpu_suite.correctness import oracle_options
from tools.gpu_suite.layer import GpuLayer
from tools.gpu_suite.ranks import Inputs, RankGroup, join
from trtllm_megamoe.reference.oracle import OracleWeights, oracle_forward
from trtllm_megamoe.selftest.checks import compare, fault_of
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import TILES, KernelConfig

TILE = "h8"
CTAS = 4
"""Of each rank."""

PATIENCE_NS = 1_200_000_000_000
"""What a wait of the kernel grants: instrumented code is slow."""

_OPTIONS: dict[str, Any] = {
    "weigh_before_requant": True,
    "swiglu_limit": 3.0,
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
}

CASES: dict[str, dict[str, LayerSpec]] = {
    "sanitizer": {
        "bf16": LayerSpec(544, 80, 8, 8, "bf16", "bf16"),
        "nvfp4": LayerSpec(544, 80, 8, 8, "nvfp4", "fp4", **_OPTIONS),
    },
    "exchange-sanitizer": {
        "bf16": LayerSpec(544, 80, 6, 8, "bf16", "fp8", ep_size=2, **_OPTIONS),
        "nvfp4": LayerSpec(1056, 80, 6, 8, "nvfp4", "bf16", ep_size=2),
    },
}
"""Part of the suite -> activation mode -> layer; one launch runs all ranks, because a sanitizer runs launches one after
another, and launches that wait for each other would never end. Hidden sizes: two pieces of a pulled row."""

ROWS = {1: (28, 13, 2, 1, 1, 1, 1, 1), 2: (28, 1, 1, 1, 0, 0, 13, 1, 1, 1, 1, 0)}
"""Ranks -> rows of each expert: blocks of 24 and 4, of 16, and of 8 at most."""

TOKENS = {1: (7,), 2: (2, 5)}
"""Ranks -> T of each; the last token of all is masked."""


def kernel_of(part: str, mode: str) -> KernelConfig:
    """The kernel that a part launches."""
    spec = CASES[part][mode]
    return KernelConfig(spec, TILES[TILE], all_ranks=spec.ep_size > 1)


def make_inputs(spec: LayerSpec, device: str = cases.DEVICE) -> list[Inputs]:
    """Each rank's inputs."""
    ids = cases.ids_from_counts(ROWS[spec.ep_size], spec.top_k, 2, device)
    ids = torch.cat([ids, torch.full_like(ids[:1], -1)])
    made = []
    for rank, own in enumerate(ids.split(TOKENS[spec.ep_size])):
        x = cases.tokens(spec, own.shape[0], 3 + rank, device)
        made.append(Inputs(x, own.contiguous(), cases.weights(spec, own, 5 + rank)))
    return made


def run(part: str, mode: str, cache_dir: Path) -> dict[str, Any]:
    """One launch, compared with the oracle."""
    spec = CASES[part][mode]
    tensors = cases.random_tensors(spec, 1)
    inputs = make_inputs(spec)
    joined = join(inputs)
    truth = oracle_forward(
        OracleWeights.from_tensors(tensors), joined.x, joined.ids, joined.weights, oracle_options(spec)
    )
    most = max(TOKENS[spec.ep_size])
    if spec.ep_size == 1:
        layer = GpuLayer(spec, tensors, most, cache_dir, ctas=CTAS)
        layer.poison()
        layer.set_tokens(most)
        out = torch.full_like(joined.x, float("nan"))
        layer.enqueue(TILE, joined.x, joined.ids, joined.weights, out, timeout_ns=PATIENCE_NS)
        torch.cuda.synchronize()
        errors = [layer.error_record()]
    else:
        group = RankGroup(spec, tensors, most, cache_dir, ctas=CTAS)
        group.poison()
        outputs = group.outputs(inputs)
        group.set_operands(inputs, outputs)
        group.together(TILE, True, timeout_ns=PATIENCE_NS)
        torch.cuda.synchronize()
        out = torch.cat([y[:-1] for y in outputs])
        errors = group.records()
    measured = compare(out, truth.to(torch.bfloat16))
    failed = [error for error in errors if error["set"]]
    fault = fault_of(measured, spec.combine_format)
    return {"case": f"{part} {mode}", **measured, "fault": fault, "errors": failed, "ok": not fault and not failed}


def main() -> int:
    """Exit code 1 where the result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(CASES))
    parser.add_argument("mode", choices=("bf16", "nvfp4"))
    parser.add_argument("--cache", type=Path, required=True, help="directory of compiled kernels")
    arguments = parser.parse_args()
    result = run(arguments.part, arguments.mode, arguments.cache)
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
