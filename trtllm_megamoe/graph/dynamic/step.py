# SPDX-License-Identifier: Apache-2.0
"""What a dynamic check runs: one step with its static inputs and state; new inputs each round; bit comparison."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_megamoe.errors import MegaMoeConfigError

NewInputs = Callable[[torch.Generator], Mapping[str, torch.Tensor]]
_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class StepUnderTest:
    """One step of a model, as the dynamic checks need it.

    Attributes:
        run: Takes nothing, reads `inputs` and `state` in place, returns tensors (nested lists, tuples, dicts allowed).
        inputs: Static input buffers by name; each round writes new values into them.
        state: Tensors that the step changes (caches, positions). They are restored before every run and compared after.
        new_inputs: Values for the next round from a CPU generator, by name of the input. Default: the present values of
            each input, shuffled, so that ids stay legal.
        on_inputs: Called with each round's values after they are written: sets host numbers that belong to them.
        name: What reports call the step.
    """

    run: Callable[[], Any]
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: Sequence[torch.Tensor] = ()
    new_inputs: NewInputs | None = None
    on_inputs: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    name: str = "step"

    def devices(self) -> list[torch.device]:
        """Devices of the step's tensors, in order of first use."""
        return list(dict.fromkeys(t.device for t in (*self.inputs.values(), *self.state)))

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """CPU copies of the values for one more round.

        Raises:
            MegaMoeConfigError: `new_inputs` gave an unknown name, or another shape or dtype than the static buffer.
        """
        if self.new_inputs is None:
            return {name: _shuffled(tensor, generator) for name, tensor in self.inputs.items()}
        drawn = dict(self.new_inputs(generator))
        for name, value in drawn.items():
            buffer = self.inputs.get(name)
            if buffer is None:
                raise MegaMoeConfigError(
                    f"new_inputs gave {name!r}; the step's inputs are {', '.join(self.inputs) or 'none'}"
                )
            if value.shape != buffer.shape or value.dtype != buffer.dtype:
                raise MegaMoeConfigError(
                    f"new_inputs gave {name!r} as {tuple(value.shape)} {value.dtype}; its static buffer is "
                    f"{tuple(buffer.shape)} {buffer.dtype}"
                )
        return {name: value.detach().cpu().clone() for name, value in drawn.items()}

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Put one round's values into the static buffers."""
        with torch.no_grad():
            for name, value in values.items():
                self.inputs[name].copy_(value)
        if self.on_inputs is not None:
            self.on_inputs(values)


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    flat = tensor.detach().cpu().reshape(-1)
    return flat[torch.randperm(flat.numel(), generator=generator)].reshape(tensor.shape).clone()


def as_step(made: Any) -> StepUnderTest:
    """Accept a :class:`StepUnderTest` or a plain callable.

    Raises:
        MegaMoeConfigError: it is neither.
    """
    if isinstance(made, StepUnderTest):
        return made
    if callable(made):
        return StepUnderTest(run=made, name=getattr(made, "__qualname__", type(made).__name__))
    raise MegaMoeConfigError(
        f"a step must be a StepUnderTest or a callable without arguments, got {type(made).__name__}"
    )


def load_maker(spec: str) -> Callable[[torch.device], StepUnderTest]:
    """Import `package.module:make_step`; the function may take the device, and returns what :func:`as_step` accepts.

    Raises:
        MegaMoeConfigError: malformed spec, missing module or function.
    """
    module_name, separator, attribute = spec.partition(":")
    if not separator or not module_name or not attribute:
        raise MegaMoeConfigError(f"step {spec!r} is malformed; write package.module:make_step")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            made = getattr(made, part)
    except (ImportError, AttributeError) as err:
        raise MegaMoeConfigError(f"cannot load step {spec!r}: {err}; is the module importable from here?") from err
    if not callable(made):
        raise MegaMoeConfigError(f"{spec!r} is a {type(made).__name__}; give a function that returns the step")
    takes_device = bool(inspect.signature(made).parameters)
    return lambda device: as_step(made(device) if takes_device else made())


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensors of nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for key in value for t in tensors_of(value[key])]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_of(item)]
    return []


def first_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    """Coordinate of the first element whose bits differ, None when all bits are equal (NaN equals the same NaN)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return ()
    if left.dtype in (torch.complex64, torch.complex128):
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    bits = [t.detach().cpu().contiguous().reshape(-1) for t in (left, right)]
    if left.dtype.is_floating_point:
        bits = [t.view(_BIT_VIEWS[t.element_size()]) for t in bits]
    wrong = (bits[0] != bits[1]).nonzero()
    if not wrong.numel():
        return None
    return tuple(int(i) for i in torch.unravel_index(wrong[0, 0], left.shape))
