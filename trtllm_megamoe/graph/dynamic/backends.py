# SPDX-License-Identifier: Apache-2.0
"""Two ways to record a step and run it again: a CUDA graph, and its emulation on the CPU.

The emulation keeps what makes graphs treacherous: operators are recorded with the host values of the recording, results
go to the recorded addresses, Python does not run again, and operators that need the host are refused.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.graph.dynamic.hooks import explicit_waits, hooked, without_waits
from trtllm_megamoe.graph.dynamic.operations import (
    Allocation,
    HostCallWatch,
    Operation,
    OperationWatch,
    waits_for_device,
)


class CaptureBrokenError(MegaMoeStateError):
    """Recording failed; `operation` is the operator that ran last, when one was running."""

    def __init__(self, message: str, operation: Operation | None) -> None:
        super().__init__(message)
        self.operation = operation


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded step: its outputs (addresses stay), how to run it again, what it allocated while recorded."""

    outputs: Any
    replay: Callable[[], None]
    allocations: tuple[Allocation, ...]
    pool: Any = None


class Backend(Protocol):
    """Records a function of no arguments and replays it."""

    name: str
    device: torch.device

    def warm_up(self, run: Callable[[], Any], runs: int) -> None:
        """Run eagerly, the way it will be recorded, so that everything lazy happens before."""

    def eager(self, run: Callable[[], Any]) -> Any:
        """Run once without recording and wait for the result."""

    def capture(self, run: Callable[[], Any], pool: Any = None) -> Recording:
        """Record one run; `pool` shares memory with earlier recordings. Raises :class:`CaptureBrokenError`."""

    def synchronize(self) -> None:
        """Wait until all work is done."""


class CudaBackend:
    """CUDA graphs on one device, on a stream of their own.

    Args:
        device: The device whose graph it is.
        others: Further devices that the step uses; work on them runs on a stream of that device, forked from and joined
            with the graph's stream.
        cuda: `torch.cuda`, or an object like it.
    """

    name = "cuda-graph"

    def __init__(self, device: torch.device, others: Sequence[torch.device] = (), cuda: Any = None) -> None:
        self.device = device
        self._cuda = torch.cuda if cuda is None else cuda
        self._stream = self._cuda.Stream(device=device)
        self._side_streams = [self._cuda.Stream(device=other) for other in others]

    @contextlib.contextmanager
    def _streams(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._cuda.device(self.device))
            stack.enter_context(self._cuda.stream(self._stream))
            yield

    def _forked(self, run: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            for side in self._side_streams:
                side.wait_stream(self._stream)
                stack.enter_context(self._cuda.stream(side))
            if self._side_streams:
                stack.enter_context(self._cuda.stream(self._stream))
            outputs = run()
        for side in self._side_streams:
            self._stream.wait_stream(side)
        return outputs

    def warm_up(self, run: Callable[[], Any], runs: int) -> None:
        """Run on the capture stream, ordered behind and before the current one."""
        self._stream.wait_stream(self._cuda.current_stream(self.device))
        with self._streams():
            for _ in range(runs):
                self._forked(run)
        self._cuda.current_stream(self.device).wait_stream(self._stream)
        self.synchronize()

    def eager(self, run: Callable[[], Any]) -> Any:
        """Run on the current stream."""
        outputs = run()
        self.synchronize()
        return outputs

    def capture(self, run: Callable[[], Any], pool: Any = None) -> Recording:
        """Capture one run with the strict error mode, keeping the first error."""
        graph = self._cuda.CUDAGraph()
        watch = OperationWatch()
        gc.collect()  # a tensor or graph collected during the capture could make calls that break it
        self.synchronize()
        with self._streams():
            graph.capture_begin(pool=pool, capture_error_mode="global")
            try:
                with watch:
                    outputs = self._forked(run)
            except Exception as error:
                with contextlib.suppress(RuntimeError):  # the capture is invalid already; the first error counts
                    graph.capture_end()
                raise CaptureBrokenError(f"{type(error).__name__}: {error}", watch.running) from error
            try:
                graph.capture_end()
            except RuntimeError as error:
                raise CaptureBrokenError(f"the captured work is not a graph: {error}", None) from error
        return Recording(outputs, graph.replay, tuple(watch.allocations), graph.pool())

    def synchronize(self) -> None:
        """Wait for the device."""
        self._cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class _Taped:
    """One recorded operator; `written` are its results, which replays overwrite (none when it works in place)."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    written: list[torch.Tensor]

    def replay(self) -> None:
        """Run the operator again on the recorded arguments."""
        fresh = self.func(*self.args, **self.kwargs)
        if self.written:
            for old, new in zip(
                self.written, [fresh] if isinstance(fresh, torch.Tensor) else _tensors(fresh), strict=True
            ):
                old.copy_(new)


class RehearsalBackend:
    """Emulates capture and replay on the CPU, operator by operator."""

    name = "rehearsal"

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    def warm_up(self, run: Callable[[], Any], runs: int) -> None:
        """Run eagerly."""
        for _ in range(runs):
            self.eager(run)

    def eager(self, run: Callable[[], Any]) -> Any:
        """Run; explicit waits for a GPU do nothing."""
        with without_waits(torch.cuda):
            return run()

    def capture(self, run: Callable[[], Any], pool: Any = None) -> Recording:
        """Record one run; refuse what a GPU's host would have to wait for."""
        tape: list[_Taped] = []
        calls = HostCallWatch(_refuse)

        def before(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            reason = None if calls.quiet else waits_for_device(name, args, kwargs)
            if reason is not None:
                _refuse(name, reason)

        def after(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
            if not calls.quiet and (func._schema.is_mutable or not _is_view(args, kwargs, result)):
                written = [] if func._schema.is_mutable else _tensors(result)
                tape.append(_Taped(func, args, kwargs, written))

        watch = OperationWatch(before, after)
        inference = torch.is_inference_mode_enabled()
        try:
            refusing = hooked(explicit_waits(torch.cuda), lambda label: _refuse(label, "it waits for the device"))
            with refusing, watch, calls:
                outputs = run()
        except Exception as error:
            raise CaptureBrokenError(f"{type(error).__name__}: {error}", watch.running) from error

        def replay() -> None:
            with torch.inference_mode() if inference else torch.no_grad():
                for taped in tape:
                    taped.replay()

        return Recording(outputs, replay, tuple(watch.allocations))

    def synchronize(self) -> None:
        """Nothing runs behind the host's back here."""


def _refuse(name: str, reason: str) -> None:
    raise MegaMoeStateError(f"{name} is not permitted when stream is capturing: {reason}")


def _is_view(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    sources = {_address(t) for t in _tensors((args, kwargs))}
    return all(t.numel() == 0 or _address(t) in sources for t in _tensors(result))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def backend_for(device: torch.device, others: Sequence[torch.device] = ()) -> Backend:
    """The backend of a device: CUDA graphs on a GPU, the rehearsal elsewhere."""
    return CudaBackend(device, others) if device.type == "cuda" else RehearsalBackend(device)
