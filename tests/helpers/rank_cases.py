# SPDX-License-Identifier: Apache-2.0
"""Layers of the tests over several GPUs: every wire with both activation modes, uneven token counts with zeros."""

from __future__ import annotations

import itertools

from tests.helpers.layer_cases import LayerCase, make_case, with_splits
from trtllm_megamoe.config import MegaMoeConfig

CAP = 64
SPLITS = (0, 1, 7, 8, 64, 40, 3, 13)
OPTIONS = tuple(itertools.product(("nvfp4", "bf16"), ("bf16", "fp8", "fp4")))
"""(activation mode, wire)."""


def rank_case(ranks: int, kind: str, mode: str, wire: str, shift: int = 0, seed: int = 1) -> LayerCase:
    """One layer and one routing over `ranks` ranks; `shift` turns the token counts around them."""
    splits = [SPLITS[(rank + shift) % len(SPLITS)] for rank in range(ranks)]
    fields = {"engine": "cuda", "max_tokens_per_rank": CAP, "activations": mode, "combine_format": wire}
    case = make_case(kind, ep_size=ranks, num_tokens=max(sum(splits), 1), seed=seed, **fields)  # type: ignore[arg-type]
    return with_splits(case, splits)


def configs(ranks: int) -> list[MegaMoeConfig]:
    """Every layer that :func:`rank_case` makes."""
    return [rank_case(ranks, "uniform", mode, wire).config for mode, wire in OPTIONS]
