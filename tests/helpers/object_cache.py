# SPDX-License-Identifier: Apache-2.0
"""Keys, builders and processes for the tests of the kernel store; a builder here writes plain bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_megamoe.cache.entry import Entry
from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.store import Builder, ObjectCache

WATCHDOG_S = 60.0
PROCESSES = 8

FORK = multiprocessing.get_context("fork")  # children start in milliseconds and inherit what a test has patched


def make_key(name: str = "k0", **changes: Any) -> ObjectKey:
    key = ObjectKey(
        name=name,
        sources="5ca1ab1e",
        dsl_version="4.8.1",
        arch="sm_90a",
        geometry={"hidden_size": 7168, "combine_format": "bf16", "swiglu_limit": 10.0},
        tactic={"token_widths": (16, 24, 32), "name": name},
    )
    return replace(key, **changes)


def content_of(key: ObjectKey) -> bytes:
    return random.Random(key.digest).randbytes(20_000)


def builder_of(key: ObjectKey, log: Path | None = None, pause_s: float = 0.0) -> Builder:
    """Writes the key's content in two halves with a pause between; each call adds one line to `log`."""

    def build(directory: Path) -> None:
        assert list(directory.iterdir()) == []
        if log is not None:
            with log.open("a") as file:
                file.write(f"{key.name}\n")
        content = content_of(key)
        with (directory / f"{key.name}.so").open("wb") as file:
            file.write(content[:9000])
            file.flush()
            time.sleep(pause_s)
            file.write(content[9000:])
        (directory / f"{key.name}.json").write_text(json.dumps(key.facts))

    return build


def never(directory: Path) -> None:
    raise AssertionError(f"built again in {directory}")


def assert_holds(found: Entry | None, key: ObjectKey) -> None:
    assert found is not None
    assert found.path(".so").read_bytes() == content_of(key)
    assert json.loads(found.path(".json").read_text())["arch"] == key.arch


def run_in_processes(bodies: list[Callable[[], None]]) -> None:
    """Run each body in a process of its own; a body that raises or a hang fails the test."""
    processes = [FORK.Process(target=body) for body in bodies]
    for process in processes:
        process.start()
    deadline = time.monotonic() + WATCHDOG_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    assert not stuck
    assert [process.exitcode for process in processes] == [0] * len(bodies)


def fill(root: Path, count: int) -> tuple[ObjectCache, list[ObjectKey]]:
    """`count` entries, used one hour apart, the first one longest ago."""
    cache = ObjectCache(root)
    wanted = [make_key(f"k{i}") for i in range(count)]
    for age, key in zip(range(count, 0, -1), wanted, strict=True):
        found = cache.get_or_build(key, builder_of(key))
        used_at = time.time() - 3600 * age
        os.utime(found.directory / "entry.json", (used_at, used_at))
    return cache, wanted


def kept_names(cache: ObjectCache) -> set[str]:
    return {found.name for _, found in cache.entries() if isinstance(found, Entry)}


def flip_a_byte(directory: Path) -> None:
    content = bytearray((directory / "k0.so").read_bytes())
    content[12345] ^= 1
    (directory / "k0.so").write_bytes(content)
