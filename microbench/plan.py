# SPDX-License-Identifier: Apache-2.0
"""From options to work: how many ranks, which layer, which points, which settings. Pure; called by the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from microbench.cases import Case, checkpoint_case, preset_case
from microbench.routing import by_rows, by_tokens
from microbench.runner import Point, Settings
from trtllm_megamoe.comm.launch import Launch
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.presets import PRESETS

DEFAULT_TOKENS = "1,8,32"


def count_ranks(launch: Launch, virtual_ranks: int, share_of_ep: int) -> int:
    """EP size of this run: the launcher's, or the virtual ranks of this process.

    Raises:
        MegaMoeConfigError: Both, or one rank's share on several ranks.
    """
    if launch.size > 1 and virtual_ranks > 1:
        raise MegaMoeConfigError(
            f"--virtual-ranks {virtual_ranks} under a launcher of {launch.size} ranks; use one of the two"
        )
    ep_size = max(launch.size, virtual_ranks)
    if share_of_ep > 1 and ep_size > 1:
        raise MegaMoeConfigError(
            f"--share-of-ep {share_of_ep} is one rank's share on one rank, but {ep_size} ranks run; "
            "start it without mpirun and --virtual-ranks"
        )
    return ep_size


def choose_case(options: Mapping[str, Any]) -> Case:
    """The layer that the options name.

    Raises:
        MegaMoeConfigError: None or two, or a factor that does not fit.
    """
    preset, checkpoint, layer = options["preset"], options["checkpoint"], options["layer"]
    factors = {"scale_experts": options["scale_experts"], "scale_channels": options["scale_channels"]}
    if (preset is None) == (checkpoint is None):
        raise MegaMoeConfigError(
            f"name what to run: either --preset ({', '.join(PRESETS)}) or --checkpoint DIR with --layer N"
        )
    if preset is not None:
        if layer is not None:
            raise MegaMoeConfigError("--layer belongs to --checkpoint; a preset's layers are all alike")
        case = preset_case(preset, **factors)
    else:
        if layer is None:
            raise MegaMoeConfigError("--checkpoint needs --layer")
        if max(factors.values()) > 1:
            raise MegaMoeConfigError("--scale-experts and --scale-channels shrink presets, not checkpoints")
        case = checkpoint_case(checkpoint, layer)
    return case.cut_to_share(options["share_of_ep"])


def make_points(case: Case, ep_size: int, options: Mapping[str, Any]) -> list[Point]:
    """The product of all lists; rows of one layer and one routing follow each other."""
    tokens, rows = options["tokens_per_rank"], options["rows_per_expert"]
    if tokens is not None and rows is not None:
        raise MegaMoeConfigError("--tokens-per-rank and --rows-per-expert both say how much; use one of the two")
    make, amounts = (by_tokens, tokens) if rows is None else (by_rows, rows)
    if amounts is None:
        amounts = tuple(map(int, DEFAULT_TOKENS.split(",")))
    return [
        Point(
            workload=make(
                routing,
                amount,
                num_experts=case.num_experts,
                top_k=case.top_k,
                ep_size=ep_size,
                seed=options["seed"],
                imbalance=imbalance,
            ),
            combine_format=combine_format,
            mode=mode,
            requested_rows=None if rows is None else amount,
        )
        for combine_format in options["combine_formats"]
        for routing in options["routings"]
        for imbalance in options["imbalances"] or (None,)
        for mode in options["modes"]
        for amount in amounts
    ]


def make_settings(options: Mapping[str, Any]) -> Settings:
    """What all points share."""
    return Settings(
        engine=options["engine"],
        activations=options["activations"],
        warmup=options["warmup"],
        settle_s=options["settle_s"],
        iters=options["iters"],
        seed=options["seed"],
        steps=options["steps"],
        num_layers=options["num_layers"],
        timeout_s=options["timeout_s"],
        virtual_ranks=options["virtual_ranks"],
        use_cuda_graph=options["use_cuda_graph"],
        autotune=options["autotune"],
        rivals=options["rivals"],
        phases=options["phases"],
        expected_engine=options["expect_engine"],
    )
