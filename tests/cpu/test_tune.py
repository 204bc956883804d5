# SPDX-License-Identifier: Apache-2.0
"""`tune` without a GPU: the runner over a layer that keeps a diary, and the command over scripted times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cli import invoke
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cli import tune as tune_command
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.registry import EngineChoice
from trtllm_megamoe.kernels.selection import environment
from trtllm_megamoe.kernels.tactics import tactic_space, tile_of
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.tuning.runner import LayerRunner
from trtllm_megamoe.tuning.table import TacticTable
from trtllm_megamoe.tuning.tactic import Tactic
from trtllm_megamoe.tuning.tuner import tune
from trtllm_megamoe.tuning.workload import random_step, random_weights
from vendored_kernels.common.layer import LayerSpec

WATCHDOG_S = 60.0
WAIT_S = 20.0
HERE = environment("NVIDIA H200", 132)
SPACE = tactic_space(LayerSpec(4096, 1536, 16, 8, "bf16"), 132)
SMALL = {"hidden_size": 128, "intermediate_size": 64, "num_experts": 8, "top_k": 2, "max_tokens_per_rank": 16}


class Diary:
    """A layer whose launch takes as long as its tile's width, or fails where it is told to."""

    def __init__(self, fails: Callable[[str], bool] = lambda tile: False) -> None:
        self._fails = fails
        self.pinned: dict[int, Tactic] = {}
        self.is_broken = self.is_closed = False

    def pin_tactic(self, bucket: int, tactic: Tactic) -> None:
        if self._fails("prepare " + tile_of(tactic).name):
            raise OSError("no such kernel")
        self.pinned[bucket] = tactic

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        max_tokens_over_ranks: int | None = None,
    ) -> torch.Tensor:
        assert not self.is_broken and not self.is_closed, "a broken layer was launched again"
        assert max_tokens_over_ranks is not None and x.shape[0] == max_tokens_over_ranks
        self.last = self.pinned[max_tokens_over_ranks]
        if self._fails("measure " + tile_of(self.last).name):
            self.is_broken = True
            raise RuntimeError("the launch failed")
        return x

    def raise_if_failed(self) -> None:
        if self._fails("replay " + tile_of(self.last).name):
            self.is_broken = True
            raise RuntimeError("a replay failed")

    def close(self) -> None:
        self.is_closed = True


def make_step(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(num_tokens, 1), torch.zeros(num_tokens, 1), torch.zeros(num_tokens, 1)


class Built:
    """A runner over diaries, and every diary it has built."""

    def __init__(self, comm: Communicator, fails: Callable[[str], bool] = lambda tile: False) -> None:
        self.layers: list[Diary] = []

        def build() -> Diary:
            self.layers.append(Diary(fails))
            return self.layers[-1]

        def timer(run: Callable[[], object], comm: Communicator, timeout_s: float) -> float:
            comm.barrier(timeout_s)
            run()
            last = self.layers[-1].last
            return 200.0 - last.token_widths[-1] + last.fc1_lag + last.tile_rows / 1000

        self.runner = LayerRunner(build, make_step, comm, WAIT_S, timer)


def test_runner_measures_every_candidate_of_a_bucket_on_one_layer() -> None:
    built = Built(single())
    with built.runner as runner:
        (tuned,) = tune(SPACE, [64], runner, single(), WAIT_S)
    assert tuned.failures == ()
    assert tile_of(tuned.tactic).name == "n128", "the widest is the fastest in this script"
    assert len(built.layers) == 1 and built.layers[0].is_closed


def test_runner_takes_no_time_of_replays_that_failed() -> None:
    """They leave at once: the shortest time would win."""
    built = Built(single(), lambda step: step == "replay n128")
    (tuned,) = tune(SPACE, [64], built.runner, single(), WAIT_S)
    assert [(tile_of(one.tactic).name, one.reason) for one in tuned.failures] == [
        ("n128", "RuntimeError: a replay failed")
    ]
    assert tile_of(tuned.tactic).name == "n64" and len(built.layers) == 2


def test_runner_builds_a_new_layer_after_a_failed_launch_and_goes_on() -> None:
    built = Built(single(), lambda step: step == "measure n128")
    (tuned,) = tune(SPACE, [64], built.runner, single(), WAIT_S)
    assert [(tile_of(failure.tactic).name, failure.reason) for failure in tuned.failures] == [
        ("n128", "RuntimeError: the launch failed")
    ]
    assert tile_of(tuned.tactic).name == "n64", "the next best, measured on the new layer"
    assert len(built.layers) == 2 and built.layers[0].is_closed


def test_ranks_agree_whatever_fails_on_one_of_them() -> None:
    def body(comm: Communicator) -> Any:
        def fails(step: str) -> bool:
            return (comm.rank, step) in ((1, "prepare n128"), (2, "measure n64"))

        built = Built(comm, fails)
        return tune(SPACE, [16, 64], built.runner, comm, WAIT_S), len(built.layers)

    outcomes = run_threads(3, body, WATCHDOG_S)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for tuned in outcomes[0][0]:
        assert {(tile_of(failure.tactic).name, failure.rank) for failure in tuned.failures} == {("n128", 1), ("n64", 2)}
        assert tile_of(tuned.tactic).name == "h64"
    assert outcomes[0][1] == 3, "all ranks build anew together, once per failed launch"


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_workload_loads_and_runs_in_a_real_layer(activations: str) -> None:
    config = MegaMoeConfig.create(**SMALL, activations=activations, engine="cpu")
    with MegaMoELayer(config) as layer:
        layer.load_weights(random_weights(config))
        x, ids, weights = random_step(config, 16, 0, layer.device)
        assert all(len(set(row)) == config.top_k for row in ids.tolist())
        out = layer.forward(x, ids, weights, 16)
    assert torch.isfinite(out).all()
    assert (out != 0).any(dim=1).all()


# -- the command


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Built]:
    """A machine with an H200 in its word, and diaries instead of layers; every runner that was made."""
    made: list[Built] = []

    def make_runner(config: MegaMoeConfig, comm: Communicator) -> LayerRunner:
        made.append(Built(comm))
        return made[-1].runner

    monkeypatch.setattr(tune_command, "choose_engine", lambda *_: EngineChoice("cuda", "asked for"))
    monkeypatch.setattr(tune_command, "gpu_environment", lambda: HERE)
    monkeypatch.setattr(tune_command, "make_runner", make_runner)
    return made


