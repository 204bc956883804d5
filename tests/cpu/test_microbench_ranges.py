# SPDX-License-Identifier: Apache-2.0
"""Ranges on a profiler's time line: named, nested and closed in order, also after an error; nothing without nvtx."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from microbench.cases import preset_case
from microbench.ranges import DOMAIN, marked
from microbench.routing import RoutingName, by_tokens
from microbench.runner import Point, Settings, run_points
from microbench.timing import Mode
from trtllm_megamoe.comm import single
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.layer import MegaMoELayer


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a stand-in nvtx was told, in order."""
    told: list[str] = []

    @contextlib.contextmanager
    def annotate(message: str, *, domain: str) -> Iterator[None]:
        told.append(f"open {domain}/{message}")
        try:
            yield
        finally:
            told.append(f"close {message}")

    module = ModuleType("nvtx")
    module.__spec__ = importlib.machinery.ModuleSpec("nvtx", None)
    module.annotate = annotate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return told


def test_ranges_open_and_close_in_order_with_their_names(events: list[str]) -> None:
    with marked("check 8 tokens"):
        events.append("checked")
    with marked("outer"), marked("inner"):
        events.append("timed")
    assert events == [
        f"open {DOMAIN}/check 8 tokens", "checked", "close check 8 tokens",
        f"open {DOMAIN}/outer", f"open {DOMAIN}/inner", "timed", "close inner", "close outer",
    ]  # fmt: skip


def test_range_closes_when_its_block_fails_and_the_error_goes_on(events: list[str]) -> None:
    with pytest.raises(MegaMoeConfigError, match="within"), marked("time 8 tokens"):
        raise MegaMoeConfigError("within")
    assert events == [f"open {DOMAIN}/time 8 tokens", "close time 8 tokens"]


def test_without_nvtx_there_are_no_ranges_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbench.ranges.importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "nvtx", None)  # an import would raise
    with marked("check"):
        reached = True
    assert reached
    with pytest.raises(MegaMoeConfigError), marked("check"):
        raise MegaMoeConfigError("goes on")


@pytest.mark.parametrize("is_right", [True, False])
def test_a_row_is_a_range_for_its_check_and_then_one_for_its_timing(
    is_right: bool, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong row is checked and never timed."""
    if not is_right:
        forward = MegaMoELayer.forward
        monkeypatch.setattr(MegaMoELayer, "forward", lambda *given: forward(*given) * 1.25)
    case = preset_case("qwen3-235b", scale_experts=8, scale_channels=64)
    settings = Settings(engine="cpu", activations="auto", warmup=0, iters=1, seed=0, steps=1, num_layers=1,
                        timeout_s=60.0, virtual_ranks=1)  # fmt: skip
    workload = by_tokens(RoutingName.RANDOM, 2, num_experts=case.num_experts, top_k=case.top_k, ep_size=1, seed=0)
    point = Point(workload=workload, combine_format=CombineFormat.BF16, mode=Mode.LOCKSTEP)
    (row,) = run_points(case, [point], settings, single(), on_row=lambda _: None)
    assert row["status"] == ("ok" if is_right else "failed")
    checked = [f"open {DOMAIN}/check random 2", "close check random 2"]
    timed = [f"open {DOMAIN}/time random 2", "close time random 2"]
    assert events == (checked + timed if is_right else checked)
