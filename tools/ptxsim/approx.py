# SPDX-License-Identifier: Apache-2.0
"""`ex2.approx` and `rcp.approx`: by default exact and rounded once, or as a GPU computed them.

PTX bounds their error but not their bits. Results recorded on a GPU (`tools/record_gpu_results.py`) hold its values for
exactly the inputs that occur; with them the interpreter can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]
Function = Callable[[F32], F32]

EXACT: dict[str, Function] = {
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
    "rcp": lambda a: (1.0 / a.astype(np.float64)).astype(np.float32),
}
"""Correctly rounded."""

_current = dict(EXACT)


def evaluate(name: str, value: F32) -> F32:
    """The approximation `name` of fp32 lanes."""
    return _current[name](value)


@contextmanager
def using(functions: dict[str, Function]) -> Iterator[None]:
    """Approximations that hold inside the block."""
    before = dict(_current)
    _current.update(functions)
    try:
        yield
    finally:
        _current.update(before)


class Table:
    """A recorded approximation: sorted inputs and their results as bits. `missing` counts inputs that it lacks."""

    def __init__(self, name: str, inputs: U32, results: U32) -> None:
        self._exact, self.inputs, self.results = EXACT[name], inputs, results
        self.missing = 0

    def __call__(self, value: F32) -> F32:
        """Recorded where there is a record, else exact."""
        bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
        at = np.searchsorted(self.inputs, bits).clip(max=len(self.inputs) - 1)
        known = self.inputs[at] == bits
        self.missing += int((~known).sum())
        return np.where(known, self.results[at].view(np.float32), self._exact(value))
