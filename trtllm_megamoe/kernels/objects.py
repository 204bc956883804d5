# SPDX-License-Identifier: Apache-2.0
"""Objects of kernels of any family: found in the store, or compiled into it. Knows no architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trtllm_megamoe.cache.entry import Entry
from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.errors import MegaMoeUnavailableError
from vendored_kernels import registry

Progress = Callable[[str, str], None]
"""Called with (kernel name, "cached" or "compiled") per kernel."""


def obtain(
    arch: str,
    kernels: Iterable[registry.KernelConfig],
    key_of: Callable[[Any], ObjectKey],
    cache: ObjectCache,
    progress: Progress | None = None,
) -> dict[str, Path]:
    """Directories that hold the objects of one layer's kernels, by tile name; what the cache lacks is compiled first.

    Raises:
        MegaMoeUnavailableError: As :func:`get_or_compile`.
    """
    found: dict[str, Path] = {}
    for kernel in kernels:
        if kernel.tile.name in found:
            continue
        key = key_of(kernel)
        entry, state = get_or_compile(arch, kernel, key, cache)
        found[kernel.tile.name] = entry.directory
        if progress is not None:
            progress(key.name, state)
    return found


def get_or_compile(arch: str, kernel: registry.KernelConfig, key: ObjectKey, cache: ObjectCache) -> tuple[Entry, str]:
    """The entry of one kernel, and "cached" or "compiled".

    Raises:
        MegaMoeUnavailableError: It is missing and cannot be compiled here; the text says how to get it.
    """
    from vendored_kernels import compile as kernel_compile

    entry = cache.get(key)
    if entry is not None:
        return entry, "cached"

    def build(directory: Path) -> None:
        kernel_compile.compile_configs(arch, [kernel], directory)

    try:
        return cache.get_or_build(key, build), "compiled"
    except kernel_compile.KernelCompileError as err:
        raise MegaMoeUnavailableError(
            f"kernel {key.name} is not in {cache.root} and cannot be compiled here: {err}. "
            "Build it elsewhere (python -m trtllm_megamoe compile, no GPU needed) and bring it over with "
            "`cache export` and `cache import`"
        ) from err
