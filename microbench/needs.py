# SPDX-License-Identifier: Apache-2.0
"""Which compiled kernels a benchmark needs, and how they get into the cache where the GPU's machine cannot compile.

Used by `sweep --needs` and by the tools that prepare a run. Pure but for :func:`compile_into`; touches no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.cli.compile import H200_SMS
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import hopper
from vendored_kernels.sm90.config import KernelConfig


def kernels_of(
    config: MegaMoeConfig, ep_size: int, *, share_one_gpu: bool = False, timed_tokens: Collection[int] = ()
) -> list[KernelConfig]:
    """Kernels of a layer over all its buckets, by the heuristic.

    Args:
        config: With activations named; `auto` gives both modes' kernels.
        ep_size: Ranks.
        share_one_gpu: The ranks are threads on one GPU and share its multiprocessors.
        timed_tokens: Tokens per rank whose kernels are also needed with time stamps.
    """
    num_sms = H200_SMS // ep_size if share_one_gpu else H200_SMS
    modes = tuple(ActivationMode) if config.activation_mode is None else (config.activation_mode,)
    ladder = BucketLadder.for_cap(config.max_tokens_per_rank)
    found = []
    for spec in (hopper.layer_spec(config, ep_size, mode) for mode in modes):
        tiles = hopper.tiles_of_ladder(spec, ladder, num_sms)
        found += [KernelConfig(spec, tile) for tile in tiles.values()]
        found += [KernelConfig(spec, tiles[ladder.select(count)], timestamps=True) for count in sorted(timed_tokens)]
    return distinct(found)


def distinct(kernels: Iterable[KernelConfig]) -> list[KernelConfig]:
    """Each kernel once, in order."""
    return list({hopper.object_key(kernel).digest: kernel for kernel in kernels}.values())


def compile_into(
    cache: ObjectCache, kernels: Sequence[KernelConfig], jobs: int, progress: Callable[[str], None]
) -> None:
    """Compile what the cache lacks, `jobs` at a time; each compilation is a process of its own.

    Raises:
        MegaMoeUnavailableError: A kernel cannot be compiled here.
    """

    def obtain(kernel: KernelConfig) -> None:
        def report(name: str, state: str) -> None:
            progress(f"{state} {name}")

        hopper.obtain(kernel.layer, [kernel.tile], cache, report, timestamps=kernel.timestamps)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(obtain, kernel) for kernel in kernels]:
            future.result()
