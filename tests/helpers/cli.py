# SPDX-License-Identifier: Apache-2.0
"""The command line in this process, and inputs and checkpoint copies for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from trtllm_megamoe.cli.main import main

Edit = Callable[[dict[str, torch.Tensor]], None]


def invoke(*arguments: object) -> Result:
    """Call `python -m trtllm_megamoe ...` without a new process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def copy_checkpoint(source: Path, target: Path, edit: Edit) -> Path:
    """A copy of a single-file checkpoint whose tensors `edit` has changed in place."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def spread_scales(tensors: dict[str, torch.Tensor]) -> None:
    """Per-expert input scales spread 4x; gate and up `weight_scale_2` differ by a factor from 0.1 to 10."""
    experts = sorted({int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name})
    for name in tensors:
        if ".experts." not in name:
            continue
        part = int(name.split(".experts.")[1].split(".")[0]) / max(experts)
        if name.endswith("input_scale"):
            tensors[name] = tensors[name] * 4 ** (part - 0.5)
        elif name.endswith("gate_proj.weight_scale_2"):
            tensors[name] = tensors[name] * 10 ** (part - 0.5)
        elif name.endswith("up_proj.weight_scale_2"):
            tensors[name] = tensors[name] * 10 ** (0.5 - part)
