# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `torch.cuda` that keeps the graph checks' contract on the CPU: sync-debug mode, streams, graphs.

Used by the graph tests. It records the order of calls, so that fork and join of streams can be asserted.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from trtllm_megamoe.graph.dynamic.operations import OperationWatch

# Compiled under a name that is no file: the real one is native code and leaves no Python frame.
_IMPLICIT = """
def implicit_sync():
    if cuda.mode == 1:
        warnings.warn("called a synchronizing CUDA operation")
    if cuda.mode == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
"""


def make_fake_cuda() -> Any:
    """A fresh module-like object; `calls` is the log, `implicit_sync()` behaves like an operation that waits."""

    class FakeCuda:
        calls: ClassVar[list[str]] = []
        mode = 0
        fail_capture_end = False

        @classmethod
        def set_sync_debug_mode(cls, mode: Any) -> None:
            cls.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

        @classmethod
        def get_sync_debug_mode(cls) -> int:
            return cls.mode

        @classmethod
        def synchronize(cls, device: Any = None) -> None:
            cls.calls.append("synchronize")

        @classmethod
        def empty_cache(cls) -> None:
            cls.synchronize()

        @staticmethod
        @contextlib.contextmanager
        def device(device: Any) -> Iterator[None]:
            yield

        @classmethod
        @contextlib.contextmanager
        def stream(cls, stream: Any) -> Iterator[None]:
            cls.calls.append(f"enter {stream.name}")
            yield

        @classmethod
        def current_stream(cls, device: Any = None) -> Any:
            return cls.Stream("current")

        class Stream:
            def __init__(self, name: str = "", device: Any = None) -> None:
                self.name = name or str(device)

            def wait_stream(self, other: Any) -> None:
                FakeCuda.calls.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                FakeCuda.synchronize()

            def query(self) -> bool:
                return True

        class Event:
            def synchronize(self) -> None: ...

            def query(self) -> bool:
                return True

            def elapsed_time(self, end: Any) -> float:
                return 0.0

        class CUDAGraph:
            def __init__(self) -> None:
                self._tape: list[Any] = []
                self._watch = OperationWatch(after=lambda *call: self._tape.append(call))

            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                FakeCuda.calls.append(f"begin pool={pool}")
                self._pool = pool or "own pool"
                self._watch.__enter__()

            def capture_end(self) -> None:
                self._watch.__exit__(None, None, None)
                if FakeCuda.fail_capture_end:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def pool(self) -> str:
                return self._pool

            def replay(self) -> None:
                for func, args, kwargs, result in self._tape:
                    fresh = func(*args, **kwargs)
                    if not func._schema.is_mutable and isinstance(result, torch.Tensor):
                        result.copy_(fresh)

    namespace: dict[str, Any] = {"cuda": FakeCuda, "warnings": warnings}
    exec(compile(_IMPLICIT, "<native>", "exec"), namespace)
    FakeCuda.implicit_sync = staticmethod(namespace["implicit_sync"])  # type: ignore[attr-defined]
    return FakeCuda
