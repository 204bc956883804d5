# SPDX-License-Identifier: Apache-2.0
"""Fills a cache directory with compiled kernels, on a machine with or without a GPU.

Called by the command line and by tools; each kernel is compiled by a process of its own (`compile_one.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from . import registry
from .common.layer import LayerSpec
from .sm90.config import TILES
from .sm90.config import KernelConfig as HopperConfig


class KernelCompileError(RuntimeError):
    """A kernel could not be compiled; the text holds the compiler's last lines."""


def check_compiler() -> None:
    """Raise :class:`KernelCompileError` unless the pinned DSL version is installed."""
    try:
        found = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        raise KernelCompileError(
            f"compiling needs the CuTe DSL: pip install 'nvidia-cutlass-dsl[cu13]=={registry.DSL_VERSION}'"
        ) from None
    if found != registry.DSL_VERSION:
        raise KernelCompileError(
            f"nvidia-cutlass-dsl {found} is installed, the kernels are pinned to {registry.DSL_VERSION}: "
            f"pip install 'nvidia-cutlass-dsl[cu13]=={registry.DSL_VERSION}'"
        )


def compile_kernels(
    arch: str,
    layer: LayerSpec,
    tile_names: Sequence[str],
    out_dir: Path,
    *,
    progress: Callable[[str, str], None] | None = None,
    jobs: int = 1,
    force: bool = False,
    keep_intermediates: bool = False,
) -> list[Path]:
    """Compile the Hopper kernels of one layer; what is in `out_dir` already is kept.

    Args:
        arch: one of `registry.ARCHITECTURES`.
        layer: the layer.
        tile_names: names in `TILES` that this layer needs.
        out_dir: cache directory, created if missing.
        progress: called with (key, "cached" or "compiled") per finished kernel, from worker threads.
        jobs: kernels compiled at the same time.
        force: compile even what is there.
        keep_intermediates: also leave PTX and cubin beside the object.

    Returns:
        The objects' paths in the order of `tile_names`.

    Raises:
        KernelCompileError: DSL or compiler missing, or a kernel failed; finished objects stay.
        KernelConfigError: the layer or a tile configuration is not legal.
    """
    configs = [HopperConfig(layer, TILES[name]) for name in tile_names]
    return compile_configs(
        arch, configs, out_dir, progress=progress, jobs=jobs, force=force, keep_intermediates=keep_intermediates
    )


def compile_configs(
    arch: str,
    configs: Sequence[registry.KernelConfig],
    out_dir: Path,
    *,
    progress: Callable[[str, str], None] | None = None,
    jobs: int = 1,
    force: bool = False,
    keep_intermediates: bool = False,
) -> list[Path]:
    """`compile_kernels` for configurations of any layers, of the family that `arch` belongs to."""
    if arch not in registry.ARCHITECTURES:
        raise KernelCompileError(
            f"architecture {arch!r} is not supported; allowed: {', '.join(registry.ARCHITECTURES)}"
        )
    check_compiler()

    def build(config: registry.KernelConfig) -> Path:
        path = registry.object_path(config, arch, out_dir)
        if path.is_file() and not force:
            state = "cached"
        else:
            _run_compiler(config, arch, out_dir, keep_intermediates)
            state = "compiled"
        if progress is not None:
            progress(path.stem, state)
        return path

    with ThreadPoolExecutor(max_workers=max(jobs, 1)) as pool:
        return list(pool.map(build, configs))


def _run_compiler(config: registry.KernelConfig, arch: str, out_dir: Path, keep: bool) -> None:
    request = {**config.facts(), "arch": arch, "out_dir": str(out_dir), "keep": keep}
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "CUTE_DSL_ARCH": arch}
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "vendored_kernels.compile_one"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        key = registry.kernel_key(config, arch)
        raise KernelCompileError(f"kernel {key} failed to compile (exit {done.returncode}):\n{tail}")
