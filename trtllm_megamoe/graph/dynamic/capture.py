# SPDX-License-Identifier: Apache-2.0
"""Capture under test: capture a step, replay it with changed inputs, compare with eager runs bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeVerificationError
from trtllm_megamoe.graph.dynamic.backends import Backend, CaptureBrokenError, Recording, backend_for
from trtllm_megamoe.graph.dynamic.location import Location, raised_location
from trtllm_megamoe.graph.dynamic.operations import Allocation
from trtllm_megamoe.graph.dynamic.step import StepUnderTest, as_step, first_difference, tensors_of

_POISON_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First element of one tensor in which a replay and the eager run of the same inputs differ."""

    round: int
    tensor: str
    coordinate: tuple[int, ...]
    eager: str
    replay: str


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capture under test found. `problems` are faults; `notes` limit what the comparison proves."""

    step: str
    method: str
    device: str
    rounds: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    broken_by: str | None = None
    broken_at: Location | None = None
    mismatches: tuple[Mismatch, ...] = ()
    allocations: tuple[Allocation, ...] = ()

    @property
    def passed(self) -> bool:
        """True when the step was captured and every replay was bit-equal to its eager run."""
        return not self.problems

    @property
    def allocated_bytes(self) -> int:
        """Bytes that operators allocated inside the region."""
        return sum(a.num_bytes for a in self.allocations)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"check": "capture", "passed": self.passed, "allocated_bytes": self.allocated_bytes, **asdict(self)}

    def as_text(self) -> str:
        """Problems, where capture broke, mismatches, allocations by line, and a summary line."""
        lines = [f"problem: {p}" for p in self.problems]
        if self.broken_at is not None:
            lines.append(f"    first operation that broke capture: {self.broken_by or 'unknown'} at {self.broken_at}")
        lines += [
            f"    round {m.round}: {m.tensor}{list(m.coordinate)} eager {m.eager}, replay {m.replay}"
            for m in self.mismatches
        ]
        lines += [f"note: {n}" for n in self.notes]
        for location, found in _by_line(self.allocations).items():
            lines.append(f"allocates {sum(a.num_bytes for a in found)} bytes in {len(found)} tensors at {location}")
        verdict = "passed" if self.passed else "failed"
        lines.append(f"{self.step} on {self.device} ({self.method}): {verdict}, {self.rounds} rounds compared")
        return "\n".join(lines)

    def require(self) -> None:
        """Raise :class:`MegaMoeVerificationError` with the whole report unless it passed."""
        if not self.passed:
            raise MegaMoeVerificationError(f"the step is not ready for CUDA graphs\n{self.as_text()}")


def _by_line(allocations: Sequence[Allocation]) -> dict[str, list[Allocation]]:
    lines: dict[str, list[Allocation]] = {}
    for allocation in allocations:
        lines.setdefault(str(allocation.location), []).append(allocation)
    return lines


@dataclass(slots=True)
class _Run:
    """Results of one run, copied away from the step's buffers."""

    outputs: list[torch.Tensor]
    state: list[torch.Tensor]


