# SPDX-License-Identifier: Apache-2.0
"""The case matrix: shapes, options, routings. The self-test runs those that `SELECTED` names, the GPU suite all.

Pure: what an architecture's kernels do not support is left out by :mod:`trtllm_megamoe.selftest.plan`, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.presets import PRESETS

SHORT = ("edge-short", "hot", "masked", "all-masked", "none", "duplicates")
FULL = ("edge", "balanced", "zipf", *SHORT[1:])

OPTIONS: dict[str, Any] = {
    "score_placement": "before_requant",
    "swiglu_limit": 3.0,
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
}
"""Every option of the arithmetic at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layer and what is sent through it.

    Attributes:
        name: what reports call it.
        config: the layer; its cap holds every routing of the case.
        routings: names for :func:`~trtllm_megamoe.selftest.inputs.named_ids`, or for `rank_ids` where there are ranks.
        input_scales: whether the checkpoint has activation scales.
        ep_size: ranks of the layer.
    """

    name: str
    config: MegaMoeConfig
    routings: tuple[str, ...]
    input_scales: bool = True
    ep_size: int = 1

    @property
    def mode(self) -> ActivationMode:
        """Its activation mode, which every case fixes."""
        return ActivationMode(self.config.activations)


def _layer(shape: tuple[int, int, int, int], cap: int, mode: str, wire: str = "bf16", **options: Any) -> MegaMoeConfig:
    hidden, inter, experts, top_k = shape
    return MegaMoeConfig.create(
        hidden_size=hidden,
        intermediate_size=inter,
        num_experts=experts,
        top_k=top_k,
        max_tokens_per_rank=cap,
        activations=mode,
        combine_format=wire,
        timeout_s=10.0,
        **options,
    )


SMALL = (1024, 512, 13, 6)


def one_rank_cases() -> list[Case]:
    """A small shape with every option, odd shapes, then some experts of the presets' shapes over every wire."""
    cases = [
        Case("small-nvfp4", _layer(SMALL, 384, "nvfp4"), FULL),
        Case("small-bf16", _layer(SMALL, 384, "bf16"), FULL),
        Case("small-bf16-weight-only", _layer(SMALL, 64, "bf16"), SHORT, input_scales=False),
        Case("small-nvfp4-fp8-options", _layer(SMALL, 64, "nvfp4", "fp8", **OPTIONS), SHORT),
        Case("small-nvfp4-fp4", _layer(SMALL, 64, "nvfp4", "fp4"), SHORT),
        Case("small-bf16-fp8", _layer(SMALL, 64, "bf16", "fp8"), SHORT),
        Case("small-bf16-fp4-options", _layer(SMALL, 64, "bf16", "fp4", **OPTIONS), SHORT),
        Case("tiny-odd-bf16", _layer((32, 16, 3, 1), 64, "bf16"), ("edge-short", *SHORT[2:])),
        Case("odd-nvfp4", _layer((672, 336, 40, 16), 96, "nvfp4"), SHORT),
        Case("odd-nvfp4-fp4", _layer((800, 352, 5, 3), 64, "nvfp4", "fp4", **OPTIONS), ("edge-short", *SHORT[2:])),
    ]
    return cases + preset_cases()


PRESET_EXPERTS = {"kimi-k2": 48}
"""Experts of a preset's cases where they are not twelve. kimi-k2 differs from deepseek-v3 in nothing else: here it has
what one of eight ranks owns of its 384."""


def preset_cases() -> list[Case]:
    """Both activation modes and every wire of the presets' shapes, with as many experts as a test has memory for."""
    cases = []
    for name, model in PRESETS.items():
        experts = PRESET_EXPERTS.get(name, 12)
        cap = 64 * experts // model.top_k  # what the routing "zipf" needs
        for mode in ("bf16", "nvfp4"):
            for wire in ("bf16", "fp8", "fp4"):
                config = model.layer_config(
                    max_tokens_per_rank=cap, activations=mode, combine_format=wire, timeout_s=10.0
                )
                config = config.model_copy(update={"num_experts": experts})
                suffix = "" if wire == "bf16" else f"-{wire}"
                cases.append(Case(f"{name}-{mode}{suffix}", config, ("zipf", "masked")))
    return cases


RANKS_SMALL = (1024, 512, 40, 6)


def rank_cases() -> list[Case]:
    """Layers over several ranks."""
    routings = ("random", "hot-expert", "hot-rank", "masked", "all-masked", "duplicates")
    return [
        Case("ranks-nvfp4", _layer(RANKS_SMALL, 48, "nvfp4"), routings, ep_size=8),
        Case("ranks-bf16", _layer(RANKS_SMALL, 48, "bf16"), routings, ep_size=8),
        Case("ranks-bf16-fp8-options", _layer(RANKS_SMALL, 48, "bf16", "fp8", **OPTIONS), routings, ep_size=8),
        Case("ranks-nvfp4-fp4-options", _layer(RANKS_SMALL, 48, "nvfp4", "fp4", **OPTIONS), routings, ep_size=8),
        Case("ranks-nvfp4-fp8", _layer(RANKS_SMALL, 48, "nvfp4", "fp8"), routings, ep_size=8),
        Case("two-ranks-odd-bf16-fp4", _layer((672, 336, 40, 16), 48, "bf16", "fp4"), routings, ep_size=2),
        Case("sixteen-ranks-tiny-nvfp4", _layer((32, 16, 32, 1), 48, "nvfp4"), routings, ep_size=16),
    ]


EVERY_TILE = "small-nvfp4"
"""The case that runs with every tile configuration; all others run with those of the heuristic."""

QUICK = ("small-nvfp4", "small-nvfp4-fp8-options", "small-bf16-fp4-options", "ranks-nvfp4")
SELECTED = (
    *("small-nvfp4", "small-bf16", "small-bf16-weight-only", "small-nvfp4-fp8-options", "small-nvfp4-fp4"),
    *("small-bf16-fp4-options", "tiny-odd-bf16", "odd-nvfp4", "odd-nvfp4-fp4", "deepseek-v3-bf16"),
    *("deepseek-v4-pro-nvfp4", "ranks-nvfp4", "ranks-bf16-fp8-options"),
)


def selected(*, quick: bool) -> list[Case]:
    """The self-test's cases; quick: few of them, with the short routings."""
    names = QUICK if quick else SELECTED
    return [_shortened(case, quick) for case in (*one_rank_cases(), *rank_cases()) if case.name in names]


def _shortened(case: Case, quick: bool) -> Case:
    if not quick or case.routings != FULL:
        return case
    return Case(case.name, case.config.model_copy(update={"max_tokens_per_rank": 64}), SHORT, case.input_scales)
