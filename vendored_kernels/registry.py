# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: what identifies one, where it lies, how it is loaded. Works without the DSL.

An object is `<key>.so` beside `<key>.json` (its facts). The key is a hash of the kernel sources, the DSL version they
are pinned to, the architecture, the layer and the tile configuration, so a stale object is never found.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from .common.layer import LayerSpec

DSL_VERSION = "4.8.1"
"""nvidia-cutlass-dsl version that the kernels are compiled, checked and measured with."""

_SHARED_SOURCES = ("ptx.py", "compile_one.py", "launch.py", "timeline.py", "common")
_HOPPER_SOURCES = (*_SHARED_SOURCES, "sm90")
_BLACKWELL_SOURCES = (*_SHARED_SOURCES, "sm100")
_SOURCES = {"sm_90a": _HOPPER_SOURCES, "sm_100a": _BLACKWELL_SOURCES, "sm_103a": _BLACKWELL_SOURCES}
ARCHITECTURES = tuple(_SOURCES)
"""GPU targets. Blackwell kernels (sm_100a, sm_103a) have never run on hardware."""


class Tile(Protocol):
    """A tile configuration of any family."""

    @property
    def name(self) -> str:
        """What users and caches call it."""


class KernelConfig(Protocol):
    """One compiled kernel of any family (`sm90.config`, `sm100.config`)."""

    @property
    def layer(self) -> LayerSpec:
        """The layer."""

    @property
    def tile(self) -> Tile:
        """How the work is cut."""

    def facts(self) -> dict[str, Any]:
        """Everything that distinguishes one kernel from another, JSON-ready."""


class KernelNotCompiledError(LookupError):
    """No object for this kernel in the cache; the text says which and how to build it."""


@cache
def source_digest(arch: str = "sm_90a") -> str:
    """Hash of every source that can change an object for this target."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _SOURCES[arch]:
        path = root / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def kernel_facts(config: KernelConfig, arch: str) -> dict[str, Any]:
    """Everything the key covers, JSON-ready."""
    return {"arch": arch, "dsl": DSL_VERSION, "sources": source_digest(arch), **config.facts()}


def kernel_key(config: KernelConfig, arch: str) -> str:
    """Name of the object's files."""
    text = json.dumps(kernel_facts(config, arch), sort_keys=True)
    return f"{arch}-{config.tile.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def object_path(config: KernelConfig, arch: str, cache_dir: Path) -> Path:
    """Where the object of a kernel lies, whether it exists or not."""
    return cache_dir / f"{kernel_key(config, arch)}.so"


@cache
def _load_module(path: str) -> Any:
    import tvm_ffi

    ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(path)


def load_kernel(config: KernelConfig, arch: str, cache_dir: Path) -> Callable[..., None]:
    """The compiled launch function of a kernel, from the cache.

    The GPU code itself is loaded at the first call: call once before capturing a graph.

    Raises:
        KernelNotCompiledError: no such object in `cache_dir`.
    """
    path = object_path(config, arch, cache_dir)
    if not path.is_file():
        layer = config.layer
        raise KernelNotCompiledError(
            f"no compiled kernel for {arch}, hidden {layer.hidden_size}, intermediate {layer.intermediate_size}, "
            f"{layer.num_local_experts} local experts, top-{layer.top_k}, {layer.activation_mode} activations, "
            f"{layer.combine_format} wire, tile {config.tile.name} in {cache_dir} (expected {path.name}); "
            "build it with `python -m trtllm_megamoe compile`"
        )
    return _load_module(str(path))[kernel_key(config, arch).replace("-", "_")]