@dataclass(slots=True)
class _Findings:
    """Problems and notes while they are collected."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)


def check_capture(
    step: Any,
    *,
    rounds: int = 3,
    seed: int = 0,
    warm_up: int = 2,
    max_allocations: int | None = None,
    device: torch.device | str | None = None,
    backend: Backend | None = None,
) -> CaptureReport:
    """Capture one step and compare replays with eager runs, bit for bit, over several rounds of inputs.

    Each round writes new values into the static inputs, restores the state, and runs eagerly; after the capture (made
    with the first round's inputs) the rounds are replayed in another order. Fresh outputs are poisoned before each
    replay, so that a replay that writes nothing cannot pass.

    Args:
        step: A :class:`StepUnderTest`, or a callable without arguments (then nothing can change between rounds).
        rounds: Sets of inputs, at least 2.
        seed: For the inputs, and for the device's generator before every run.
        warm_up: Eager runs before anything is compared.
        max_allocations: More tensors allocated inside the region are a problem; None reports them only.
        device: Default: the device of the step's tensors, else CUDA where there is one.
        backend: How to record; default by device.

    Raises:
        MegaMoeConfigError: fewer than two rounds, or `new_inputs` does not fit the static buffers.

    Source: R51 (3).
    """
    under_test = as_step(step)
    if rounds < 2:
        raise MegaMoeConfigError(f"rounds must be at least 2, got {rounds}: one round cannot show a frozen value")
    recorder = backend or _default_backend(under_test, device)
    generator = torch.Generator().manual_seed(seed)
    inputs = [{name: t.detach().cpu().clone() for name, t in under_test.inputs.items()}]
    inputs += [under_test.draw(generator) for _ in range(rounds - 1)]
    saved_state = [t.detach().clone() for t in under_test.state]

    def prepare(round_index: int) -> None:
        with torch.no_grad():
            for tensor, saved in zip(under_test.state, saved_state, strict=True):
                tensor.copy_(saved)
        under_test.write(inputs[round_index])
        torch.manual_seed(seed)
        recorder.synchronize()

    def eager(round_index: int) -> _Run:
        prepare(round_index)
        return _copied(recorder.eager(under_test.run), under_test.state)

    with torch.no_grad():
        prepare(0)
        recorder.warm_up(under_test.run, warm_up)
        expected = [eager(r) for r in range(rounds)]
        found = _Findings()
        _check_repeatable(found, expected[0], eager(0), inputs, expected)
        prepare(0)
        try:
            recording = recorder.capture(under_test.run)
        except CaptureBrokenError as error:
            with contextlib.suppress(RuntimeError):  # the device may still report the broken capture
                recorder.synchronize()
            return _broken(under_test, recorder, rounds, found, error)
        fresh = _fresh_outputs(under_test, recorder, recording)
        for round_index in [*range(1, rounds), 0]:
            _poison(fresh)
            prepare(round_index)
            recording.replay()
            recorder.synchronize()
            _compare(found, round_index, expected[round_index], _copied(recording.outputs, under_test.state))
        prepare(0)
    if max_allocations is not None and len(recording.allocations) > max_allocations:
        found.problems.append(
            f"{len(recording.allocations)} tensors allocated inside the region, allowed {max_allocations}"
        )
    return CaptureReport(
        under_test.name, recorder.name, str(recorder.device), rounds, tuple(found.problems), tuple(found.notes),
        mismatches=tuple(found.mismatches), allocations=recording.allocations,
    )  # fmt: skip


def _default_backend(step: StepUnderTest, device: torch.device | str | None) -> Backend:
    devices = step.devices()
    if device is not None:
        first = torch.device(device)
    elif devices:
        first = devices[0]
    else:
        first = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first = torch.empty(0, device=first).device  # with its index
    return backend_for(first, [d for d in devices if d.type == first.type and d != first])


def _copied(outputs: Any, state: Sequence[torch.Tensor]) -> _Run:
    return _Run([t.detach().clone() for t in tensors_of(outputs)], [t.detach().clone() for t in state])


def _check_repeatable(
    found: _Findings, first: _Run, again: _Run, inputs: Sequence[dict[str, torch.Tensor]], expected: Sequence[_Run]
) -> None:
    if any(first_difference(a, b) is not None for a, b in zip(first.outputs, again.outputs, strict=True)):
        found.problems.append(
            "two eager runs with the same inputs differ: host state, unordered atomics or random numbers"
        )
    if not first.outputs and not first.state:
        found.problems.append("the step returns no tensors and names no state: there is nothing to compare")
    elif not inputs[0]:
        found.notes.append("the step names no inputs: frozen values cannot show")
    elif all(_same(run, expected[0]) for run in expected[1:]):
        found.notes.append("results are the same in every round: inputs that change nothing prove nothing")


def _same(left: _Run, right: _Run) -> bool:
    pairs = zip([*left.outputs, *left.state], [*right.outputs, *right.state], strict=True)
    return all(first_difference(a, b) is None for a, b in pairs)


def _fresh_outputs(step: StepUnderTest, recorder: Backend, recording: Recording) -> list[torch.Tensor]:
    """Outputs whose memory the capture allocated: only these may be overwritten between replays."""
    eager = {t.untyped_storage().data_ptr() for t in tensors_of(recorder.eager(step.run))}
    named = {t.untyped_storage().data_ptr() for t in (*step.inputs.values(), *step.state)}
    return [t for t in tensors_of(recording.outputs) if t.untyped_storage().data_ptr() not in eager | named]


def _poison(outputs: Sequence[torch.Tensor]) -> None:
    for tensor in outputs:
        if tensor.is_contiguous():
            flat = tensor.view(-1)  # a tensor without dimensions cannot be viewed as bytes
            (flat if flat.dtype is torch.bool else flat.view(torch.uint8)).fill_(_POISON_BYTE)


def _compare(found: _Findings, round_index: int, expected: _Run, replayed: _Run) -> None:
    named = [(f"output {i}", e, r) for i, (e, r) in enumerate(zip(expected.outputs, replayed.outputs, strict=True))]
    named += [(f"state {i}", e, r) for i, (e, r) in enumerate(zip(expected.state, replayed.state, strict=True))]
    for name, eager, replay in named:
        where = first_difference(eager, replay)
        if where is None:
            continue
        if not any(m.round == round_index for m in found.mismatches):
            found.problems.append(f"replay differs from eager in round {round_index}: a value was frozen at capture")
        values = (str(eager[where].item()), str(replay[where].item())) if eager.shape == replay.shape else ("", "")
        found.mismatches.append(Mismatch(round_index, name, where, *values))


def _broken(
    step: StepUnderTest, recorder: Backend, rounds: int, found: _Findings, error: CaptureBrokenError
) -> CaptureReport:
    cause = error.__cause__ or error
    operation = error.operation
    location = operation.location if operation is not None else raised_location(cause.__traceback__)
    problems = [*found.problems, f"capture failed: {error}"]
    return CaptureReport(
        step.name, recorder.name, str(recorder.device), rounds, tuple(problems), tuple(found.notes),
        broken_by=operation.name if operation is not None else type(cause).__name__, broken_at=location,
    )  # fmt: skip
