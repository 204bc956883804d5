# SPDX-License-Identifier: Apache-2.0
"""Proves the dynamic methods on this machine: planted faults are found, clean steps pass, facts behind rules hold.

`run_gpu_checks` is for a machine with a GPU; the same checks run as a rehearsal on the CPU in the test suite.
`python -m trtllm_megamoe.graph.selfcheck` prints the results as JSON and exits with 0 when all passed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.graph.dynamic.backends import Backend, backend_for
from trtllm_megamoe.graph.dynamic.capture import check_capture
from trtllm_megamoe.graph.dynamic.step import StepUnderTest, first_difference
from trtllm_megamoe.graph.dynamic.syncs import find_syncs
from trtllm_megamoe.graph.planted import faulty_step, frozen_step, planted_lines, planted_path
from trtllm_megamoe.graph.region import BucketedRegions, Region
from trtllm_megamoe.graph.static.scan import scan
from trtllm_megamoe.graph.toy_decoder import RegionDecoder, ToyDecoder, ToyShape


def check_planted(device: torch.device) -> dict[str, Any]:
    """All planted faults located by file and line in ONE watched run, and by the static scan."""
    wanted = planted_lines()
    report = find_syncs(faulty_step(device), device=device, warm_up=0)
    seen = {event.location.line for event in report.events if event.location.path == planted_path()}
    scanned = scan([planted_path()], hot=["planted:FaultyStep.__call__"])
    scanned_lines = {finding.line for finding in scanned.findings}
    broken = check_capture(faulty_step(device), device=device)
    first = min(wanted)
    return {
        "planted": {str(line): family for line, family in wanted.items()},
        "located": sorted(seen),
        "located_statically": sorted(scanned_lines),
        "first_broken_line": broken.broken_at.line if broken.broken_at else None,
        "passed": seen == set(wanted) and scanned_lines == set(wanted) and not broken.passed
        and broken.broken_at is not None and broken.broken_at.line == first,
    }  # fmt: skip


def check_frozen(device: torch.device) -> dict[str, Any]:
    """A host number that a graph freezes: no sync, no capture error, found by comparing replays."""
    report = check_capture(frozen_step(device), device=device)
    rounds = sorted({m.round for m in report.mismatches})
    synced = find_syncs(frozen_step(device), device=device)
    return {"problems": list(report.problems), "wrong_rounds": rounds, "passed": rounds == [1, 2] and synced.passed}


def toy_steps(device: torch.device) -> list[StepUnderTest]:
    """Both regions of the toy decoder as steps under test, in the middle of a sequence."""
    decoder = ToyDecoder(ToyShape(), device)
    decoder.io.upload([3, 5, 7], [0, 1, 2])
    for length in range(1, 7):
        decoder.step(length + 2)

    def draw(generator: torch.Generator) -> dict[str, torch.Tensor]:
        positions = torch.randint(-1, 9, (decoder.shape.num_rows,), generator=generator)
        tokens = torch.randint(0, decoder.shape.vocab_size, (decoder.shape.num_rows,), generator=generator)
        return {"tokens": tokens, "positions": positions}

    inputs = {"tokens": decoder.io.tokens, "positions": decoder.io.positions}
    results = [decoder.query, decoder.fetched, decoder.fetched_valid, decoder.logits, *decoder.state()[:2]]
    state = [t for t in decoder.state() if t is not decoder.io.tokens and t is not decoder.io.positions]

    def region(function: Callable[[], None]) -> StepUnderTest:
        def run() -> list[torch.Tensor]:
            function()
            return [*results, *inputs.values()]

        return StepUnderTest(run, inputs, state, draw, name=f"toy decoder, {function.__name__}")

    return [region(decoder.before_attention), region(decoder.after_attention)]


def check_clean(device: torch.device) -> dict[str, Any]:
    """The toy decoder's regions neither synchronise nor differ between eager and replay."""
    failures = []
    for step in toy_steps(device):
        syncs = find_syncs(step, device=device)
        capture = check_capture(step, device=device, rounds=4)
        failures += [report.as_text() for report in (syncs, capture) if not report.passed]
        if capture.notes:
            failures.append(f"{step.name}: {capture.notes[0]}")
    return {"failures": failures, "passed": not failures}


