# SPDX-License-Identifier: Apache-2.0
"""Kernel against oracle at the same rounding points, over shapes, options, tiles and routings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.gpu_suite import cases
from tools.gpu_suite.layer import GpuLayer
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
from trtllm_megamoe.kernels.hopper import layer_spec
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward
from trtllm_megamoe.selftest.cases import Case as SelfTestCase
from trtllm_megamoe.selftest.cases import one_rank_cases, preset_cases
from trtllm_megamoe.selftest.checks import TOLERANCE, compare, fault_of
from trtllm_megamoe.selftest.inputs import named_ids
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import TILES

TILES_OF = {
    "small-nvfp4": tuple(TILES),
    "small-bf16": tuple(TILES),
    "small-bf16-weight-only": ("n16",),
    "small-nvfp4-fp8-options": ("n16", "n128"),
    "small-nvfp4-fp4": ("h64",),
    "small-bf16-fp8": ("n64",),
    "small-bf16-fp4-options": ("n8",),
    "tiny-odd-bf16": ("n16", "h8"),
    "odd-nvfp4": ("h16",),
    "odd-nvfp4-fp4": ("n16",),
}
"""Small case of the self-test -> the tiles that it runs here."""

PRESET_TILES = ("n128", "n16", "h16", "n64", "h64", "n8", "h8")
"""Presets run one tile a case, in turns: each preset sees six of them, and so does each pair of mode and wire."""

PRESET_ROUTINGS = ("edge", "balanced", "zipf", "hot", "masked", "all-masked", "duplicates")


@dataclass(frozen=True)
class Case:
    """One shape with options, the tiles that must handle it, and its routings."""

    name: str
    spec: LayerSpec
    tiles: tuple[str, ...]
    routings: tuple[str, ...]
    input_scales: bool = True


def all_cases() -> list[Case]:
    """The whole matrix of one rank; presets come last."""
    small = [case for case in one_rank_cases() if case.name in TILES_OF]
    found = [_case(case, TILES_OF[case.name], case.routings) for case in small]
    for number, case in enumerate(preset_cases()):
        found.append(_case(case, (PRESET_TILES[number % len(PRESET_TILES)],), PRESET_ROUTINGS))
    return found


def _case(case: SelfTestCase, tiles: tuple[str, ...], routings: tuple[str, ...]) -> Case:
    spec = layer_spec(case.config, case.ep_size, case.mode)
    return Case(case.name, spec, tiles, routings, case.input_scales)


def routing(name: str, spec: LayerSpec, seed: int) -> torch.Tensor:
    """(T, K) ids of a named routing."""
    return named_ids(name, spec, seed)


def oracle_options(spec: LayerSpec) -> OracleOptions:
    """The oracle's rounding points for a layer."""
    placement = ScorePlacement.BEFORE_REQUANT if spec.weigh_before_requant else ScorePlacement.AFTER_FC2
    return OracleOptions.product(
        ActivationMode(spec.activation_mode),
        combine_format=CombineFormat(spec.combine_format),
        score_placement=placement,
        swiglu_limit=spec.swiglu_limit,
        swiglu_alpha=spec.swiglu_alpha,
        swiglu_beta=spec.swiglu_beta,
    )


def wanted(only: str) -> list[Case]:
    """Cases of a comma list: of each word the case of that name, or else all cases whose names contain it."""
    every = all_cases()
    exact = {case.name for case in every}
    words = only.split(",")
    return [case for case in every if any(w == case.name or (w not in exact and w in case.name) for w in words)]


class _Weights:
    """Checkpoint tensors of one shape, the oracle on them, and their records once some layer has packed them."""

    def __init__(self, case: Case, seed: int) -> None:
        self.of = self.key(case)
        self.tensors = cases.random_tensors(case.spec, seed, input_scales=case.input_scales)
        self.oracle = OracleWeights.from_tensors(self.tensors)
        self.packed: dict[str, torch.Tensor] | None = None

    @staticmethod
    def key(case: Case) -> tuple[int, int, int, bool]:
        """Cases with equal keys can share weights."""
        spec = case.spec
        return spec.hidden_size, spec.intermediate_size, spec.num_experts, case.input_scales


def run(cache_dir: Path, only: str = "", routings: str = "", tiles: str = "") -> Iterator[dict[str, Any]]:
    """One result per (case, tile, routing); `ok` says whether it is inside its tolerance."""
    shared: _Weights | None = None
    for number, case in enumerate(wanted(only)):
        if shared is None or shared.of != _Weights.key(case):
            shared = None  # frees what the last shape took
            torch.cuda.empty_cache()
            shared = _Weights(case, 11 + number)
        yield from _run_case(cache_dir, case, number, shared, routings, tiles)


def _run_case(
    cache_dir: Path, case: Case, number: int, shared: _Weights, routings: str, tiles: str
) -> Iterator[dict[str, Any]]:
    spec = case.spec
    names = [name for name in case.routings if not routings or name in routings.split(",")]
    drawn = {name: routing(name, spec, 100 * number + index) for index, name in enumerate(names)}
    cap = max((ids.shape[0] for ids in drawn.values()), default=1)
    layer = GpuLayer(spec, shared.tensors, max(cap, 1024), cache_dir, packed=shared.packed)
    shared.packed = layer.packed
    for index, (name, ids) in enumerate(drawn.items()):
        x = cases.tokens(spec, ids.shape[0], 17 + index)
        w = cases.weights(spec, ids, 23 + index)
        expected = oracle_forward(shared.oracle, x, ids, w, oracle_options(spec)).to(torch.bfloat16)
        for tile in tiles.split(",") if tiles else case.tiles:
            layer.poison()
            out = layer.forward(tile, x, ids.to(torch.int32) if index % 2 else ids, w)
            torch.cuda.synchronize()
            result: dict[str, Any] = {"case": case.name, "tile": tile, "routing": name, "tokens": ids.shape[0]}
            result |= compare(out, expected) | {"tolerance": TOLERANCE[spec.combine_format]}
            error = layer.error_record()
            result["error_record"] = error if error["set"] else None
            result["ok"] = not fault_of(result, spec.combine_format) and not error["set"]
            yield result
            if error["set"]:
                layer.reset()
