# SPDX-License-Identifier: Apache-2.0
"""The catalogue: every rule of the static method with its reason, its cure, and a pair of examples that are tested.

Text only. The order is the order of the checklist in docs/cuda-graphs.md.
"""

from __future__ import annotations

from textwrap import dedent

from trtllm_megamoe.graph.static.findings import Family, Level, Rule

_IMPORTS = "import torch\nfrom torch import Tensor\n\n"


def _rule(
    id: str, name: str, family: Family, level: Level, *, what: str, why: str, instead: str, example: str, near_miss: str
) -> Rule:
    return Rule(
        id,
        name,
        family,
        level,
        what,
        why,
        instead,
        _IMPORTS + dedent(example).lstrip(),
        _IMPORTS + dedent(near_miss).lstrip(),
    )


_CATALOGUE = (
    _rule(
        "GR001", "comment-without-reason", Family.HYGIENE, Level.ERROR,
        what="A `graph-ok` comment without a reason, or for a rule that does not exist.",
        why="An allow-list nobody can question grows until it hides a real stall.",
        instead="Write `# graph-ok[GR101]: why this is fine here`.",
        example="""
            def step(x: Tensor) -> Tensor:
                return x + 1  # graph-ok
            """,
        near_miss="""
            def step(x: Tensor) -> int:
                return x.sum().item()  # graph-ok[GR101]: end of the batch, outside every captured region
            """,
    ),
    _rule(
        "GR002", "comment-allows-nothing", Family.HYGIENE, Level.WARNING,
        what="A `graph-ok` comment on a line that breaks no rule.",
        why="Stale comments would silently allow the next fault on that line.",
        instead="Delete the comment.",
        example="""
            def step(x: Tensor) -> Tensor:
                return x + 1  # graph-ok[GR101]: used to read the length here
            """,
        near_miss="""
            def step(x: Tensor) -> Tensor:
                # graph-ok[GR401]: allocates from the graph's own pool, measured
                return torch.zeros_like(x) + x
            """,
    ),
    _rule(
        "GR101", "host-read", Family.TRANSFER, Level.ERROR,
        what="`.item()`, `.tolist()`, `.numpy()`, `np.asarray(t)`, `torch.tensor([t0, t1])` on device values.",
        why="The host waits until the GPU has caught up; during capture it is an error.",
        instead="Keep the value on the device; read it once after the step, through a pinned buffer and an event.",
        example="""
            def step(lengths: Tensor) -> int:
                return lengths.max().item()
            """,
        near_miss="""
            def step(x: Tensor, longest: int) -> Tensor:
                return x * (longest / x.shape[0])
            """,
    ),
    _rule(
        "GR102", "device-to-host-copy", Family.TRANSFER, Level.ERROR,
        what="`.cpu()`, `.to('cpu')`, or `copy_` of a device tensor into host memory that is pageable or blocking.",
        why="The copy ends with a wait for the stream; capture fails.",
        instead="`pinned.copy_(t, non_blocking=True)` into a buffer allocated once, read after an event.",
        example="""
            def step(logits: Tensor) -> Tensor:
                return logits.cpu()
            """,
        near_miss="""
            def step(logits: Tensor, pinned_logits: Tensor) -> None:
                pinned_logits.copy_(logits, non_blocking=True)
            """,
    ),
    _rule(
        "GR103", "host-cast", Family.TRANSFER, Level.ERROR,
        what="`int(t)`, `float(t)`, `bool(t)`, `math.sqrt(t)` on device values.",
        why="A cast is `.item()` in disguise.",
        instead="Use tensor arithmetic, or a host integer known before the step.",
        example="""
            def step(lengths: Tensor) -> int:
                return int(lengths.max())
            """,
        near_miss="""
            def step(x: Tensor) -> Tensor:
                return x * float(x.shape[-1]) ** -0.5
            """,
    ),
    _rule(
        "GR104", "host-to-device-copy", Family.TRANSFER, Level.ERROR,
        what="Pageable host data moved to the device: `.cuda()`, `.to(device)`, `torch.tensor(..., device=)`, `copy_`.",
        why="Copies from pageable memory block the host; in a graph the source is frozen or already freed.",
        instead="Stage through a pinned buffer: `static.copy_(pinned, non_blocking=True)` before the replay.",
        example="""
            def step(x: Tensor, ids: list[int]) -> Tensor:
                return x[torch.tensor(ids, device=x.device)]
            """,
        near_miss="""
            def step(static_ids: Tensor, pinned_ids: Tensor) -> None:
                static_ids.copy_(pinned_ids, non_blocking=True)
            """,
    ),
    _rule(
        "GR201", "branch", Family.CONTROL, Level.ERROR,
        what="`if`, `while`, `and`, `or`, `not`, `match`, chained comparison or filter on a device value.",
        why="The host must read the value to choose; a captured graph keeps the branch of the capture for ever.",
        instead="Compute both sides and select with `torch.where`, or mask the write.",
        example="""
            def step(x: Tensor) -> Tensor:
                if x.isnan().any():
                    x = x.nan_to_num()
                return x
            """,
        near_miss="""
            def step(x: Tensor, bias: Tensor | None) -> Tensor:
                if bias is not None and x.shape[0] > 1:
                    x = x + bias
                return torch.where(x.isnan(), 0.0, x)
            """,
    ),
    _rule(
        "GR202", "loop", Family.CONTROL, Level.ERROR,
        what="A Python loop over a device tensor, or a loop bound that is one.",
        why="The trip count is read or frozen, and every element costs launches.",
        instead="One batched operation over the whole tensor, masked to the live rows.",
        example="""
            def step(x: Tensor, num_live: Tensor) -> Tensor:
                for row in range(num_live):
                    x[row] += 1
                return x
            """,
        near_miss="""
            def step(x: Tensor) -> Tensor:
                out = x
                for layer in range(x.shape[0]):
                    out = out + layer
                for part in x.chunk(2):
                    out = out + part.sum()
                return out
            """,
    ),
    _rule(
        "GR203", "membership", Family.CONTROL, Level.ERROR,
        what="`token in stop_ids`, `value in tensor`, `list.index(t)` with device values.",
        why="Python compares element by element and reads each answer.",
        instead="`(t.unsqueeze(-1) == table).any(-1)`; `torch.isin` for small tables (large ones sort).",
        example="""
            def step(token: Tensor, stop_ids: list[int]) -> bool:
                return token in stop_ids
            """,
        near_miss="""
            def step(token: Tensor, stop_ids: Tensor, name: str) -> Tensor:
                if name in ("greedy", "sample"):
                    return torch.isin(token, stop_ids)
                return token
            """,
    ),
    _rule(
        "GR204", "host-state", Family.CONTROL, Level.ERROR,
        what="A Python counter or flag that the step itself changes and reads.",
        why="Python does not run at replay: the graph keeps the value of the capture, without any message.",
        instead="Keep the counter in a device tensor and advance it in place.",
        example="""
            class Compressor:
                def __init__(self):
                    self.step_count = 0

                def forward(self, x: Tensor) -> Tensor:
                    self.step_count += 1
                    return x * (self.step_count % 4)
            """,
        near_miss="""
            class Compressor:
                def __init__(self):
                    self.position = torch.zeros(1, dtype=torch.int64)
                    self.calls = 0

                def forward(self, x: Tensor) -> Tensor:
                    self.calls += 1
                    self.position += 1
                    return x * (self.position % 4)
            """,
    ),
    _rule(
        "GR205", "zero-token-shortcut", Family.CONTROL, Level.ERROR,
        what="An early return for zero tokens in front of a collective.",
        why="Peers wait in the collective for the rank that left; the job hangs.",
        instead="Launch with zero rows: every rank takes part in every step.",
        example="""
            def step(x: Tensor, group) -> Tensor:
                if x.shape[0] == 0:
                    return x
                torch.distributed.all_reduce(x, group=group)
                return x
            """,
        near_miss="""
            def step(x: Tensor, out: Tensor) -> Tensor:
                if x.shape[0] == 0:
                    return out
                return torch.add(x, 1, out=out)
            """,
    ),
    _rule(
        "GR301", "data-dependent-shape", Family.SHAPE, Level.ERROR,
        what="`nonzero`, `unique`, `masked_select`, `where(c)`, `bincount`, unsized `one_hot`.",
        why="The host must learn the size to allocate the result.",
        instead="Fixed-size forms: masks, `topk`, `scatter_add`, `nonzero_static`, `output_size=`, `num_classes=`.",
        example="""
            def step(x: Tensor, mask: Tensor) -> Tensor:
                return torch.nonzero(mask)
            """,
        near_miss="""
            def step(x: Tensor, mask: Tensor, repeats: Tensor) -> Tensor:
                y = torch.where(mask, x, 0.0)
                return torch.repeat_interleave(y, repeats, output_size=64)
            """,
    ),
    _rule(
        "GR302", "boolean-index", Family.SHAPE, Level.ERROR,
        what="Indexing with a boolean device mask (reading, or writing a tensor).",
        why="It is `nonzero` inside: the number of rows is read by the host.",
        instead="`torch.where(mask, a, b)`, or an index tensor of fixed length with masked entries.",
        example="""
            def step(x: Tensor, scores: Tensor) -> Tensor:
                return x[scores > 0]
            """,
        near_miss="""
            def step(x: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
                x[scores > 0] = 0.0
                return x[rows]
            """,
    ),
    _rule(
        "GR303", "device-value-as-size", Family.SHAPE, Level.ERROR,
        what="A device value as slice bound, size, count or fill: `x[:n]`, `x.view(n, -1)`, `torch.arange(n)`.",
        why="Sizes are host integers; the conversion reads the device.",
        instead="Use the bucket's fixed size and mask the rest with a device comparison.",
        example="""
            def step(x: Tensor, lengths: Tensor) -> Tensor:
                return x[: lengths.max()]
            """,
        near_miss="""
            def step(x: Tensor, lengths: Tensor, bucket: int) -> Tensor:
                return x[:bucket].view(bucket, -1).masked_fill(lengths.unsqueeze(1) < 1, 0.0)
            """,
    ),
    _rule(
        "GR401", "allocation", Family.ALLOCATION, Level.WARNING,
        what="Factories in the step: `torch.empty`, `zeros`, `arange`, `*_like`, `new_*`, `clone`, NumPy arrays.",
        why="Costs host time at every step; outside a graph's pool it moves addresses that a graph has baked in.",
        instead="Allocate once for the largest bucket; write with `out=`, `copy_`, `zero_`.",
        example="""
            def step(x: Tensor) -> Tensor:
                out = torch.empty(4, 8, device=x.device)
                return torch.add(x, 1, out=out)
            """,
        near_miss="""
            class Layer:
                def __init__(self, device):
                    self.out = torch.empty(4, 8, device=device)

                def forward(self, x: Tensor) -> Tensor:
                    self.out.zero_()
                    return torch.add(x, 1, out=self.out)
            """,
    ),
    _rule(
        "GR402", "growing-state", Family.ALLOCATION, Level.ERROR,
        what="State that grows at every step: `self.keys = torch.cat((self.keys, k))`, `self.history.append(t)`.",
        why="Shape and address change each step; a replay writes to the captured ones.",
        instead="A fixed-size cache or ring, written at a device-side position.",
        example="""
            class Cache:
                def forward(self, key: Tensor) -> Tensor:
                    self.keys = torch.cat((self.keys, key), dim=0)
                    return self.keys
            """,
        near_miss="""
            class Cache:
                def forward(self, key: Tensor, position: Tensor) -> Tensor:
                    self.keys.index_copy_(0, position, key)
                    parts = []
                    parts.append(key)
                    return torch.cat(parts)
            """,
    ),
    _rule(
        "GR403", "resource-creation", Family.ALLOCATION, Level.WARNING,
        what="Streams, events, generators, graphs or pinned memory created in the step.",
        why="Driver calls that may synchronise, and objects that a captured graph cannot own.",
        instead="Create them once, at start-up.",
        example="""
            def step(x: Tensor) -> Tensor:
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    return x + 1
            """,
        near_miss="""
            def step(x: Tensor, side: torch.cuda.Stream) -> Tensor:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    y = x + 1
                torch.cuda.current_stream().wait_stream(side)
                return y
            """,
    ),
    _rule(
        "GR404", "compile-in-step", Family.ALLOCATION, Level.ERROR,
        what="Compilation or module loading in the step: `torch.compile`, `cute.compile`, `load_inline`, tracing.",
        why="Seconds on the hot path, and module loading fails under capture.",
        instead="Compile every bucket during warm-up; look the result up in the step.",
        example="""
            def step(x: Tensor) -> Tensor:
                kernel = torch.compile(torch.relu)
                return kernel(x)
            """,
        near_miss="""
            KERNEL = torch.compile(torch.relu)

            def step(x: Tensor) -> Tensor:
                return KERNEL(x)
            """,
    ),
    _rule(
        "GR501", "host-random", Family.RNG, Level.ERROR,
        what="`random`, `numpy.random`, `secrets`, or `torch.rand(...)` without a device.",
        why="The number is drawn once, at capture, and then repeated by every replay.",
        instead="Draw on the device: `buffer.exponential_(generator=...)`, or a hash of seed and position.",
        example="""
            import random

            def step(x: Tensor) -> Tensor:
                return x * random.random()
            """,
        near_miss="""
            def step(x: Tensor, noise: Tensor) -> Tensor:
                noise.exponential_()
                return (x - noise.log()).argmax(-1)
            """,
    ),
    _rule(
        "GR502", "reseed", Family.RNG, Level.ERROR,
        what="Seeding or reading generator state in the step.",
        why="Not allowed under capture, and every replay would draw the same numbers.",
        instead="Seed once; let the registered generator advance, or derive noise from (seed, position).",
        example="""
            def step(x: Tensor, seed: int) -> Tensor:
                torch.manual_seed(seed)
                return torch.nn.functional.dropout(x)
            """,
        near_miss="""
            def step(x: Tensor) -> Tensor:
                return torch.nn.functional.dropout(x, p=0.1)
            """,
    ),
    _rule(
        "GR601", "synchronise", Family.SYNC, Level.ERROR,
        what="`synchronize()`, event or stream `query()`, `elapsed_time`, `barrier`, `empty_cache`, `time.sleep`.",
        why="The host waits; most of them are illegal under capture.",
        instead="Order work on the device: `wait_stream`, `wait_event`, `record`.",
        example="""
            def step(x: Tensor) -> Tensor:
                y = x + 1
                torch.cuda.synchronize()
                return y
            """,
        near_miss="""
            def step(x: Tensor, side: torch.cuda.Stream, event: torch.cuda.Event) -> Tensor:
                event.record()
                side.wait_event(event)
                return x + 1
            """,
    ),
    _rule(
        "GR602", "object-collective", Family.SYNC, Level.ERROR,
        what="`all_gather_object`, `broadcast_object_list` and their like.",
        why="Pickles on the host and copies sizes back and forth.",
        instead="A tensor collective over a fixed-size buffer.",
        example="""
            import torch.distributed as dist

            def step(x: Tensor, sizes: list) -> Tensor:
                dist.all_gather_object(sizes, x.shape[0])
                return x
            """,
        near_miss="""
            import torch.distributed as dist

            def step(x: Tensor, gathered: Tensor) -> Tensor:
                dist.all_gather_into_tensor(gathered, x)
                return gathered
            """,
    ),
    _rule(
        "GR701", "builtin-reduction", Family.SNEAKY, Level.ERROR,
        what="Python's `sum`, `min`, `max`, `any`, `all`, `sorted` over device values.",
        why="They walk the tensor element by element and compare on the host.",
        instead="The tensor method: `t.sum()`, `torch.maximum`, `t.any()`, `torch.sort`.",
        example="""
            def step(x: Tensor) -> Tensor:
                return x / max(x.abs().amax(), 1e-6)
            """,
        near_miss="""
            def step(x: Tensor, parts: list[Tensor]) -> Tensor:
                rows = max(x.shape[0], 1)
                return sum(parts) / rows + x.amax().clamp(min=1e-6)
            """,
    ),
    _rule(
        "GR702", "formatting", Family.SNEAKY, Level.ERROR,
        what="A device value in an f-string, `str`, `repr`, `format`, `%` or `print`.",
        why="Formatting reads the values.",
        instead="Format shapes and host numbers; print tensors after the step.",
        example="""
            def step(x: Tensor) -> str:
                return f"largest {x.amax()}"
            """,
        near_miss="""
            def step(x: Tensor, out: Tensor) -> str:
                if x.shape != out.shape:
                    raise ValueError(f"x {x} does not fit {out.shape}")
                return f"shape {tuple(x.shape)} on {x.device}"
            """,
    ),
    _rule(
        "GR703", "logging", Family.SNEAKY, Level.ERROR,
        what="A device value handed to a logger, `warnings.warn` or a metric.",
        why="It is formatted (and read) whenever the level is enabled.",
        instead="Log host facts; collect device statistics in a buffer that a monitor reads later.",
        example="""
            import logging

            logger = logging.getLogger(__name__)

            def step(x: Tensor) -> Tensor:
                logger.debug("norm %s", x.norm())
                return x
            """,
        near_miss="""
            import logging

            logger = logging.getLogger(__name__)

            def step(x: Tensor) -> Tensor:
                logger.debug("tokens %d", x.shape[0])
                return x
            """,
    ),
    _rule(
        "GR704", "assert", Family.SNEAKY, Level.ERROR,
        what="`assert` on a device value.",
        why="An assert is a branch: it reads the value.",
        instead="`torch._assert_async`, or check in a debug pass outside the step.",
        example="""
            def step(x: Tensor) -> Tensor:
                assert (x >= 0).all(), "negative"
                return x
            """,
        near_miss="""
            def step(x: Tensor) -> Tensor:
                assert x.dim() == 2 and x.is_contiguous(), f"bad layout {x}"
                return x
            """,
    ),
    _rule(
        "GR705", "einops-dimension", Family.SNEAKY, Level.ERROR,
        what="An einops axis length taken from a device value.",
        why="Axis lengths are host integers; passing a tensor reads it.",
        instead="Take the length from a shape or from the bucket.",
        example="""
            from einops import rearrange

            def step(x: Tensor, batch: Tensor) -> Tensor:
                return rearrange(x, "(b t) h -> b t h", b=batch.max().item())
            """,
        near_miss="""
            from einops import rearrange

            def step(x: Tensor, batch: int) -> Tensor:
                return rearrange(x, "(b t) h -> b t h", b=batch)
            """,
    ),
    _rule(
        "GR706", "index-read", Family.SNEAKY, Level.ERROR,
        what="Indexing by `.item()`, by a 0-dimensional device tensor, or a Python container by a device value.",
        why="Each of them turns the index into a host integer first.",
        instead="`index_select`, `gather` or `take_along_dim` with a tensor of at least one dimension.",
        example="""
            def step(x: Tensor, scores: Tensor) -> Tensor:
                return x[scores.argmax()]
            """,
        near_miss="""
            def step(x: Tensor, scores: Tensor) -> Tensor:
                best = scores.argmax(dim=-1, keepdim=True)
                return x.gather(-1, best) + x[:, 0]
            """,
    ),
    _rule(
        "GR707", "implicit-read", Family.SNEAKY, Level.ERROR,
        what="Calls that answer on the host: `torch.equal`, `allclose`, checked `torch.linalg`, NumPy, `deepcopy`.",
        why="They return a Python value, or look at the result for errors.",
        instead="`torch.eq`, `isclose`, the `_ex` forms of `torch.linalg`; keep serialisation out of the step.",
        example="""
            def step(x: Tensor, y: Tensor) -> Tensor:
                same = torch.equal(x, y)
                return x if same else y
            """,
        near_miss="""
            def step(x: Tensor, y: Tensor) -> Tensor:
                return torch.where(torch.isclose(x, y), x, y)
            """,
    ),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.id: rule for rule in _CATALOGUE}
