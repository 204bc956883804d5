# SPDX-License-Identifier: Apache-2.0
"""The layer over several ranks as a chain of public parts: all-to-all, grouped GEMM, all-to-all, weighted sum; bf16.

Used by the runner where ranks have a GPU each. It does the layer's whole work, bf16 tokens in and out, on the same
tokens, routing and (decoded) weights. What depends on the routing alone is prepared before any timing and favours the
chain: who sends how many rows to whom, and both orders by expert. A real chain has to exchange that in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from microbench.cases import Case
from microbench.rivals.base import Nvfp4Matrix
from microbench.rivals.row_kernels import swiglu, weighted_sum
from microbench.routing import Batch, Load
from microbench.sources import WeightSource
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.comm.rendezvous import ensure_process_group
from trtllm_megamoe.weights.spec import Component, Projection, TensorKey

NAME = "unfused chain: all-to-all, torch._grouped_mm bf16, all-to-all"
REGION = (
    "bf16 tokens in, bf16 rows out: gather, all-to-all, fc1, SwiGLU, fc2, all-to-all, top-k sum; counts and orders by "
    "expert are known beforehand"
)

# weights, gate, up, their product and result rows are rounded to bf16 (2^-9 each), which the oracle does only in part:
# three to seven thousandths in all. A lost row, a wrong expert or a wrong order costs tenths.
TOLERANCE_REL_L2 = 2e-2


def why_not(comm: Communicator, device: torch.device) -> str | None:
    """None where the chain can run over these ranks, else the reason. Not collective."""
    if comm.transport == "threads":
        return "the ranks are threads of one process; it needs a process and a GPU a rank"
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no _grouped_mm"
    if device.type == "cuda" and not dist.is_nccl_available():
        return "this torch has no NCCL"
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """One rank's routing, prepared."""

    x: torch.Tensor
    tokens: torch.Tensor  # rows of x in the order they are sent
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    by_expert: torch.Tensor  # received rows in the order of experts
    by_source: torch.Tensor  # and back
    ends: torch.Tensor  # of each local expert's rows
    slots: torch.Tensor  # (T, K) row of each route among those that come home, -1 for none
    weights: torch.Tensor  # (T, K)


class UnfusedChain:
    """Weights of one rank, and one bound batch after the other.

    Args:
        case: The layer.
        source: Its weights; this rank's experts are decoded to bf16.
        comm: All ranks, as processes.
        device: This rank's.
        timeout_s: Longest wait for a peer while the process group is made.

    Collective: construction, `bind` not, `run` yes.
    """

    def __init__(
        self, case: Case, source: WeightSource, comm: Communicator, device: torch.device, timeout_s: float
    ) -> None:
        self._case, self._comm, self._device = case, comm, device
        ensure_process_group(comm, timeout_s)
        self._group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        hidden, inter, local = case.hidden_size, case.intermediate_size, case.num_experts // comm.size
        gate_up = torch.empty(local, 2 * inter, hidden, dtype=torch.bfloat16, device=device)
        down = torch.empty(local, hidden, inter, dtype=torch.bfloat16, device=device)
        for index in range(local):
            expert = comm.rank * local + index
            gate_up[index, :inter] = _decoded(source, expert, Projection.GATE, device)
            gate_up[index, inter:] = _decoded(source, expert, Projection.UP, device)
            down[index] = _decoded(source, expert, Projection.DOWN, device)
        self._gate_up, self._down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self._meeting = torch.zeros(1, device=device)
        self._plan: _Plan | None = None

    def bind(self, x: torch.Tensor, batch: Batch, load: Load) -> None:
        """Prepare for this rank's tokens `x` (T, H) bf16 and routes; `load` counts the routes of all ranks."""
        rank, size = self._comm.rank, self._comm.size
        ids = batch.topk_ids.flatten()
        live = ((ids >= 0) & (ids < self._case.num_experts)).nonzero().flatten()
        routes = live[ids[live].argsort(stable=True)]  # in the order of experts, hence of ranks
        slots = torch.full((ids.numel(),), -1, dtype=torch.int64)
        slots[routes] = torch.arange(routes.numel())
        table = load.sent.view(size, size, -1)  # (source, owner, local expert)
        mine = table[:, rank]  # (source, local expert)
        experts = torch.arange(mine.shape[1]).repeat(size).repeat_interleave(mine.flatten())
        by_expert = experts.argsort(stable=True)

        def there(values: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return values.to(self._device, dtype)

        self._plan = _Plan(
            x=x,
            tokens=there(routes // self._case.top_k),
            sent=table[rank].sum(dim=1).tolist(),
            received=mine.sum(dim=1).tolist(),
            by_expert=there(by_expert),
            by_source=there(by_expert.argsort()),
            ends=there(mine.sum(dim=0).cumsum(0), torch.int32),
            slots=there(slots.view(batch.topk_ids.shape)),
            weights=there(batch.topk_weights, torch.float32),
        )

    def run(self) -> torch.Tensor:
        """One forward over all ranks: (T, H) bf16. Collective; can be captured once it has run."""
        plan, case = self._plan, self._case
        if plan is None:
            raise RuntimeError("run before bind")
        rows = plan.x.index_select(0, plan.tokens)
        arrived = self._exchange(rows, plan.sent, plan.received).index_select(0, plan.by_expert)
        if arrived.shape[0]:
            gate_up = torch._grouped_mm(arrived, self._gate_up, offs=plan.ends, out_dtype=torch.bfloat16)
            hidden = swiglu(gate_up, case.swiglu_limit, case.swiglu_alpha, case.swiglu_beta)
            arrived = torch._grouped_mm(hidden, self._down, offs=plan.ends, out_dtype=torch.bfloat16)
        home = self._exchange(arrived.index_select(0, plan.by_source), plan.received, plan.sent)
        return weighted_sum(home, plan.slots, plan.weights)

    def meet(self) -> None:
        """Work that no rank leaves before all have come. Collective; can be captured once it has run."""
        dist.all_reduce(self._meeting, group=self._group)

    def close(self) -> None:
        """Give the communicator back. Collective."""
        dist.destroy_process_group(self._group)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        got = torch.empty(sum(received), rows.shape[1], dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(got.view(torch.uint8), rows.view(torch.uint8), received, sent, group=self._group)
        return got


def _decoded(source: WeightSource, expert: int, projection: Projection, device: torch.device) -> torch.Tensor:
    """One matrix as bf16, which holds code times block scale exactly and rounds their product with the global scale."""
    codes, scales, unit = (
        source.read(TensorKey(expert, projection, component)).to(device)
        for component in (Component.CODES, Component.BLOCK_SCALES, Component.GLOBAL_SCALE)
    )
    matrix = Nvfp4Matrix(codes.unsqueeze(0), scales.view(torch.float8_e4m3fn).unsqueeze(0), unit.reshape(1))
    return matrix.decode(0).to(torch.bfloat16)
