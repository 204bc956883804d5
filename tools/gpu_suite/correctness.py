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
from trtllm_megamoe.selftest.cases import one_rank_cases
from trtllm_megamoe.selftest.checks import compare, fault_of
from trtllm_megamoe.selftest.inputs import named_ids
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import TILES

TILES_OF = {
    "small-nvfp4": tuple(TILES),
    "small-bf16": tuple(TILES),
    "small-bf16-weight-only": ("n16",),
    "small-nvfp4-fp8-options": ("n16", "n128"),
    "small-nvfp4-fp4": ("n16", "h64"),
    "small-bf16-fp8": ("n64", "h16"),
    "small-bf16-fp4-options": ("n8", "h16"),
    "tiny-odd-bf16": ("n16", "h8"),
    "odd-nvfp4": ("n16", "h16"),
    "odd-nvfp4-fp4": ("n16", "h64"),
}
"""Case of the self-test -> the tiles that it runs here; all others run `PRESET_TILES` with longer routings."""

PRESET_TILES, PRESET_ROUTINGS = ("n16", "n128", "h16"), ("edge", "zipf", "masked")


@dataclass(frozen=True)
class Case:
    """One shape with options, the tiles that must handle it, and its routings."""

    name: str
    spec: LayerSpec
    tiles: tuple[str, ...]
    routings: tuple[str, ...]
    input_scales: bool = True


def all_cases() -> list[Case]:
    """The whole matrix of one rank."""
    found = []
    for case in one_rank_cases():
        spec = layer_spec(case.config, case.ep_size, case.mode)
        tiles = TILES_OF.get(case.name, PRESET_TILES)
        routings = case.routings if case.name in TILES_OF else PRESET_ROUTINGS
        found.append(Case(case.name, spec, tiles, routings, case.input_scales))
    return found


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


def _is_wanted(name: str, only: str) -> bool:
    """`only` names one case, or is part of the names of several."""
    return name == only or (only in name and all(case.name != only for case in all_cases()))


def run(cache_dir: Path, only: str = "", routings: str = "", tiles: str = "") -> Iterator[dict[str, Any]]:
    """One result per (case, tile, routing); `ok` says whether it is inside its tolerance."""
    for number, case in enumerate(all_cases()):
        if not _is_wanted(case.name, only):
            continue
        spec = case.spec
        tensors = cases.random_tensors(spec, 11 + number, input_scales=case.input_scales)
        oracle = OracleWeights.from_tensors(tensors)
        layer = GpuLayer(spec, tensors, 1024, cache_dir)
        for index, name in enumerate(case.routings):
            if routings and name not in routings.split(","):
                continue
            ids = routing(name, spec, 100 * number + index)
            x = cases.tokens(spec, ids.shape[0], 17 + index)
            w = cases.weights(spec, ids, 23 + index)
            expected = oracle_forward(oracle, x, ids, w, oracle_options(spec)).to(torch.bfloat16)
            for tile in tiles.split(",") if tiles else case.tiles:
                layer.poison()
                out = layer.forward(tile, x, ids.to(torch.int32) if index % 2 else ids, w)
                torch.cuda.synchronize()
                result: dict[str, Any] = {"case": case.name, "tile": tile, "routing": name, "tokens": ids.shape[0]}
                result |= compare(out, expected)
                error = layer.error_record()
                result["error_record"] = error if error["set"] else None
                result["ok"] = not fault_of(result, spec.combine_format) and not error["set"]
                yield result
                if error["set"]:
                    layer.reset()
        del layer, tensors, oracle
        torch.cuda.empty_cache()
