# SPDX-License-Identifier: Apache-2.0
"""The bucket ladder: which kernel configuration a launch takes (R2). Pure Python, identical on all ranks.

Used by the layer, the tuner, `explain` and the host adapter. A bucket chooses tile configuration and loop bounds only:
memory is allocated once at the cap (design D5) and work is never padded to a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError

RUNGS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Rungs below the cap, in tokens per rank.

256, 1024 and 4096 are the host's rungs, the others ours. A bucket's tile suits a step that fills the bucket, so a
smaller step pays for its distance to the rung: with a factor of four between rungs, 32 tokens of Qwen3-235B's share ran
the tile for 64 and took 66 us instead of 57 (docs/tuning.md). With a factor of two, every step of 5 tokens or more that
a rung holds fills over half of its bucket. A rung costs no memory, and a compiled kernel only where it brings a new
tile. The rungs do not depend on the cap, so neither does the bucket of a step that a rung below the cap holds.
"""


def launch_cap(moe_max_num_tokens: int | None, max_num_tokens: int | None) -> int:
    """Most tokens that one rank passes to one launch: the smaller of the host's two bounds (R2).

    It is never divided by the data-parallel size: each rank schedules up to the whole bound by itself.

    Args:
        moe_max_num_tokens: The MoE chunk bound, or None where the user set none.
        max_num_tokens: The engine's bound on tokens per step, or None where it is unknown.

    Raises:
        MegaMoeConfigError: Neither is given (a cap has no default), or one is below 1.
    """
    bounds = {"moe_max_num_tokens": moe_max_num_tokens, "max_num_tokens": max_num_tokens}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    wrong = [f"{name} is {bound}" for name, bound in given.items() if bound < 1]
    if wrong or not given:
        raise MegaMoeConfigError(
            f"cannot size the launch: {' and '.join(wrong) or 'neither moe_max_num_tokens nor max_num_tokens is set'}; "
            "set at least one of them, each to at least 1"
        )
    return min(given.values())


@dataclass(frozen=True, slots=True)
class BucketLadder:
    """Ascending token capacities a launch can choose from; the last one is the cap."""

    rungs: tuple[int, ...]

    @classmethod
    def for_cap(cls, cap: int) -> BucketLadder:
        """The ladder of a cap (tokens per rank, at least 1): every rung below it, and itself."""
        if cap < 1:
            raise MegaMoeConfigError(f"the cap on tokens per rank must be at least 1, got {cap}")
        return cls((*(rung for rung in RUNGS if rung < cap), cap))

    @property
    def cap(self) -> int:
        """Most tokens a rank may pass to one launch."""
        return self.rungs[-1]

    def select(self, max_tokens_over_ranks: int | None) -> int:
        """The smallest bucket that holds the fullest rank of this launch.

        Args:
            max_tokens_over_ranks: The MAXIMUM token count over the ranks, known on the host, the same on all ranks. A
                rank without tokens passes the maximum too. None or 0 means unknown and selects the cap, which every
                rank can do without asking the others.

        Raises:
            MegaMoeCapacityError: The count exceeds the cap; names both.
            MegaMoeConfigError: The count is negative.
        """
        if max_tokens_over_ranks is None or max_tokens_over_ranks == 0:
            return self.cap
        if max_tokens_over_ranks < 0:
            raise MegaMoeConfigError(f"a token count cannot be negative, got {max_tokens_over_ranks}")
        for rung in self.rungs:
            if max_tokens_over_ranks <= rung:
                return rung
        raise MegaMoeCapacityError(
            f"{max_tokens_over_ranks} tokens on the fullest rank exceed the cap of {self.cap} tokens per rank; nothing "
            "was launched. Split the chunk or build the layer with a larger max_tokens_per_rank"
        )