ONE = ("--preset", "qwen3-235b", "--share-of-ep", "8", "--max-tokens-per-rank", "64")


def test_command_twice_measures_once_and_then_looks_up(gpu: list[Built], tmp_path: Path) -> None:
    path = tmp_path / "tactics.json"
    first = invoke("tune", *ONE, "--out", path)
    assert first.exit_code == 0, first.output
    known, buckets = len(BucketLadder.for_cap(64).rungs), len(BucketLadder.for_cap(8192).rungs)
    assert first.output.count(f"{known} of {known} buckets measured") == 2, "both activation modes"
    assert len(gpu) == 2
    table = TacticTable.load(path)
    assert table.environment == HERE
    assert [facts["activation_mode"] for facts, _ in table.layers] == ["nvfp4", "bf16"]
    assert all((facts["num_local_experts"], facts["ep_size"]) == (16, 1) for facts, _ in table.layers)
    content = path.read_bytes()

    second = invoke("tune", *ONE, "--out", path)
    assert second.exit_code == 0, second.output
    assert second.output.count(f"0 of {known} buckets measured") == 2
    assert len(gpu) == 2, "no layer was built"
    assert path.read_bytes() == content

    more = invoke("tune", "--preset", "qwen3-235b", "--share-of-ep", "8", "--activations", "bf16", "--out", path)
    assert 0 < known < buckets
    assert f"{buckets - known} of {buckets} buckets measured" in more.output, "the rungs below 64 are known"
    assert len(TacticTable.load(path).layers) == 2


def test_command_that_is_interrupted_keeps_finished_layers(
    gpu: list[Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make = tmp_path / "tactics.json", tune_command.make_runner

    def once(config: MegaMoeConfig, comm: Communicator) -> LayerRunner:
        if gpu:
            raise RuntimeError("power cut")
        return make(config, comm)

    monkeypatch.setattr(tune_command, "make_runner", once)
    assert invoke("tune", *ONE, "--out", path).exit_code == 3
    assert len(TacticTable.load(path).layers) == 1


def test_command_refuses_to_mix_environments(gpu: list[Built], tmp_path: Path) -> None:
    path = tmp_path / "tactics.json"
    TacticTable(environment("NVIDIA H100 80GB HBM3", 132)).save(path)
    content = path.read_bytes()
    result = invoke("tune", *ONE, "--out", path)
    assert result.exit_code == 2
    assert "made elsewhere" in result.output and "H100" in result.output
    assert path.read_bytes() == content and not gpu


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", "qwen3-235b"), "--out FILE"),
        (("--out", "t.json"), "--preset"),
        (("--preset", "qwen3-235b", "--share-of-ep", "3", "--out", "t.json"), "divide 128 experts"),
        (("--preset", "qwen3-235b", "--share-of-ep", "32", "--out", "t.json"), "top-k 8"),
        ((*ONE, "--bucket", "17", "--out", "t.json"), "[17] is not in the ladder"),
    ],
)
def test_command_says_what_is_wrong(
    gpu: list[Built], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.delenv("TRTLLM_MEGAMOE_TACTICS", raising=False)
    monkeypatch.chdir(tmp_path)
    result = invoke("tune", *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where no GPU is")
def test_command_without_a_gpu_says_so(tmp_path: Path) -> None:
    result = invoke("tune", *ONE, "--out", tmp_path / "t.json")
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_table_is_json_that_names_its_schema(gpu: list[Built], tmp_path: Path) -> None:
    path = tmp_path / "tactics.json"
    assert invoke("tune", *ONE, "--activations", "bf16", "--bucket", "16", "--out", path).exit_code == 0
    document = json.loads(path.read_text())
    assert document["schema"] == "megamoe-tactics/1"
    assert [bucket["bucket"] for bucket in document["layers"][0]["buckets"]] == [16]
