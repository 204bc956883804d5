# SPDX-License-Identifier: Apache-2.0
"""Who is which rank of which parallelism; only what MoE code reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mapping:
    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    moe_cluster_size: int = 1
    enable_attention_dp: bool = False

    @property
    def tp_rank(self):
        return self.rank % self.tp_size

    @property
    def moe_ep_rank(self):
        return self.rank % self.moe_ep_size

    @property
    def moe_tp_rank(self):
        return 0
