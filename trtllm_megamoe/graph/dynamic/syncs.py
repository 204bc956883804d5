# SPDX-License-Identifier: Apache-2.0
"""Sync-debug method: every implicit sync and every explicit wait of one step, located in one pass.

On CUDA, PyTorch's sync-debug mode warns at each implicit sync and the warning's stack says where; explicit waits are
hooked, because that mode does not see them. On the CPU the step is rehearsed: operators that would wait are listed.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trtllm_megamoe.errors import MegaMoeVerificationError
from trtllm_megamoe.graph.dynamic.hooks import explicit_waits, hooked, without_waits
from trtllm_megamoe.graph.dynamic.location import Location, current_location
from trtllm_megamoe.graph.dynamic.operations import HostCallWatch, OperationWatch, waits_for_device
from trtllm_megamoe.graph.dynamic.step import StepUnderTest, as_step

logger = logging.getLogger(__name__)

_IMPLICIT = "called a synchronizing"  # the text of PyTorch's sync-debug warning


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One place where the host waited: `implicit` by an operation, `explicit` by a call that asks to."""

    kind: str
    what: str
    location: Location
    count: int = 1


@dataclass(frozen=True, slots=True)
class SyncReport:
    """All waits of one step, in order of first occurrence; repeated ones are counted."""

    step: str
    method: str
    device: str
    events: tuple[SyncEvent, ...]

    @property
    def passed(self) -> bool:
        """True when the host never waited."""
        return not self.events

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"check": "syncs", "passed": self.passed, **asdict(self)}

    def as_text(self) -> str:
        """One line an event and a summary line."""
        lines = [f"{e.location}\n    {e.kind}: {e.what} (x{e.count})" for e in self.events]
        return "\n".join(
            [*lines, f"{self.step} on {self.device} ({self.method}): {len(self.events)} places synchronise"]
        )

    def require(self) -> None:
        """Raise :class:`MegaMoeVerificationError` with the whole list when the host waited anywhere."""
        if not self.passed:
            raise MegaMoeVerificationError(f"the step synchronises with the device\n{self.as_text()}")


class _Collector:
    """Counts events by place and cause, keeping their order."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str, str, int], SyncEvent] = {}

    def add(self, kind: str, what: str, location: Location) -> None:
        key = (kind, what, location.path, location.line)
        seen = self._events.get(key)
        self._events[key] = SyncEvent(kind, what, location, seen.count + 1 if seen else 1)

    def events(self) -> tuple[SyncEvent, ...]:
        return tuple(self._events.values())


@contextlib.contextmanager
def _watch_cuda(collector: _Collector, cuda: Any) -> Iterator[None]:
    before = cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def on_warning(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if _IMPLICIT in str(message):
                collector.add("implicit", "synchronising CUDA operation", current_location())
            else:
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = on_warning  # type: ignore[assignment]
        with hooked(explicit_waits(cuda), lambda label: collector.add("explicit", label, current_location())):
            cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _watch_rehearsal(collector: _Collector) -> Iterator[None]:
    calls = HostCallWatch(lambda name, why: collector.add("implicit", f"{name}: {why}", current_location()))

    def before(name: str, args: Any, kwargs: Any) -> None:
        reason = None if calls.quiet else waits_for_device(name, args, kwargs)
        if reason is not None:
            collector.add("implicit", f"{name}: {reason}", current_location())

    def explicit(label: str) -> None:
        collector.add("explicit", label, current_location())

    with hooked(explicit_waits(torch.cuda), explicit, call_original=False), OperationWatch(before=before), calls:
        yield


@contextlib.contextmanager
def watching(
    name: str, device: torch.device | str | None = None, cuda: Any = None
) -> Iterator[Callable[[], SyncReport]]:
    """Watch the code inside; what is yielded gives the report of everything seen so far.

    Args:
        name: What the report calls the code.
        device: Default: CUDA where there is one, else the rehearsal on the CPU.
        cuda: `torch.cuda`, or an object like it.
    """
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    api = torch.cuda if cuda is None else cuda
    on_gpu = target.type == "cuda"
    collector = _Collector()
    method = "sync-debug mode" if on_gpu else "rehearsal"
    with _watch_cuda(collector, api) if on_gpu else _watch_rehearsal(collector):
        yield lambda: SyncReport(name, method, str(target), collector.events())


def find_syncs(
    step: Any, *, device: torch.device | str | None = None, warm_up: int = 1, cuda: Any = None
) -> SyncReport:
    """Run one step and list every place where the host waits for the device, in one pass.

    Args:
        step: A :class:`StepUnderTest` or a callable without arguments.
        device: Where the step runs; default: the device of its tensors, else CUDA where there is one. On `cpu` the step
            is rehearsed, see the module's text.
        warm_up: Runs before the one that is watched, so that compilation and first-time set-up are not counted.
        cuda: `torch.cuda`, or an object like it.

    Source: R51 (2).
    """
    under_test = as_step(step)
    target = _device_of(under_test, device)
    api = torch.cuda if cuda is None else cuda
    on_gpu = target.type == "cuda"
    with torch.no_grad(), api.device(target) if on_gpu else contextlib.nullcontext():
        with contextlib.nullcontext() if on_gpu else without_waits(torch.cuda):
            for _ in range(warm_up):
                under_test.run()
        if on_gpu:
            api.synchronize()
        with watching(under_test.name, target, api) as report:
            under_test.run()
        if on_gpu:
            api.synchronize()
    logger.debug("%s", report().as_text())
    return report()


def _device_of(step: StepUnderTest, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    devices = step.devices()
    return devices[0] if devices else torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def forbid_syncs(cuda: Any = None) -> Iterator[None]:
    """Gate: any wait inside raises at the line that causes it.

    Implicit syncs raise PyTorch's own RuntimeError (sync-debug mode `error`), explicit waits
    :class:`MegaMoeVerificationError`. Leaves no trace behind. CUDA only; for the CPU use :func:`find_syncs`.
    """
    api = torch.cuda if cuda is None else cuda

    def refuse(label: str) -> None:
        raise MegaMoeVerificationError(f"{label} inside a step that must not wait, at {current_location()}")

    before = api.get_sync_debug_mode()
    with hooked(explicit_waits(api), refuse):
        api.set_sync_debug_mode("error")
        try:
            yield
        finally:
            api.set_sync_debug_mode(before)
