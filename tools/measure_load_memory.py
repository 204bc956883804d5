# SPDX-License-Identifier: Apache-2.0
"""Peak memory of loading and hot reloading eight synthetic layers, above the weights themselves.

    python tools/measure_load_memory.py [--device cpu|cuda] [--layout reference|sm90|sm100]

CPU memory is measured twice: by torch's allocator events (exact, every temporary included) and by the resident set.
On a GPU the allocator's peak counts. The numbers in docs/weights.md come from here; tests/cpu/test_weights_memory.py
holds the same measurements against the bound.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import click
import torch

from trtllm_megamoe.weights import host_memory
from trtllm_megamoe.weights.delivery import DeliveryOrder
from trtllm_megamoe.weights.loader import WeightLoader
from trtllm_megamoe.weights.spec import AuxFamily, LayerShape, ModuleSpec, TensorKey
from trtllm_megamoe.weights.store import WeightStore

NUM_LAYERS = 8
SHAPE = LayerShape(hidden_size=1024, intermediate_size=512, num_experts=8, top_k=2)
SPEC = ModuleSpec(SHAPE, first_expert=0, num_local_experts=8)
MIB = 1 << 20


def _keys(layer: int) -> list[tuple[int, TensorKey]]:
    keys = [*SPEC.bulk_keys()]
    for family in AuxFamily:
        keys += SPEC.family_keys(family)
    return [(layer, key) for key in sorted(keys)]


LAYER_ATOMIC = [item for layer in range(NUM_LAYERS) for item in _keys(layer)]
SUFFIX = sorted(LAYER_ATOMIC, key=lambda item: (item[1].parameter, item[0], item[1].expert))


def file_name(layer: int, key: TensorKey) -> str:
    """Name of a tensor in a file."""
    return f"model.layers.{layer}.mlp.experts.{key.name}"


def tensors(order: list[tuple[int, TensorKey]], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Deliver one fresh tensor at a time and keep none."""
    generator = torch.Generator().manual_seed(seed)
    for layer, key in order:
        size = SHAPE.tensor_shape(key.projection, key.component)
        if key.component.is_bulk:
            limit = 256 if key.component.value == "weight" else 0x7F
            tensor = torch.randint(0, limit, size, dtype=torch.uint8, generator=generator)
        else:
            tensor = torch.tensor(0.01)
        yield file_name(layer, key), tensor
        del tensor


def _mark(size: int) -> None:
    with torch.profiler.record_function(f"pages {size}"):
        pass


class AllocationMeter:
    """Peak CPU allocations inside the block, relative to its start: torch's allocator and the loader's own pages."""

    def __enter__(self) -> AllocationMeter:
        gc.collect()
        self._original = host_memory.map_anonymous

        def counted(size: int) -> mmap.mmap:
            pages = self._original(size)
            _mark(size)
            weakref.finalize(pages, _mark, -size)
            return pages

        host_memory.map_anonymous = counted
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.collect()
        host_memory.map_anonymous = self._original
        self._profiler.__exit__(kind, error, trace)
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        memory = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        marks = [(event.start_ns(), event.name().split()) for event in events if event.name().startswith("pages ")]
        memory = sorted(memory + [(start, int(words[1])) for start, words in marks])
        live = self.peak_bytes = 0
        for _, size in memory:
            live += size
            self.peak_bytes = max(self.peak_bytes, live)
        self.end_bytes = live


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


class ResidentMeter:
    """Peak growth of the resident set inside the block (Linux)."""

    def __enter__(self) -> ResidentMeter:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # restarts the high-water mark
        self._start = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = _resident("VmHWM") - self._start


class CudaMeter:
    """Peak of the CUDA allocator inside the block, relative to its start."""

    def __enter__(self) -> CudaMeter:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._start = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.peak_bytes = torch.cuda.max_memory_allocated() - self._start


Meter = AllocationMeter | ResidentMeter | CudaMeter


@dataclass(frozen=True)
class Case:
    """One way of loading."""

    name: str
    reload: bool
    order: list[tuple[int, TensorKey]]
    spill: bool = False


CASES = (
    Case("first load, layer by layer", False, LAYER_ATOMIC),
    Case("reload, layer by layer", True, LAYER_ATOMIC),
    Case("reload, suffix order, staged in memory", True, SUFFIX),
    Case("reload, suffix order, staged on disk", True, SUFFIX, spill=True),
)


def steady_bytes(stores: dict[int, WeightStore]) -> int:
    """Bytes of the weights themselves."""
    return sum(t.nbytes for store in stores.values() for t in (*store.packed.values(), *store.alphas.values()))


def chunk_bytes(layout: str, device: str, meter: Callable[[], Meter]) -> int:
    """Peak of packing one expert, its sources on the device included: the packing chunk."""
    from trtllm_megamoe.weights.layout_base import BULK_FIELDS, ExpertBulk
    from trtllm_megamoe.weights.layouts import allocate_packed, get_layout

    sizes = [SHAPE.tensor_shape(*what) for what in BULK_FIELDS.values()]
    target = allocate_packed(get_layout(layout), SHAPE, 1, torch.device(device))
    host = ExpertBulk(*(torch.zeros((1, *size), dtype=torch.uint8) for size in sizes))
    for _ in range(2):  # the first call also makes lookup tables, which stay
        with meter() as measured:
            get_layout(layout).pack(host.to(torch.device(device)), target)
    return measured.peak_bytes + (SHAPE.expert_bytes if device == "cpu" else 0)  # on the CPU `to` copied nothing


def growth(case: Case, layout: str, device: str, meter: Callable[[], Meter]) -> int:
    """Peak bytes above the steady set while one case runs."""
    stores = {n: WeightStore(SPEC, layout=layout, device=device, layer=n) for n in range(NUM_LAYERS)}
    loader = WeightLoader(stores)
    if case.reload:
        with loader.open(order=DeliveryOrder.LAYER) as window:
            window.deliver(tensors(LAYER_ATOMIC, seed=1))
    order = DeliveryOrder.LAYER if case.order is LAYER_ATOMIC else DeliveryOrder.ANY
    with tempfile.TemporaryDirectory() as directory, meter() as measured:
        with loader.open(order=order, spill_directory=Path(directory) if case.spill else None) as window:
            window.deliver(tensors(case.order, seed=2))
        del window
    counts_weights = not case.reload and (device == "cpu" or meter is CudaMeter)
    return measured.peak_bytes - (steady_bytes(stores) if counts_weights else 0)


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--layout", type=click.Choice(["reference", "sm90", "sm100"]), default="reference", show_default=True)
def main(device: str, layout: str) -> None:
    """Print the table of docs/weights.md for one device and layout."""
    layer = SPEC.source_bytes
    meters: dict[str, Callable[[], Meter]] = {"allocator": CudaMeter if device == "cuda" else AllocationMeter}
    meters["resident set"] = ResidentMeter
    click.echo(f"{NUM_LAYERS} layers, device {device}, layout {layout}; one layer of sources {layer / MIB:.2f} MiB")
    click.echo(f"packing chunk {chunk_bytes(layout, device, meters['allocator']) / MIB:.2f} MiB")
    for case in CASES:
        numbers = {name: growth(case, layout, device, meter) for name, meter in meters.items()}
        text = ", ".join(f"{name} {size / MIB:8.2f} MiB = {size / layer:5.2f} layers" for name, size in numbers.items())
        click.echo(f"{case.name:40} {text}")


if __name__ == "__main__":
    main()
