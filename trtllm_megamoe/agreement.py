# SPDX-License-Identifier: Apache-2.0
"""Facts that must be equal on all ranks, compared once at construction; a mismatch is the same error everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeRankDivergenceError


def require_rank_identical(facts: Mapping[str, object], comm: Communicator, timeout_s: float) -> None:
    """Compare `facts` over all ranks. Collective.

    Raises:
        MegaMoeRankDivergenceError: On EVERY rank, with the same text, naming each differing fact and who holds what.
    """
    held = comm.allgather({name: repr(value) for name, value in facts.items()}, timeout_s)
    names = sorted({name for rank_facts in held for name in rank_facts})
    differing = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(held):
            ranks_of.setdefault(rank_facts.get(name, "<absent>"), []).append(rank)
        if len(ranks_of) > 1:
            differing.append(f"{name}: " + ", ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items()))
    if differing:
        raise MegaMoeRankDivergenceError(
            f"ranks disagree on facts that must be identical: {'; '.join(differing)}. "
            "Give every rank the same configuration"
        )
