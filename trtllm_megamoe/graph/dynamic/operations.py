# SPDX-License-Identifier: Apache-2.0
"""Watches the operations of a step: which would make a GPU's host wait, which allocate, which one runs now.

Works on any device, because it looks at operators and arguments. The rehearsal on the CPU rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trtllm_megamoe.graph.dynamic.location import Location, current_location

_READS = {
    "_local_scalar_dense": "reads one value on the host",
    "equal": "compares on the host",
    "nonzero": "its output size depends on values",
    "masked_select": "its output size depends on values",
    "argwhere": "its output size depends on values",
    "_unique2": "its output size depends on values",
    "unique_dim": "its output size depends on values",
    "unique_consecutive": "its output size depends on values",
    "unique_dim_consecutive": "its output size depends on values",
    "bincount": "its output size depends on values",
    "_linalg_check_errors": "reads error codes on the host",
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
# Python-level calls that copy or format without an operator below them when the tensor is already on the CPU.
_HOST_CALLS: dict[Callable[..., Any], str] = {
    torch.Tensor.tolist: "reads all values on the host",
    torch.Tensor.numpy: "hands the values to NumPy",
    torch.Tensor.__array__: "hands the values to NumPy",
    torch.Tensor.cpu: "copies to the host",
    torch.Tensor.__repr__: "formats values",
    torch.Tensor.__format__: "formats values",
}


def waits_for_device(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why an operator makes the host wait for the GPU, or None when it does not.

    Args:
        name: Operator name without namespace and overload: `nonzero`, `index_put_`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name in _READS:
        return _READS[name]
    if name == "repeat_interleave" and any(isinstance(a, torch.Tensor) for a in args[:1]):
        sized = kwargs.get("output_size") is not None or any(isinstance(a, int) for a in args[1:])
        return None if sized or (len(args) > 1 and not isinstance(args[1], torch.Tensor)) else _READS["nonzero"]
    if name in _INDEXING and len(args) > 1:
        masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
        value = args[2] if len(args) > 2 and "index_put" in name else None
        # Filling through one mask with one number is a masked fill, which needs no size.
        fills = isinstance(value, torch.Tensor) and value.numel() == 1 and len(args[1]) == 1 and not any(args[3:4])
        return "a boolean mask selects a data-dependent number of rows" if masks and not fills else None
    return None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator call and where user code made it."""

    name: str
    location: Location


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor that an operator of the step allocated."""

    operation: str
    num_bytes: int
    device: str
    location: Location


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator while active: remembers the running one, and the allocations of all.

    Args:
        before: Called before each operator with its name, arguments and keyword arguments; may raise.
        after: Called after each with the operator, arguments, keyword arguments and result.
    """

    def __init__(
        self,
        before: Callable[[str, Sequence[Any], Mapping[str, Any]], None] | None = None,
        after: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: Operation | None = None
        self.allocations: list[Allocation] = []
        self._before, self._after = before, after

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Steps are not compiled under the watch; the default would import the compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        location = current_location()
        self.running = Operation(name, location)
        if self._before is not None:
            self._before(name, args, kwargs)
        result = func(*args, **kwargs)
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for out in tree_leaves(result):
            if isinstance(out, torch.Tensor) and out.numel() and _storage(out) not in known:
                num_bytes = out.untyped_storage().nbytes()
                self.allocations.append(Allocation(name, num_bytes, str(out.device), location))
        if self._after is not None:
            self._after(func, args, kwargs, result)
        self.running = None
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


class HostCallWatch(TorchFunctionMode):
    """Sees Python-level calls that read a tensor on the host: `tolist`, `numpy`, `cpu`, formatting.

    Args:
        report: Called with the name of the call and the reason; may raise.
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        super().__init__()
        self.quiet = 0
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reason = _HOST_CALLS.get(func) if not isinstance(func, str) else None
        if func is torch.Tensor.to and "cpu" in (*args[1:2], kwargs.get("device")):
            reason = "copies to the host"
        if reason is not None and not self.quiet:
            self._report(getattr(func, "__name__", str(func)), reason)
        # one_hot with a number of classes reads its ids on the CPU only; what is reported needs no second report.
        sized_one_hot = func is torch.nn.functional.one_hot and (len(args) > 1 or kwargs.get("num_classes", -1) > 0)
        self.quiet += reason is not None or sized_one_hot
        try:
            return func(*args, **kwargs)
        finally:
            self.quiet -= reason is not None or sized_one_hot
