# SPDX-License-Identifier: Apache-2.0
"""Sync listing and capture under test: on a stand-in for torch.cuda, and as the rehearsal on the CPU."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from tests.helpers.fake_cuda import make_fake_cuda
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError, MegaMoeVerificationError
from trtllm_megamoe.graph import StepUnderTest, check_capture, find_syncs, selfcheck
from trtllm_megamoe.graph.dynamic.backends import CaptureBrokenError, CudaBackend, RehearsalBackend
from trtllm_megamoe.graph.dynamic.location import current_location
from trtllm_megamoe.graph.dynamic.operations import waits_for_device
from trtllm_megamoe.graph.dynamic.step import as_step, first_difference, load_maker, tensors_of
from trtllm_megamoe.graph.dynamic.syncs import explicit_waits, forbid_syncs

CPU = torch.device("cpu")


def _next_line() -> int:
    return int(current_location().stack[-2].split(":")[-1].split(" ")[0]) + 1


# --- syncs -----------------------------------------------------------------------------------------------------------


def test_find_syncs_on_cuda_locates_every_wait_in_one_pass() -> None:
    cuda = make_fake_cuda()
    lines: list[int] = []

    def helper() -> None:
        lines.append(_next_line())
        cuda.implicit_sync()

    def step() -> None:
        lines.clear()
        helper()
        lines.append(_next_line() + 1)
        for _ in range(3):
            cuda.implicit_sync()
        lines.append(_next_line())
        cuda.synchronize()
        lines.append(_next_line())
        cuda.Stream("side").synchronize()
        lines.append(_next_line())
        cuda.empty_cache()
        cuda.Stream("side").wait_stream(cuda.Stream("other"))

    report = find_syncs(step, device="cuda", cuda=cuda)
    assert [(e.kind, e.what, e.count) for e in report.events] == [
        ("implicit", "synchronising CUDA operation", 1),
        ("implicit", "synchronising CUDA operation", 3),
        ("explicit", "torch.cuda.synchronize()", 1),
        ("explicit", "Stream.synchronize()", 1),
        ("explicit", "torch.cuda.empty_cache()", 1),  # built on synchronize, counted once
    ]
    assert [(e.location.path, e.location.line) for e in report.events] == [(__file__, line) for line in lines]
    assert report.events[0].location.function == "helper" and "in step" in report.events[0].location.stack[-2]
    assert report.events[0].location.source == "cuda.implicit_sync()"
    with pytest.raises(MegaMoeVerificationError, match="5 places synchronise"):
        report.require()
    json.dumps(report.as_dict())


def test_find_syncs_on_cuda_leaves_no_trace_and_passes_other_warnings_on() -> None:
    cuda = make_fake_cuda()
    cuda.set_sync_debug_mode(2)
    before = {(owner, name): vars(owner).get(name) for owner, name, _ in explicit_waits(cuda)}

    def step() -> None:
        warnings.warn("something else", stacklevel=1)
        raise KeyError("the step's own error")

    with pytest.warns(UserWarning, match="something else"), pytest.raises(KeyError):
        find_syncs(step, device="cuda", cuda=cuda, warm_up=0)
    assert cuda.mode == 2
    assert {(owner, name): vars(owner).get(name) for owner, name, _ in explicit_waits(cuda)} == before


def test_forbid_syncs_raises_at_the_first_wait_of_either_kind() -> None:
    cuda = make_fake_cuda()
    with pytest.raises(RuntimeError, match="synchronizing"), forbid_syncs(cuda):
        cuda.implicit_sync()
    with pytest.raises(MegaMoeVerificationError, match=r"Event.synchronize\(\) inside a step"), forbid_syncs(cuda):
        cuda.Event().synchronize()
    with forbid_syncs(cuda):
        cuda.Stream("side").wait_stream(cuda.Stream("other"))
    assert cuda.mode == 0


def test_rehearsal_lists_host_calls_and_operators_once_each() -> None:
    x = torch.linspace(-1, 1, 8)

    def step() -> Any:
        kept = [x.tolist(), x.numpy(), x.cpu(), str(x), f"{x.sum()}", int(x.sum()), max(x[0], x[1]), 3 in x]
        torch.cuda.synchronize()
        return kept

    report = find_syncs(step, device=CPU)
    names = [e.what.split(":")[0] for e in report.events]
    assert names == [
        "tolist", "numpy", "cpu", "__repr__", "__format__", "_local_scalar_dense", "torch.cuda.synchronize()",
    ]  # fmt: skip
    assert [e.count for e in report.events] == [1, 1, 1, 1, 1, 3, 1]  # the cast, the comparison of max, `in`
    assert {e.location.path for e in report.events} == {__file__}


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "waits"),
    [
        ("nonzero", (torch.ones(2),), {}, True),
        ("add", (torch.ones(2), 1), {}, False),
        ("index", (torch.ones(2), [torch.tensor([True, False])]), {}, True),
        ("index", (torch.ones(2), [None, torch.tensor([1])]), {}, False),
        ("index_put_", (torch.ones(2), [torch.tensor([True, False])], torch.tensor(0.0)), {}, False),
        ("index_put_", (torch.ones(2), [torch.tensor([True, False])], torch.tensor(0.0), True), {}, True),
        ("index_put_", (torch.ones(2), [torch.tensor([True, False])], torch.ones(2)), {}, True),
        ("repeat_interleave", (torch.tensor([1, 2]),), {}, True),
        ("repeat_interleave", (torch.tensor([1, 2]),), {"output_size": 3}, False),
        ("repeat_interleave", (torch.ones(2), 3), {}, False),
    ],
)
def test_waits_for_device_knows_operator_and_arguments(name: str, args: Any, kwargs: Any, waits: bool) -> None:
    assert (waits_for_device(name, args, kwargs) is not None) is waits


# --- capture under test -----------------------------------------------------------------------------------------------


class _Accumulator:
    """A step with static input, static output, a fresh output and state."""

    def __init__(self) -> None:
        self.x = torch.linspace(-2, 3, 24).view(4, 6)
        self.total = torch.zeros(4, 6)
        self.out = torch.zeros(4, 6)

    def __call__(self) -> dict[str, torch.Tensor]:
        self.total.add_(self.x)
        torch.mul(self.total, 3, out=self.out)
        fresh = (self.x > 0).to(torch.bfloat16) * float("nan")
        return {"static": self.out, "fresh": fresh, "part": self.out[1:, 2], "scalar": self.x.sum(), "flag": self.x > 1}

    def under_test(self, run: Any = None, **options: Any) -> StepUnderTest:
        return StepUnderTest(run or self, {"x": self.x}, [self.total], **options)


def test_check_capture_clean_step_passes_and_restores_state() -> None:
    step = _Accumulator()
    report = check_capture(step.under_test(), rounds=4)
    assert report.passed and not report.notes and report.method == "rehearsal", report.as_text()
    assert torch.equal(step.total, torch.zeros(4, 6))
    assert torch.equal(step.x, torch.linspace(-2, 3, 24).view(4, 6)), "the first round's inputs are back"
    assert {a.operation for a in report.allocations} == {"gt", "_to_copy", "mul", "sum"}
    assert all(a.location.path == __file__ for a in report.allocations)
    assert check_capture(step.under_test(), max_allocations=5).passed
    limited = check_capture(step.under_test(), max_allocations=4)
    assert limited.problems == ("5 tensors allocated inside the region, allowed 4",)
    json.dumps(report.as_dict())


def test_check_capture_frozen_host_number_is_located_by_round_tensor_and_value() -> None:
    step = _Accumulator()
    scale = 1.0

    def on_inputs(values: Any) -> None:
        nonlocal scale
        scale = float(values["x"][0, 0])

    report = check_capture(step.under_test(lambda: step.x * scale, on_inputs=on_inputs))
    assert [m.round for m in report.mismatches] == [1, 2]
    first = report.mismatches[0]
    eager_scale = float(first.eager) / float(first.replay)
    assert first.tensor == "output 0" and eager_scale != 1
    with pytest.raises(MegaMoeVerificationError, match="frozen at capture"):
        report.require()


def test_check_capture_host_counter_is_not_repeatable() -> None:
    step = _Accumulator()
    count = 0

    def run() -> torch.Tensor:
        nonlocal count
        count += 1
        return step.x * count

    assert "two eager runs with the same inputs differ" in check_capture(step.under_test(run)).problems[0]


def test_check_capture_result_computed_on_the_host_does_not_pass_as_stale() -> None:
    step = _Accumulator()
    data = step.x.numpy()
    report = check_capture(step.under_test(lambda: torch.from_numpy(data * 2.0)))
    assert {m.round for m in report.mismatches} == {0, 1, 2}, "poisoned: not even the captured round may pass"


def test_check_capture_broken_capture_names_first_operation_and_line() -> None:
    step = _Accumulator()
    lines: list[int] = []

    def run() -> torch.Tensor:
        y = step.x + 1
        lines.append(_next_line())
        picked = y[y > 2]
        return picked.sum() + y.sum().item()

    report = check_capture(step.under_test(run))
    assert not report.passed and report.broken_by == "index"
    assert report.broken_at is not None and (report.broken_at.path, report.broken_at.line) == (__file__, lines[0])
    assert "boolean mask" in report.problems[-1] and "first operation that broke capture: index" in report.as_text()


def test_check_capture_explicit_wait_breaks_capture_but_not_warm_up() -> None:
    step = _Accumulator()

    def run() -> torch.Tensor:
        torch.cuda.synchronize()
        return step.x + 1

    report = check_capture(step.under_test(run))
    assert not report.passed and "torch.cuda.synchronize() is not permitted" in report.problems[0]
    assert report.broken_at is not None and report.broken_at.source == "torch.cuda.synchronize()"


def test_check_capture_vacuous_comparisons_are_said_to_be() -> None:
    x = torch.ones(3)
    same = check_capture(StepUnderTest(lambda: x * 2, {"x": x}))
    assert same.passed and "prove nothing" in same.notes[0]
    assert "names no inputs" in check_capture(lambda: x * 2).notes[0]
    assert "nothing to compare" in check_capture(StepUnderTest(lambda: None, {"x": x})).problems[0]


def test_check_capture_random_numbers_follow_the_seed() -> None:
    x, noise = torch.ones(3, 5), torch.zeros(3, 5)

    def run() -> torch.Tensor:
        noise.exponential_()
        return x / noise

    assert check_capture(StepUnderTest(run, {"x": x})).passed


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ({"y": torch.ones(3)}, "gave 'y'; the step's inputs are x"),
        ({"x": torch.ones(4)}, r"\(4,\) torch.float32; its static buffer is \(3,\)"),
        ({"x": torch.ones(3, dtype=torch.int64)}, "int64"),
    ],
)
def test_check_capture_inputs_that_do_not_fit_are_refused(drawn: dict[str, torch.Tensor], message: str) -> None:
    x = torch.ones(3)
    with pytest.raises(MegaMoeConfigError, match=message):
        check_capture(StepUnderTest(lambda: x, {"x": x}, new_inputs=lambda _: drawn))


def test_check_capture_needs_two_rounds() -> None:
    with pytest.raises(MegaMoeConfigError, match="at least 2"):
        check_capture(lambda: torch.ones(1), rounds=1)


# --- the CUDA backend on the stand-in ---------------------------------------------------------------------------------


def _cuda_backend(others: tuple[str, ...] = ()) -> tuple[CudaBackend, Any]:
    cuda = make_fake_cuda()
    return CudaBackend(torch.device("cuda:0"), [torch.device(o) for o in others], cuda=cuda), cuda


def test_cuda_backend_captures_on_its_own_stream_and_replays() -> None:
    backend, cuda = _cuda_backend()
    step = _Accumulator()
    report = check_capture(step.under_test(), backend=backend)
    assert report.passed and report.method == "cuda-graph", report.as_text()
    begin = cuda.calls.index("begin pool=None")
    assert cuda.calls[begin - 2 : begin] == ["synchronize", "enter cuda:0"]
    assert cuda.calls[:2] == ["synchronize", "cuda:0 waits for current"], "the warm-up is ordered behind earlier work"


def test_cuda_backend_forks_to_every_other_device_and_joins() -> None:
    backend, cuda = _cuda_backend(("cuda:1", "cuda:2"))
    recording = backend.capture(lambda: torch.ones(2), pool="shared")
    captured = cuda.calls[cuda.calls.index("begin pool=shared") + 1 :]
    assert captured == [
        "cuda:1 waits for cuda:0", "enter cuda:1", "cuda:2 waits for cuda:0", "enter cuda:2", "enter cuda:0",
        "cuda:0 waits for cuda:1", "cuda:0 waits for cuda:2",
    ]  # fmt: skip
    assert recording.pool == "shared"


def test_cuda_backend_keeps_the_first_error_of_a_broken_capture() -> None:
    backend, cuda = _cuda_backend()
    cuda.fail_capture_end = True

    def run() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(CaptureBrokenError, match="not permitted when stream is capturing"):
        backend.capture(run)
    with pytest.raises(CaptureBrokenError, match="not a graph: operation failed"):
        backend.capture(lambda: torch.ones(1))


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_first_difference_compares_bits(dtype: torch.dtype) -> None:
    left = torch.tensor([[0.0, 1.0], [2.0, float("nan")]]).to(dtype)
    assert first_difference(left, left.clone()) is None
    right = left.clone()
    right[1, 0] = right[1, 1]
    assert first_difference(left, right)[:2] == (1, 0)
    zero, minus_zero = torch.tensor([0.0]).to(dtype), torch.tensor([-0.0]).to(dtype)
    assert first_difference(zero, minus_zero) is not None, "minus zero has other bits"


def test_first_difference_other_types_shapes_and_views() -> None:
    grid = torch.arange(12).view(3, 4)
    assert first_difference(grid.t(), grid.t().contiguous()) is None
    assert first_difference(grid, grid.int()) == ()
    assert first_difference(grid, grid[:2]) == ()
    assert first_difference(grid > 3, grid > 4) == (1, 0)
    assert first_difference(torch.empty(0), torch.empty(0)) is None


def test_tensors_of_walks_nested_results() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    assert [id(t) for t in tensors_of({"x": [a, (b, None)], "y": 3})] == [id(a), id(b)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "malformed"),
        ("no_such_module_at_all:f", "cannot load"),
        ("math:no_such_function", "cannot load"),
        ("math:pi", "is a float"),
    ],
)
def test_load_maker_bad_spec_is_refused(spec: str, message: str) -> None:
    with pytest.raises(MegaMoeConfigError, match=message):
        load_maker(spec)


def test_load_maker_passes_the_device_to_those_who_take_it() -> None:
    assert load_maker("trtllm_megamoe.graph.planted:faulty_step")(CPU).devices() == [CPU]
    with pytest.raises(MegaMoeConfigError, match="StepUnderTest or a callable"):
        as_step(3)


def test_rehearsal_replays_in_place_functional_and_view_operators() -> None:
    x = torch.arange(6.0)
    backend = RehearsalBackend()
    recording = backend.capture(lambda: (x.view(2, 3).t() + 1, x.mul_(2), x.topk(2)))
    assert x.tolist() == [0, 2, 4, 6, 8, 10]
    x.copy_(torch.arange(6.0) * 10)
    recording.replay()
    shifted, doubled, (values, indices) = recording.outputs
    assert shifted.tolist() == [[1, 31], [11, 41], [21, 51]]
    assert doubled.tolist() == [0, 20, 40, 60, 80, 100] and doubled is x
    assert values.tolist() == [100, 80] and indices.tolist() == [5, 4]


# --- the self-check, rehearsed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "check", [selfcheck.check_facts, selfcheck.check_frozen, selfcheck.check_clean, selfcheck.check_planted]
)
def test_selfcheck_passes_as_rehearsal(check: Any) -> None:
    result = check(CPU)
    assert result["passed"], result


def test_selfcheck_planted_faults_cover_five_families() -> None:
    planted = selfcheck.check_planted(CPU)["planted"]
    assert sorted(planted.values()) == ["control", "shape", "sneaky", "sync", "transfer"]


def test_run_gpu_checks_without_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(MegaMoeUnavailableError, match="rehearses"):
        selfcheck.run_gpu_checks()
