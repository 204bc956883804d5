# SPDX-License-Identifier: Apache-2.0
"""Faults: per-step allocation, host random numbers, synchronisation."""
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


# snippet: zeros_like_in_helper
def _padded(x):
    return torch.zeros_like(x)  # expect: GR401


def step(x: Tensor) -> Tensor:
    return _padded(x) + x


# snippet: new_zeros
def step(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 4)  # expect: GR401
    return out


# snippet: host_array
def step(x: Tensor) -> Tensor:
    table = np.arange(x.shape[0])  # expect: GR401
    return x * len(table)


# snippet: clone_of_residual
def step(hidden_states: Tensor) -> Tensor:
    residual = hidden_states.clone()  # expect: GR401
    return hidden_states.mul_(2) + residual


# snippet: history_list
class Sampler:
    def __init__(self):
        self.history = []

    def forward(self, logits: Tensor) -> Tensor:
        token = logits.argmax(-1)
        self.history.append(token)  # expect: GR402
        return token


# snippet: growing_key_cache
class Cache:
    def __init__(self, device):
        self.keys = torch.zeros(0, 4, device=device)

    def forward(self, key: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, key])  # expect: GR402
        return self.keys


# snippet: growing_cache_entry
class LayerCaches:
    def __init__(self, device):
        self.values = [torch.zeros(0, 4, device=device) for _ in range(3)]

    def forward(self, layer: int, value: Tensor) -> Tensor:
        self.values[layer] = torch.cat((self.values[layer], value), dim=0)  # expect: GR402
        return self.values[layer]


# snippet: event_per_step
def step(x: Tensor) -> Tensor:
    done = torch.cuda.Event()  # expect: GR403
    done.record()
    return x


# snippet: pinned_per_step
def step(batch_host: Tensor, ids: Tensor) -> Tensor:
    ids.copy_(batch_host.pin_memory(), non_blocking=True)  # expect: GR403
    return ids


# snippet: compile_on_first_use
class Layer:
    def __init__(self):
        self.kernel = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is None:
            self.kernel = torch.compile(torch.nn.functional.silu)  # expect: GR404
        return self.kernel(x)


# snippet: randint_on_host
def step(x: Tensor, vocab: int) -> Tensor:
    return x + torch.randint(0, vocab, (x.shape[0],)).to(x.device)  # expect: GR501, GR104


# snippet: numpy_generator_attribute
class Sampler:
    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rng.random()  # expect: GR501


# snippet: random_choice
def step(x: Tensor) -> Tensor:
    return x * random.choice([1, 2])  # expect: GR501


# snippet: generator_reseeded
def step(x: Tensor, generator: torch.Generator, seed: int) -> Tensor:
    generator.manual_seed(seed)  # expect: GR502
    return x.exponential_(generator=generator)


# snippet: stream_synchronize
def step(x: Tensor) -> Tensor:
    torch.cuda.current_stream().synchronize()  # expect: GR601
    return x


# snippet: event_query_loop
def step(x: Tensor, copy_event) -> Tensor:
    while not copy_event.query():  # expect: GR601
        time.sleep(0.001)  # expect: GR601
    return x


# snippet: barrier
def step(x: Tensor) -> Tensor:
    dist.barrier()  # expect: GR601
    return x


# snippet: counts_as_objects
def step(x: Tensor, box: list) -> Tensor:
    dist.broadcast_object_list(box, src=0)  # expect: GR602
    return x