def check_decode(
    device: torch.device, num_steps: int = 200, backends: Callable[[], Backend] | None = None
) -> dict[str, Any]:
    """The toy decoder, eager and as two captured regions, bit-equal at every step: compressor boundaries included."""
    eager, regions = (ToyDecoder(ToyShape(), device) for _ in range(2))
    captured = RegionDecoder(regions, backends)
    captured.capture()
    emitted = [0, 0]
    for decoder in (eager, regions):
        decoder.sampler.temperature.copy_(torch.tensor([0.0, 0.7, 1.0, 1.3]))
        decoder.sampler.penalty.copy_(torch.tensor([1.0, 1.2, 1.0, 1.1]))
        decoder.sampler.seeds.copy_(torch.arange(4))
        decoder.io.upload([3, 5], [0, 0])
    tokens: set[int] = set()
    for number in range(num_steps):
        if number == num_steps // 4:  # two requests join, with tokens of their own
            for decoder in (eager, regions):
                decoder.io.upload([3, 5, 7, 11], [number, number, 0, 0])
        eager.step(number + 1)
        captured.step(number + 1)
        for index, (left, right) in enumerate(zip(_visible(eager), _visible(regions), strict=True)):
            where = first_difference(left, right)
            if where is not None:
                return {"passed": False, "step": number, "tensor": index, "coordinate": list(where)}
        tokens.update(eager.io.tokens.tolist())
        emitted = [int(c.num_entries(eager.io.positions - 1).max()) for c in eager.compressors]
    expected = [num_steps // ratio for ratio in eager.shape.ratios]
    return {
        "steps": num_steps, "captured": [r.is_captured for r in captured.regions], "distinct_tokens": len(tokens),
        "compressed_entries": emitted, "passed": emitted == expected and len(tokens) > 20,
    }  # fmt: skip


def _visible(decoder: ToyDecoder) -> list[torch.Tensor]:
    return [decoder.logits, decoder.attended, *decoder.state()]


def check_buckets(device: torch.device, backends: Callable[[], Backend] | None = None) -> dict[str, Any]:
    """Several captured buckets over one scratch and one pool, replayed in any order, equal to eager."""
    x = torch.zeros(8, 16, device=device)
    scratch, out = torch.zeros(8, 16, device=device), torch.zeros(8, 16, device=device)
    weight = torch.linspace(-1, 1, 256, device=device).view(16, 16)

    def make(bucket: int) -> Region:
        def run() -> torch.Tensor:
            torch.matmul(x[:bucket], weight, out=scratch[:bucket])
            torch.relu_(scratch[:bucket])
            return torch.matmul(scratch[:bucket], weight, out=out[:bucket])

        return Region(run, device, backend=backends() if backends else None, name=f"bucket {bucket}")

    regions = BucketedRegions([1, 4, 8], make)
    regions.capture()
    wrong = []
    for round_index, rows in enumerate([3, 8, 1, 0, 5, 4, 2]):
        bucket = regions.select(rows)
        x.copy_(torch.full((8, 16), float(round_index + 1)) * torch.arange(16))
        scratch.fill_(float("nan"))  # a launch depends on nothing that an earlier one left
        result = regions.region(bucket).run().clone()
        if first_difference(result, (x[:bucket] @ weight).relu() @ weight) is not None:
            wrong.append(rows)
    return {"wrong": wrong, "passed": not wrong}


def facts(device: torch.device) -> dict[str, tuple[Callable[[], Any], bool]]:
    """Facts about PyTorch that the static rules rest on: name -> (code, whether it synchronises)."""
    x = torch.linspace(-1, 1, 32, device=device).view(4, 8)
    ids = torch.arange(4, device=device)
    mask = x > 0
    rows = mask.any(dim=1)
    counts = torch.ones(4, dtype=torch.int64, device=device)
    scalar = ids.argmax()
    one_hot = torch.nn.functional.one_hot
    return {
        "t.item()": (lambda: x.sum().item(), True),
        "bool(t)": (lambda: bool(x.any()), True),
        "x[mask]": (lambda: x[mask], True),
        "x[mask] = 0.0": (lambda: x.clone().__setitem__(mask, 0.0), False),
        "x[mask] = tensor": (lambda: x.clone().__setitem__(rows, x[:1]), True),
        "x[ids]": (lambda: x[ids], False),
        "x[0-dimensional tensor]": (lambda: x[scalar], True),
        "x[:t]": (lambda: x[:scalar], True),
        "nonzero": (lambda: mask.nonzero(), True),
        "nonzero_static": (lambda: torch.nonzero_static(mask, size=4), False),
        "unique": (lambda: torch.unique(ids), True),
        "bincount with minlength": (lambda: torch.bincount(ids, minlength=4), True),
        "repeat_interleave": (lambda: ids.repeat_interleave(counts), True),
        "repeat_interleave with output_size": (lambda: ids.repeat_interleave(counts, output_size=4), False),
        "one_hot": (lambda: one_hot(ids), True),
        "one_hot with num_classes": (lambda: one_hot(ids, num_classes=4), False),
        "torch.equal": (lambda: torch.equal(x, x + 1), True),  # of a tensor with itself it answers without looking
        "isin": (lambda: torch.isin(ids, counts), False),
        "masked_fill": (lambda: x.masked_fill(mask, 0.0), False),
        "topk": (lambda: x.topk(2, dim=1), False),
        "iteration over rows": (lambda: list(x), False),
        "max of two tensors": (lambda: max(x[0, 0], x[0, 1]), True),
        "f-string": (lambda: f"{x.sum()}", True),
        "in": (lambda: 3 in ids, True),
        "multinomial": (lambda: torch.multinomial(x.abs(), 1), False),
    }


def check_facts(device: torch.device) -> dict[str, Any]:
    """Facts that do not hold here; a rule that rests on one of them would be wrong."""
    wrong = {}
    for name, (code, expected) in facts(device).items():
        try:
            seen: bool | str = not find_syncs(StepUnderTest(code, name=name), device=device).passed
        except (RuntimeError, NotImplementedError) as error:  # this version of PyTorch cannot do it at all
            seen = f"{type(error).__name__}: {error}"
        if seen != expected:
            wrong[name] = {"expected": expected, "seen": seen}
    return {"checked": len(facts(device)), "wrong": wrong, "passed": not wrong}


def run_checks(device: torch.device) -> dict[str, Any]:
    """Every check of this module on one device.

    Returns:
        Result of each check by name, the device, and `passed` for all together.
    """

    def backends() -> Backend:
        return backend_for(device)

    results: dict[str, Any] = {
        "facts": check_facts(device),
        "frozen": check_frozen(device),
        "clean": check_clean(device),
        "buckets": check_buckets(device, backends),
        "decode": check_decode(device, backends=backends),
        # Last: a capture that breaks may leave the device's generator unusable for later captures.
        "planted": check_planted(device),
    }
    passed = all(result["passed"] for result in results.values())
    return {"schema": "graph-selfcheck/1", "device": str(device), **results, "passed": passed}


def run_gpu_checks() -> dict[str, Any]:
    """:func:`run_checks` on the current CUDA device.

    Raises:
        MegaMoeUnavailableError: no CUDA GPU is visible.
    """
    if not torch.cuda.is_available():
        raise MegaMoeUnavailableError("no CUDA GPU is visible; run_checks(torch.device('cpu')) rehearses the checks")
    device = torch.device("cuda", torch.cuda.current_device())
    return {**run_checks(device), "gpu": torch.cuda.get_device_name(device)}


def main() -> int:
    """Check the GPU at hand, else rehearse."""
    result = run_gpu_checks() if torch.cuda.is_available() else run_checks(torch.device("cpu"))
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
