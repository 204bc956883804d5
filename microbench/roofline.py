# SPDX-License-Identifier: Apache-2.0
"""How many bytes and FLOPs one forward of the layer must cost, and the time they take at a device's peaks.

A floor, not a prediction: every term below is work that no implementation of these numerics can leave out. Used by the
runner; pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from microbench.peaks import Peaks
from microbench.routing import Load
from trtllm_megamoe.formats import ActivationMode, CombineFormat

# 4 bits a code and one e4m3 byte per 16 values
NVFP4_BYTES_PER_VALUE = 0.5625
BF16_BYTES_PER_VALUE = 2.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank receives and sends in one forward (floats, so that expectations fit too)."""

    routes_received: float
    experts_touched: float
    routes_sent: float  # to experts of other ranks
    rows_returned: float  # to token owners on other ranks


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and FLOPs of one rank in one forward."""

    hbm_bytes: float
    flops: float
    link_bytes: float


@dataclass(frozen=True, slots=True)
class Floor:
    """Least time of one rank in one forward; `bound` names the binding resource: `hbm`, `tensor` or `nvlink`."""

    hbm_us: float
    tensor_us: float
    nvlink_us: float

    @property
    def sol_us(self) -> float:
        """The highest of the three: they can all overlap."""
        return max(self.hbm_us, self.tensor_us, self.nvlink_us)

    @property
    def bound(self) -> str:
        """Name of the highest."""
        by_name = {"hbm": self.hbm_us, "tensor": self.tensor_us, "nvlink": self.nvlink_us}
        return max(by_name, key=lambda name: by_name[name])


def expert_bytes(hidden_size: int, intermediate_size: int) -> float:
    """Weights of one expert: gate, up and down of H * I values each, codes and block scales."""
    return 3 * hidden_size * intermediate_size * NVFP4_BYTES_PER_VALUE


def route_flops(hidden_size: int, intermediate_size: int) -> float:
    """Multiply and add of three H * I products; SwiGLU, quantisation and the top-k sum are below 0.1 % of it."""
    return 6 * hidden_size * intermediate_size


def dispatch_row_bytes(hidden_size: int, activations: ActivationMode) -> float:
    """One token row on its way to an expert: NVFP4 codes and scales, or 16-bit values."""
    per_value = NVFP4_BYTES_PER_VALUE if activations is ActivationMode.NVFP4 else BF16_BYTES_PER_VALUE
    return hidden_size * per_value


def combine_row_bytes(hidden_size: int, combine_format: CombineFormat) -> int:
    """One result row on its way to its token's owner: data plane and padded scale plane."""
    return combine_format.data_row_bytes(hidden_size) + combine_format.scale_row_bytes(hidden_size)


def rank_work(
    traffic: Traffic,
    *,
    hidden_size: int,
    intermediate_size: int,
    combine_format: CombineFormat,
    activations: ActivationMode,
) -> Work:
    """Bytes and FLOPs that `traffic` costs its rank."""
    return Work(
        # weights of every expert that owns a row are read once; activations and results are left out (small at decode,
        # hidden under the tensor cores at prefill)
        hbm_bytes=traffic.experts_touched * expert_bytes(hidden_size, intermediate_size),
        flops=traffic.routes_received * route_flops(hidden_size, intermediate_size),
        # dispatch and combine leave through the same direction of the same link, so they add up; one copy per route
        link_bytes=traffic.routes_sent * dispatch_row_bytes(hidden_size, activations)
        + traffic.rows_returned * combine_row_bytes(hidden_size, combine_format),
    )


def floor_of(work: Work, peaks: Peaks, activations: ActivationMode) -> Floor | None:
    """Time of `work` at the device's peaks; None where the device has no rate for this activation mode."""
    mma_flops_per_s = peaks.mma_flops_per_s.get(activations)
    if mma_flops_per_s is None:
        return None
    return Floor(
        hbm_us=work.hbm_bytes / peaks.hbm_bytes_per_s * 1e6,
        tensor_us=work.flops / mma_flops_per_s * 1e6,
        nvlink_us=work.link_bytes / peaks.link_bytes_per_s * 1e6,
    )


def measured_traffic(load: Load) -> list[Traffic]:
    """Traffic of every rank under a routing that was really drawn."""
    sent = load.sent.view(load.ep_size, load.ep_size, -1)  # (source, owner, local expert)
    routes = sent.sum(dim=2)
    traffic = []
    for rank in range(load.ep_size):
        stays = int(routes[rank, rank])
        traffic.append(
            Traffic(
                routes_received=int(routes[:, rank].sum()),
                experts_touched=int(torch.count_nonzero(sent[:, rank].sum(dim=0))),
                routes_sent=int(routes[rank].sum()) - stays,
                rows_returned=int(routes[:, rank].sum()) - stays,
            )
        )
    return traffic


def expected_traffic(tokens_per_rank: int, *, num_experts: int, top_k: int, ep_size: int) -> Traffic:
    """Traffic of one rank when every token picks its experts at random: the mean over routings."""
    routes = tokens_per_rank * top_k
    untouched = (1 - top_k / num_experts) ** (ep_size * tokens_per_rank)
    remote = routes * (ep_size - 1) / ep_size
    return Traffic(
        routes_received=routes,
        experts_touched=num_experts / ep_size * (1 - untouched),
        routes_sent=remote,
        rows_returned=remote,
    )
