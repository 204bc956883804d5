# SPDX-License-Identifier: Apache-2.0
"""Loading speed against a plain read and copy of the same bytes.

    python tools/bench_load_speed.py DIRECTORY [--device cpu|cuda] [--layout reference|sm90|sm100] [--layers 8]

Writes one EP8 rank's experts of a DeepSeek-V4-Flash shaped checkpoint to DIRECTORY (450 MB a layer), unless they are
there, then times, median of several rounds in turn, files in the page cache: reading all bytes and copying them to the
device in 16 MB pieces; and loading the same experts, checked, packed and ready. A benchmark, not a test.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from trtllm_megamoe.presets import get_preset
from trtllm_megamoe.weights.checkpoint import Checkpoint
from trtllm_megamoe.weights.delivery import DeliveryOrder
from trtllm_megamoe.weights.loader import WeightLoader
from trtllm_megamoe.weights.spec import AuxFamily, Component, LayerShape, ModuleSpec
from trtllm_megamoe.weights.store import WeightStore

MODEL = get_preset("deepseek-v4-flash")
SHAPE = LayerShape(MODEL.hidden_size, MODEL.intermediate_size, MODEL.num_experts, MODEL.top_k)
SPEC = ModuleSpec(SHAPE, first_expert=0, num_local_experts=SHAPE.num_experts // 8)
PIECE_BYTES = 16 << 20


def write_checkpoint(directory: Path, layers: int) -> None:
    """One file a layer: rank 0's experts, and every expert's gate and up input scale."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [MODEL.architecture], "hidden_size": SHAPE.hidden_size, "num_hidden_layers": layers,
        "moe_intermediate_size": SHAPE.intermediate_size, "n_routed_experts": SHAPE.num_experts,
        "num_experts_per_tok": SHAPE.top_k,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    quant = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (directory / "hf_quant_config.json").write_text(json.dumps(quant))
    keys = [*SPEC.bulk_keys(), *(key for family in AuxFamily for key in SPEC.family_keys(family))]
    weight_map = {}
    for layer in range(layers):
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        names = {f"layers.{layer}.ffn.experts.{key.name}": key for key in sorted(keys)}
        weight_map.update(dict.fromkeys(names, file))
        if (directory / file).exists():
            continue
        tensors = {}
        for name, key in names.items():
            size = SHAPE.tensor_shape(key.projection, key.component)
            if key.component is Component.CODES:
                tensors[name] = torch.randint(0, 256, size, dtype=torch.uint8)
            elif key.component is Component.BLOCK_SCALES:
                tensors[name] = torch.randint(0, 0x7F, size, dtype=torch.uint8).view(torch.float8_e4m3fn)
            else:
                tensors[name] = torch.tensor(0.01)
        save_file(tensors, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def plain(directory: Path, device: str, layers: int) -> int:
    """Read every file of a checkpoint of so many layers and copy it to the device; returns the bytes."""
    total = 0
    piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    view = memoryview(piece.numpy())
    for path in sorted(directory.glob(f"*-of-{layers:05d}.safetensors")):
        target = torch.empty(path.stat().st_size, dtype=torch.uint8, device=device)
        with path.open("rb", buffering=0) as file:
            done = 0
            while count := file.readinto(view):
                target[done : done + count].copy_(piece[:count])
                done += count
        total += done
        if device == "cuda":
            torch.cuda.synchronize()
    return total


def load(directory: Path, device: str, stores: dict[int, WeightStore]) -> None:
    """Open the checkpoint and load (or reload) all layers."""
    checkpoint = Checkpoint.open(directory)
    with WeightLoader(stores).open(order=DeliveryOrder.LAYER) as window:
        for layer in checkpoint.moe_layers:
            window.deliver(checkpoint.iter_layer(layer, SPEC.local_experts), hand_over=True)
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def environment(device: str) -> dict[str, str | int | None]:
    """Where and with what the numbers were made."""
    is_cuda = device == "cuda"
    return {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if is_cuda else "CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
    }


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--layout", type=click.Choice(["reference", "sm90", "sm100"]), default="reference", show_default=True)
@click.option("--layers", type=int, default=8, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write every round's time there.")
def main(directory: Path, device: str, layout: str, layers: int, rounds: int, json_path: Path | None) -> None:
    """Print the speeds and their ratios to the plain one."""
    write_checkpoint(directory, layers)
    total = plain(directory, device, layers)  # also fills the page cache

    def new_stores() -> dict[int, WeightStore]:
        return {n: WeightStore(SPEC, layout=layout, device=device, layer=n) for n in range(layers)}

    stores = new_stores()
    load(directory, device, stores)
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: plain(directory, device, layers),
        "first load": lambda: load(directory, device, new_stores()),
        "reload": lambda: load(directory, device, stores),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds_of(run))
    median = {name: statistics.median(each) for name, each in times.items()}
    click.echo(f"{total / 1e9:.2f} GB, {layers} layers, device {device}, layout {layout}, {os.cpu_count()} cores")
    for name, seconds in median.items():
        ratio = f"{median['plain'] / seconds:.2f} of plain"
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f} s"
        click.echo(f"{name:10} {seconds:6.2f} s ({spread}) = {total / seconds / 1e9:5.2f} GB/s = {ratio}")
    if json_path is not None:
        report = {
            "command": " ".join(("tools/bench_load_speed.py", *sys.argv[1:])), "environment": environment(device),
            "bytes": total, "layers": layers, "layout": layout, "seconds": times,
            "of_plain": {name: median["plain"] / seconds for name, seconds in median.items()},
        }  # fmt: skip
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
