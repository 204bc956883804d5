# SPDX-License-Identifier: Apache-2.0
"""What ranks must agree on: facts that are equal everywhere, and faults that stop everybody or nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeError, MegaMoeRankDivergenceError, MegaMoeWeightError

Result = TypeVar("Result")


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


def succeed_or_fail_together(
    work: Callable[[], Result],
    comm: Communicator,
    timeout_s: float,
    what: str | None = None,
    error: type[MegaMoeError] = MegaMoeWeightError,
) -> Result:
    """Do this rank's part of something; when any rank fails, every rank raises the same error.

    Nobody goes on to a launch that a failed rank would never join. Collective.

    Args:
        work: This rank's part.
        what: Said before the fault, e.g. which layer of which checkpoint.
        error: What a failure of the work is; anything else is this rank's alone.

    Raises:
        MegaMoeError: Of the given type, on EVERY rank, with the first faulty rank's text, and who else failed.
    """
    fault, result = None, None
    try:
        result = work()
    except error as err:
        fault = str(err)
    faults = {rank: text for rank, text in enumerate(comm.allgather(fault, timeout_s)) if text is not None}
    if faults:
        who = f" (ranks {list(faults)} of {comm.size} failed, this is the first one's)" if comm.size > 1 else ""
        raise error(f"{what + ': ' if what else ''}{next(iter(faults.values()))}{who}")
    return cast(Result, result)
