# SPDX-License-Identifier: Apache-2.0
"""Graph-safe pieces of a decode step around the MoE layer: fixed shapes, device-side decisions, state updated in place.

Written to be imported or copied by engines; each has static buffers and no host branch on device values (R54).
"""

from __future__ import annotations

from trtllm_megamoe.graph.blocks.compressor import Compressor
from trtllm_megamoe.graph.blocks.decode_io import DecodeIO
from trtllm_megamoe.graph.blocks.normalise import doubly_stochastic
from trtllm_megamoe.graph.blocks.routing import remap_to_local, route_top_k
from trtllm_megamoe.graph.blocks.sampler import Sampler, counter_uniform
from trtllm_megamoe.graph.blocks.selection import TopKSelector, gather_rows

__all__ = [
    "Compressor",
    "DecodeIO",
    "Sampler",
    "TopKSelector",
    "counter_uniform",
    "doubly_stochastic",
    "gather_rows",
    "remap_to_local",
    "route_top_k",
]
