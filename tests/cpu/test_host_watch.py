# SPDX-License-Identifier: Apache-2.0
"""A failed launch during graph replays is said in the log, once, and nothing else is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import torch

from trtllm_megamoe.comm import single
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.host import watch
from trtllm_megamoe.host.watch import FailureWatch
from trtllm_megamoe.host.workspaces import WorkspacePool
from trtllm_megamoe.layer import build_workspace

CONFIG = MegaMoeConfig.create(
    hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, max_tokens_per_rank=4, engine="cpu"
)
EXPIRED = torch.tensor([1, 3, 1, 0, 4, 5, 4, 0])
POLL_S = 0.01


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(POLL_S)


def test_watch_logs_a_failure_once_and_ends_with_its_last_workspace(caplog: pytest.LogCaptureFixture) -> None:
    failing, sound = (build_workspace(CONFIG, single()) for _ in range(2))
    watching = FailureWatch(POLL_S)
    with caplog.at_level(logging.ERROR, watch.__name__):
        watching.add(failing, 2.5)
        watching.add(sound, 2.5)
        failing.error_record[:] = EXPIRED
        until(lambda: bool(caplog.records))
        time.sleep(20 * POLL_S)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    text = caplog.records[0].getMessage()
    assert "rank 3: waited 2.5 s" in text and "in launch 5: expected 5, seen 4" in text
    assert text.startswith("results of graphs replayed since are not valid either")
    watching.remove(failing)
    assert watching.is_watching
    watching.remove(sound)
    assert not watching.is_watching
    for workspace in (failing, sound):
        workspace.close()


def test_pool_watches_what_it_has_built(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watch.FailureWatch.__init__, "__defaults__", (POLL_S,))
    pool = WorkspacePool()
    workspace = pool.acquire(CONFIG, comm := single())
    assert pool.acquire(CONFIG, comm) is workspace
    with caplog.at_level(logging.ERROR, watch.__name__):
        workspace.error_record[:] = EXPIRED
        until(lambda: bool(caplog.records))
    pool.release(workspace)
    pool.release(workspace)
    assert not pool._watch.is_watching
