# SPDX-License-Identifier: Apache-2.0
"""Faults: explicit transfers. Each snippet is scanned alone behind this preamble; `expect` marks the lines to find."""
import math

import numpy as np
import torch
from torch import Tensor, nn


# snippet: item_behind_two_helpers
def _longest(lengths):
    return lengths.max()


def _budget(lengths):
    return _longest(lengths).item() + 1  # expect: GR101


def step(x: Tensor, lengths: Tensor) -> Tensor:
    return x * _budget(lengths)


# snippet: tolist_on_attribute
class Scheduler:
    def __init__(self, device):
        self.lengths = torch.zeros(8, dtype=torch.int32, device=device)

    def forward(self, x):
        counts = self.lengths.tolist()  # expect: GR101
        return x, counts


# snippet: numpy_of_detached
def step(logits: Tensor):
    return logits.detach().float().cpu().numpy()  # expect: GR102


# snippet: asarray
def step(probs: Tensor):
    return np.asarray(probs)  # expect: GR101


# snippet: to_cpu_by_device_object
HOST = torch.device("cpu")


def step(tokens: Tensor) -> Tensor:
    return tokens.to(device=HOST)  # expect: GR102


# snippet: blocking_copy_to_pinned
class Output:
    def __init__(self):
        self.host_tokens = torch.empty(64, dtype=torch.int64, pin_memory=True)

    def forward(self, tokens: Tensor) -> None:
        self.host_tokens.copy_(tokens)  # expect: GR102


# snippet: cast_through_math
def step(x: Tensor) -> Tensor:
    scale = math.sqrt(x.pow(2).sum())  # expect: GR103
    return x / scale


# snippet: bool_of_reduction
def step(done: Tensor) -> bool:
    return bool(done.all())  # expect: GR103


# snippet: python_list_to_device
def step(x: Tensor, slots: list[int]) -> Tensor:
    index = torch.tensor(slots, dtype=torch.int64, device="cuda")  # expect: GR104
    return x.index_select(0, index)


# snippet: pageable_copy_into_static_buffer
class Inputs:
    def __init__(self):
        self.ids = torch.zeros(64, dtype=torch.int64, device="cuda")

    def forward(self, token_ids_cpu: Tensor) -> Tensor:
        self.ids.copy_(token_ids_cpu, non_blocking=True)  # expect: GR104
        return self.ids


# snippet: cuda_on_parameter
def step(batch: Tensor) -> Tensor:
    return batch.cuda().float()  # expect: GR104


# snippet: stack_of_scalars
def step(x: Tensor) -> Tensor:
    lo, hi = x.min(), x.max()
    return torch.tensor([lo, hi])  # expect: GR101


# snippet: read_in_submodule
class Gate(nn.Module):
    def forward(self, x):
        self.last = x.mean().item()  # expect: GR101
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList([Gate() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = gate(x)
        return x
