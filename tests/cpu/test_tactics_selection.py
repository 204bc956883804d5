# SPDX-License-Identifier: Apache-2.0
"""From a layer's configuration and a tactic table to the kernels of its buckets, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.layer_cases import make_case
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import hopper
from trtllm_megamoe.kernels.selection import environment, select_tactics, tuning_target
from trtllm_megamoe.kernels.tactics import tactic_of, tile_of
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.tuning.table import TacticTable
from trtllm_megamoe.tuning.tuner import TunedBucket
from vendored_kernels.sm90.config import TILES

WATCHDOG_S = 60.0
HERE = environment("NVIDIA H200", 132)
BUCKETS = BucketLadder.for_cap(1024).rungs
WIDE = tactic_of(TILES["n128"], 5)


def config_of(**changes: object) -> MegaMoeConfig:
    shape = {
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "num_experts": 256,
        "top_k": 8,
        "max_tokens_per_rank": 1024,
    }
    return MegaMoeConfig.create(**(shape | changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table for 8 ranks, nvfp4 mode, bucket 64."""
    _, facts = tuning_target(config_of(), ActivationMode.NVFP4, 8, 132)
    tuned = TunedBucket(64, WIDE, 1.0, 2.0, 5)
    target = tmp_path / "tactics.json"
    TacticTable(HERE).put(facts, [tuned]).save(target)
    return target


def test_without_a_table_every_mode_runs_the_heuristics_tiles() -> None:
    selection = select_tactics(config_of(), BUCKETS, HERE, single(), ep_size=8)
    assert set(selection) == set(ActivationMode)
    for mode, chosen in selection.items():
        tiles = hopper.tiles_of_ladder(hopper.layer_spec(config_of(), 8, mode), BucketLadder(BUCKETS), 132)
        assert {bucket: tile_of(one.tactic) for bucket, one in chosen.items()} == tiles
        assert {one.source for one in chosen.values()} == {"heuristic"}
    assert set(select_tactics(config_of(activations="bf16"), BUCKETS, HERE, single())) == {ActivationMode.BF16}


def test_table_from_the_environment_serves_its_layer_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_MEGAMOE_TACTICS", str(path))
    selection = select_tactics(config_of(), BUCKETS, HERE, single(), ep_size=8)
    tuned = {
        (mode, bucket): one.tactic
        for mode, chosen in selection.items()
        for bucket, one in chosen.items()
        if one.source == "tuned"
    }
    assert tuned == {(ActivationMode.NVFP4, 64): WIDE}
    for config, ep_size in ((config_of(), 4), (config_of(combine_format="fp8"), 8), (config_of(top_k=6), 8)):
        other = select_tactics(config, BUCKETS, HERE, single(), ep_size=ep_size)
        assert all(one.source == "heuristic" for chosen in other.values() for one in chosen.values())


def test_table_of_another_kernel_family_or_architecture_is_not_used(path: Path) -> None:
    there = replace(HERE, arch="sm_100a")
    selection = select_tactics(config_of(), BUCKETS, there, single(), ep_size=8, path=path)
    assert all(one.source == "heuristic" for chosen in selection.values() for one in chosen.values())


def test_ranks_with_different_tables_run_the_same_tactics(path: Path, tmp_path: Path) -> None:
    def body(comm: Communicator) -> object:
        mine = path if comm.rank == 0 else tmp_path / f"missing-{comm.rank}.json"
        return select_tactics(config_of(), BUCKETS, HERE, comm, path=mine)

    selections = run_threads(8, body, WATCHDOG_S)
    assert all(selection == selections[0] for selection in selections)
    assert selections[0][ActivationMode.NVFP4][64].tactic == WIDE


def test_pin_tactic_on_an_engine_without_kernels_is_refused() -> None:
    case = make_case("uniform", ep_size=1)
    with MegaMoELayer(case.config) as layer:
        layer.load_weights(case.weights)
        bucket = layer.ladder.rungs[0]
        assert layer.launch_choice(bucket) is None
        with pytest.raises(MegaMoeUnavailableError, match="'cpu' has no tactics"):
            layer.pin_tactic(bucket, WIDE)
        with pytest.raises(MegaMoeConfigError, match="no bucket of this layer"):
            layer.pin_tactic(bucket + 1, WIDE)
