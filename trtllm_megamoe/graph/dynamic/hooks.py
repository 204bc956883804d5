# SPDX-License-Identifier: Apache-2.0
"""Hooks on the calls with which a program waits for the device on purpose; sync-debug mode does not see those."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def explicit_waits(cuda: Any) -> list[tuple[Any, str, str]]:
    """Attributes to hook: (owner, attribute, what it is called in reports)."""
    points = [
        (cuda, "synchronize", "torch.cuda.synchronize()"),
        (cuda, "empty_cache", "torch.cuda.empty_cache()"),
        (cuda.Stream, "synchronize", "Stream.synchronize()"),
        (cuda.Stream, "query", "Stream.query()"),
        (cuda.Event, "synchronize", "Event.synchronize()"),
        (cuda.Event, "query", "Event.query()"),
        (cuda.Event, "elapsed_time", "Event.elapsed_time()"),
    ]
    if cuda is torch.cuda:
        if hasattr(torch._C, "_cuda_synchronize"):  # also catches `from torch.cuda import synchronize`
            points.append((torch._C, "_cuda_synchronize", "torch.cuda.synchronize()"))
        if hasattr(torch, "accelerator"):
            points.append((torch.accelerator, "synchronize", "torch.accelerator.synchronize()"))
        if torch.distributed.is_available():
            points.append((torch.distributed, "barrier", "torch.distributed.barrier()"))
    return points


@contextlib.contextmanager
def hooked(
    points: list[tuple[Any, str, str]], report: Callable[[str], None], call_original: bool = True
) -> Iterator[None]:
    """Report each call of the hooked attributes once, also when one is built on another."""
    depth = 0
    saved: list[tuple[Any, str, bool, Any]] = []

    def wrap(original: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def reporting(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:
                report(label)
            depth += 1
            try:
                return original(*args, **kwargs) if call_original else None
            finally:
                depth -= 1

        return reporting

    try:
        for owner, attribute, label in points:
            own = attribute in vars(owner)
            saved.append((owner, attribute, own, vars(owner).get(attribute)))
            setattr(owner, attribute, wrap(getattr(owner, attribute), label))
        yield
    finally:
        for owner, attribute, own, original in reversed(saved):
            if own:
                setattr(owner, attribute, original)
            else:
                delattr(owner, attribute)


@contextlib.contextmanager
def without_waits(cuda: Any) -> Iterator[None]:
    """Make explicit waits do nothing: a rehearsal has no device to wait for."""
    with hooked(explicit_waits(cuda), lambda _label: None, call_original=False):
        yield
