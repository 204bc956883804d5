# SPDX-License-Identifier: Apache-2.0
"""Gets a self-test's kernels into the cache, several compilers at a time. Called by `selftest` and `compile`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.kernels.family import Family

MAX_JOBS = 16


class Bar(Protocol):
    """A progress bar."""

    def update(self, n: int) -> object:
        """One more."""

    def close(self) -> object:
        """Done."""


def obtain_all(
    family: Family,
    kernels: Sequence[tuple[Any, Any]],
    cache: ObjectCache,
    jobs: int,
    make_bar: Callable[[int], Bar],
) -> list[tuple[str, str]]:
    """(name, object digest) of every kernel; what the cache lacks is compiled.

    Args:
        kernels: (layer spec, tile).
        jobs: Compilers at a time; 0 takes the machine's cores, at most `MAX_JOBS`.

    Raises:
        MegaMoeUnavailableError: One is missing and cannot be compiled here; says which command builds all of them.
    """
    bar = make_bar(len(kernels))

    def obtain(kernel: tuple[Any, Any]) -> tuple[str, str]:
        spec, tile = kernel
        family.obtain(spec, [tile], cache)
        bar.update(1)
        key = family.object_key(family.kernel(spec, tile))
        return key.name, key.digest

    try:
        with ThreadPoolExecutor(jobs or min(os.cpu_count() or 1, MAX_JOBS)) as pool:
            return list(pool.map(obtain, kernels))
    except MegaMoeUnavailableError as err:
        raise MegaMoeUnavailableError(
            f"{err}. All kernels of the self-test, on a machine with the DSL (no GPU needed): "
            f"python -m trtllm_megamoe compile --selftest --arch {family.arch}"
        ) from err
    finally:
        bar.close()
