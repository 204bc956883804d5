# SPDX-License-Identifier: Apache-2.0
"""Near misses: control flow, resources, random numbers, synchronisation and formatting that are fine."""
import logging

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

logger = logging.getLogger(__name__)


# snippet: optional_tensor
def step(x: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return x
    return x + bias


# snippet: branch_on_shape_and_dtype
def step(x: Tensor, wide: bool) -> Tensor:
    if x.dtype == torch.bfloat16 and x.shape[0] % 8 == 0 and not wide:
        return x * 2
    return x if x.is_contiguous() else x.contiguous()


# snippet: bucket_choice
class Runner:
    def __init__(self, buckets: list[int]):
        self.buckets = buckets

    def forward(self, x: Tensor) -> int:
        for bucket in self.buckets:
            if x.shape[0] <= bucket:
                return bucket
        raise ValueError(f"{x.shape[0]} tokens exceed {self.buckets[-1]}")


# snippet: loop_over_layers
class Model(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index % 2 else x + layer(x)
        return x


# snippet: loop_over_unbound_slices
def step(x: Tensor) -> Tensor:
    total = x[0]
    for row in x.unbind(0):
        total = total + row
    return total


# snippet: eager_only_block
def step(x: Tensor) -> Tensor:
    if not torch.cuda.is_current_stream_capturing():
        logger.debug("norm %s", x.norm().item())
    return x + 1


# snippet: early_exit_while_capturing
def step(x: Tensor) -> Tensor:
    y = x + 1
    if torch.cuda.is_current_stream_capturing():
        return y
    if y.isnan().any():
        torch.cuda.synchronize()
    return y


# snippet: error_path_formats
def step(x: Tensor, cap: int) -> Tensor:
    if x.shape[0] > cap:
        logger.error("too many tokens: %s", x)
        raise ValueError(f"{x} has more than {cap} rows")
    return x


# snippet: handler_reads
def step(x: Tensor, kernel) -> Tensor:
    try:
        return kernel(x)
    except RuntimeError as err:
        raise RuntimeError(f"kernel failed on {x.cpu()}") from err


# snippet: device_side_boundary
class Compressor:
    def __init__(self, ratio: int, slots: int, device):
        self.ratio = ratio
        self.slots = slots
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(slots + 1, 8, device=device)

    def forward(self, pooled: Tensor) -> Tensor:
        boundary = (self.position + 1) % self.ratio == 0
        slot = torch.where(boundary, self.position // self.ratio, self.slots)
        self.out.index_copy_(0, slot, pooled)
        self.position += 1
        return self.out


# snippet: unread_statistics
class Layer:
    def __init__(self):
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


# snippet: empty_input_without_collective
def step(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return x
    return x.softmax(-1)


# snippet: collective_on_zero_rows
def step(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    if x.shape[0] == 0:
        return x
    return x * 2


# snippet: membership_of_host_values
def step(x: Tensor, layer: int, skipped: set[int]) -> Tensor:
    if layer in skipped or "float8" in str(x.dtype):
        return x
    return x * 2


# snippet: device_membership
def step(tokens: Tensor, stops: Tensor) -> Tensor:
    return torch.isin(tokens, stops)


# snippet: streams_ordered_on_device
class Overlap:
    def __init__(self):
        self.side = torch.cuda.Stream()
        self.ready = torch.cuda.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.ready.record()
        self.side.wait_event(self.ready)
        with torch.cuda.stream(self.side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(self.side)
        return y


# snippet: waits_for_collective_on_stream
def step(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


# snippet: device_noise
class Sampler:
    def __init__(self, vocab: int, device):
        self.noise = torch.empty(4, vocab, device=device)

    def forward(self, logits: Tensor) -> Tensor:
        self.noise.exponential_()
        return (logits.softmax(-1) / self.noise).argmax(-1)


# snippet: host_sum_of_shapes
def step(parts: list[Tensor], widths: list[int]) -> Tensor:
    rows = sum(part.shape[0] for part in parts) + max(widths)
    return torch.cat(parts) * rows


# snippet: builtin_sum_of_tensors
def step(experts: list[Tensor]) -> Tensor:
    return sum(expert * 2 for expert in experts)


# snippet: text_of_shapes
def step(x: Tensor) -> Tensor:
    logger.info("tokens %d of %s", x.shape[0], x.dtype)
    name = f"{x.shape}-{x.device}-{len(x)}"
    assert x.shape[1] == 8, f"hidden size of {x} in {name}"
    return x


# snippet: einops_with_host_axes
def step(x: Tensor, heads: int) -> Tensor:
    return rearrange(x, "t (h d) -> t h d", h=heads, d=x.shape[-1] // heads)


# snippet: index_by_host_number
def step(x: Tensor, layer: int, scales: list[float]) -> Tensor:
    return x[layer] * scales[layer]


# snippet: sparse_but_tensor_valued
def step(x: Tensor, y: Tensor) -> Tensor:
    inverse, _info = torch.linalg.inv_ex(x)
    return inverse * torch.eq(x, y)


# snippet: allowed_with_reason
def step(tokens: Tensor) -> list[int]:
    return tokens.tolist()  # graph-ok[GR101]: detokenisation, after the last region of the step


# snippet: allowed_above_the_line
def step(tokens: Tensor) -> Tensor:
    # graph-ok[GR101, GR102]: the scheduler's one read of the step
    host = tokens.cpu()
    return host


# snippet: whole_function_allowed
def _report(x: Tensor) -> None:  # graph-ok: diagnostics, runs once in a thousand steps outside the graph
    print(x.mean().item())


def step(x: Tensor) -> Tensor:
    _report(x)
    return x + 1


# snippet: narrowed_to_a_number
def step(x: Tensor, scale) -> Tensor:
    if isinstance(scale, float):
        return x * round(scale, 3)
    return x * scale


# snippet: table_of_mixed_rows
def step(x: Tensor, ids: Tensor) -> Tensor:
    for name, tensor, dtypes in (("x", x, (torch.bfloat16,)), ("ids", ids, (torch.int32, torch.int64))):
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}")
    return x


# snippet: record_of_mixed_fields
def step(x: Tensor) -> Tensor:
    context = {"ids": x, "first_pass": True}
    if context["first_pass"]:
        return context["ids"] * 2
    return x


# snippet: attribute_narrowed_to_a_number
class Window:
    def __init__(self, length: int | Tensor):
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.length, int):
            return x[: self.length]
        return x.masked_fill(x > self.length, 0.0)


# snippet: module_named_like_a_method
class Block:
    def __init__(self, moe):
        self.moe = moe

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.moe.topk(x, logits)


# snippet: class_methods_and_unbound_calls
class Base:
    @classmethod
    def pick(cls, x: Tensor) -> Tensor:
        return x if cls.is_wide() else -x

    def scale(self, x: Tensor, factor: int) -> Tensor:
        return x * range(factor)[-1]


class Step(Base):
    def forward(self, x: Tensor) -> Tensor:
        return Base.scale(self, self.pick(x), 3)


# snippet: host_counter_chooses_a_graph
class Runner:
    def __init__(self, graphs: list):
        self.graphs = graphs
        self.step_count = 0

    def run(self) -> None:
        self.step_count += 1
        self.graphs[self.step_count % 2].replay()


# snippet: assert_on_the_device
def step(x: Tensor) -> Tensor:
    torch._assert_async((x >= 0).all())
    return x


# snippet: entry_written_from_other_entries
class Layers:
    def __init__(self, device):
        self.slots = [torch.zeros(8, 4, device=device) for _ in range(3)]

    def forward(self, layer: int, value: Tensor) -> Tensor:
        joined = {0: value}
        joined[0] = torch.cat((joined[0], value), dim=0)
        self.slots[layer][:4] = torch.cat((value[:2], value[:2]), dim=0)
        return joined[0]
