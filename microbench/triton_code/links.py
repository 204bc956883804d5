# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Triton kernels of :mod:`microbench.links`: one program each, every wait bounded. Needs triton to be imported."""

from __future__ import annotations

import triton
import triton.language as tl


# numbers are not specialised: a call with others must not compile again between two events
@triton.jit(do_not_specialize=["first_round", "rounds", "most_polls"])
def ping_pong(own, peer, gave_up, first_round, rounds, begins: tl.constexpr, most_polls):
    """Answer `rounds` rounds: write the round's number into the peer's word, wait until it stands in the own one.

    The side that `begins` writes first. All waits together poll at most `most_polls` times; `gave_up` counts those that
    ended without the peer.
    """
    failed = 0
    polls = 0
    for number in range(first_round, first_round + rounds):
        if begins:
            tl.atomic_xchg(peer, number, sem="release", scope="sys")
        seen = tl.atomic_add(own, 0, sem="acquire", scope="sys")
        while (seen < number) & (polls < most_polls):
            seen = tl.atomic_add(own, 0, sem="acquire", scope="sys")
            polls += 1
        failed += (seen < number).to(tl.int32)
        if not begins:
            tl.atomic_xchg(peer, number, sem="release", scope="sys")
    tl.store(gave_up, failed)


@triton.jit(do_not_specialize=["loads"])
def chase(words, result, loads):
    """`loads` loads of one word, each at the address that the one before named (the words hold 0)."""
    at = tl.zeros([], dtype=tl.int64)
    for _ in range(loads):
        at = tl.load(words + at, volatile=True)
    tl.store(result, at)
