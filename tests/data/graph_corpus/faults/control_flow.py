# SPDX-License-Identifier: Apache-2.0
"""Faults: host control flow on device values."""
import torch
import torch.distributed as dist
from torch import Tensor


# snippet: while_not_done
def step(x: Tensor, done: Tensor) -> Tensor:
    while not done.all():  # expect: GR201
        x = x + 1
        done = x > 3
    return x


# snippet: conditional_expression
def step(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x  # expect: GR201


# snippet: or_default
def step(x: Tensor, mask: Tensor) -> Tensor:
    mask = mask or x  # expect: GR201
    return x * mask


# snippet: chained_comparison
def step(token: Tensor, vocab: int) -> Tensor:
    inside = 0 <= token < vocab  # expect: GR201
    return token * inside


# snippet: filter_in_comprehension
def step(rows: list[Tensor]) -> list[Tensor]:
    return [row for row in rows if row.any()]  # expect: GR201


# snippet: match_on_token
def step(logits: Tensor) -> int:
    match logits.argmax():  # expect: GR201
        case 0:
            return 0
        case _:
            return 1


# snippet: branch_on_flag_of_helper
class Step:
    def __init__(self, device):
        self.finished = torch.zeros(4, dtype=torch.bool, device=device)

    def _finished(self) -> Tensor:
        return self.finished.all()

    def forward(self, x: Tensor) -> Tensor:
        if self._finished():  # expect: GR201
            return x
        return x * 2


# snippet: loop_over_experts_hit
def step(x: Tensor, expert_ids: Tensor, weights: list[Tensor]) -> Tensor:
    for expert in expert_ids:  # expect: GR202
        x = x + 1
    return x


# snippet: enumerate_rows
def step(x: Tensor, out: Tensor) -> Tensor:
    for row, value in enumerate(x):  # expect: GR202
        out[row] = value
    return out


# snippet: range_over_device_count
def step(x: Tensor, counts: Tensor) -> Tensor:
    total = counts.sum()
    for _ in range(total):  # expect: GR202
        x = x + 1
    return x


# snippet: stop_token_in_tensor
def step(stop: Tensor) -> bool:
    return 7 in stop  # expect: GR203


# snippet: list_index_of_tensor
def step(order: list, best: Tensor) -> int:
    return order.index(best)  # expect: GR203


# snippet: boundary_by_python_counter
class Compressor:
    def __init__(self, ratio: int, device):
        self.ratio = ratio
        self.position = 0
        self.ring = torch.zeros(ratio, 8, device=device)

    def forward(self, x: Tensor) -> Tensor:
        self.ring[self.position % self.ratio] = x
        self.position += 1  # expect: GR204
        return self.ring


# snippet: global_step_counter
STEP = 0


def step(x: Tensor) -> Tensor:
    global STEP
    STEP += 1  # expect: GR204
    return x * STEP


# snippet: empty_rank_leaves_early
def forward(hidden_states: Tensor, gathered: Tensor) -> Tensor:
    if not hidden_states.numel():  # expect: GR205
        return hidden_states
    dist.all_gather_into_tensor(gathered, hidden_states)
    return gathered
