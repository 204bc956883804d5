# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: order, bounds, failures and early ends, with reads that wait for the test instead of for a disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import model_config, spell, write_checkpoint
from tests.helpers.synthetic import make_layer_tensors, seeded
from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.weights import read_ahead
from trtllm_megamoe.weights.checkpoint import Checkpoint
from trtllm_megamoe.weights.read_ahead import AHEAD_BYTES, LARGE_BYTES, Read, read_in_order
from trtllm_megamoe.weights.spec import parse_name

WAIT_S = 20.0


class Reads:
    """Makes reads that note who ran them, and that may be held up."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.threads: dict[int, str] = {}
        self.held: dict[int, threading.Event] = {}
        self.seen = threading.Condition()

    def make(self, *sizes: int) -> Iterator[torch.Tensor]:
        return read_in_order([Read(size, partial(self._run, index)) for index, size in enumerate(sizes)])

    def _run(self, index: int) -> torch.Tensor:
        with self.seen:
            self.begun.append(index)
            self.threads[index] = threading.current_thread().name
            self.seen.notify_all()
        if index in self.held:
            assert self.held[index].wait(WAIT_S)
        return torch.tensor(index)

    def wait_for(self, *indices: int) -> None:
        with self.seen:
            assert self.seen.wait_for(lambda: set(indices) <= set(self.begun), WAIT_S)


@pytest.fixture(autouse=True)
def _no_reader_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(read_ahead, "READERS", 2)
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("megamoe-read")]


def test_read_ahead_keeps_the_order_when_later_reads_end_first() -> None:
    reads = Reads()
    reads.held[0] = threading.Event()
    results = reads.make(LARGE_BYTES, LARGE_BYTES, 4, LARGE_BYTES, 4, 4)
    threading.Thread(target=lambda: (reads.wait_for(1, 3), reads.held[0].set())).start()  # 0 ends after 1 and 3
    assert [int(result) for result in results] == [0, 1, 2, 3, 4, 5]
    assert {index for index, name in reads.threads.items() if name.startswith("megamoe-read")} == {0, 1, 3}


def test_read_ahead_stays_within_its_bytes() -> None:
    reads = Reads()
    quarter = AHEAD_BYTES // 4
    results = reads.make(*[quarter] * 12)
    for taken in range(1, 9):
        next(results)
        reads.wait_for(*range(taken + 3))
        assert len(reads.begun) <= taken + 3  # the one in the caller's hands and three that wait
    results.close()


def test_read_ahead_reads_what_is_larger_than_the_bound() -> None:
    assert [int(result) for result in Reads().make(AHEAD_BYTES + 1, AHEAD_BYTES * 3, 4)] == [0, 1, 2]


def test_read_ahead_without_large_reads_is_lazy() -> None:
    reads = Reads()
    results = reads.make(4, LARGE_BYTES - 1, 4)
    assert reads.begun == [] and int(next(results)) == 0 and reads.begun == [0]
    assert [int(result) for result in results] == [1, 2]
    assert not [name for name in reads.threads.values() if name.startswith("megamoe-read")]


def test_read_ahead_without_threads_is_lazy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "READERS", 0)
    reads = Reads()
    results = reads.make(LARGE_BYTES, 4, LARGE_BYTES)
    assert int(next(results)) == 0 and reads.begun == [0]
    assert [int(result) for result in results] == [1, 2]


def test_read_ahead_failure_comes_in_its_turn_and_ends_the_rest() -> None:
    def fail() -> torch.Tensor:
        raise OSError("gone")

    reads = Reads()
    good = [Read(LARGE_BYTES, partial(reads._run, index)) for index in range(2)]
    late = [Read(LARGE_BYTES, partial(reads._run, index)) for index in range(2, 400)]
    results = read_in_order([*good, Read(LARGE_BYTES, fail), *late])
    assert [int(next(results)), int(next(results))] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(results)
    assert len(reads.begun) <= 3 + AHEAD_BYTES // LARGE_BYTES


def test_read_ahead_closed_early_begins_nothing_more() -> None:
    reads = Reads()
    results = reads.make(*[LARGE_BYTES] * 400)
    next(results)
    results.close()
    assert len(reads.begun) <= 1 + AHEAD_BYTES // LARGE_BYTES


def _checkpoint(tmp_path: Path, shards: int) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    tensors = make_layer_tensors(seeded(1), 64, 32, 4)
    names = spell(tensors, "model.layers.0.mlp.experts.", hf=True)
    return Checkpoint.open(
        write_checkpoint(tmp_path, names, model_config(64, 32, 4, 2, layers=1), shards=shards)
    ), tensors


def _open_files() -> list[str]:
    return [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]


@pytest.mark.parametrize("shards", [1, 3])
def test_checkpoint_read_by_threads_yields_the_same_and_closes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    monkeypatch.setattr(read_ahead, "LARGE_BYTES", 64)
    checkpoint, tensors = _checkpoint(tmp_path, shards)
    got = {parse_name(name).key.name: tensor for name, tensor in checkpoint.iter_layer(0)}  # type: ignore[union-attr]
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[n].reshape(-1).view(torch.uint8), tensors[n].reshape(-1).view(torch.uint8)) for n in got)
    stream = checkpoint.iter_layer(0)
    next(stream)
    stream.close()
    assert not any(".safetensors" in name for name in _open_files())


def test_checkpoint_cut_short_while_read_by_threads_is_an_error_that_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "LARGE_BYTES", 64)
    checkpoint, _ = _checkpoint(tmp_path, 1)
    path = next(tmp_path.rglob("*.safetensors"))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(MegaMoeWeightError, match=r"truncated while reading model\.layers\.0"):
        list(checkpoint.iter_layer(0))
    assert not any(".safetensors" in name for name in _open_files())
