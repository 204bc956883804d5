# SPDX-License-Identifier: Apache-2.0
"""The tactic table: round trip, versions, what serving takes from it, and that ranks always take the same."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tactics import SPACE, CountingCommunicator, tactic
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeRankDivergenceError
from trtllm_megamoe.tuning.table import TacticTable, TuningEnvironment, resolve_tactics
from trtllm_megamoe.tuning.tactic import Tactic
from trtllm_megamoe.tuning.tuner import Failure, TunedBucket

WATCHDOG_S = 60.0
WAIT_S = 20.0

HERE = TuningEnvironment(
    kernel="toy", arch="sm_90a", gpu_name="NVIDIA H200", num_sms=132, dsl_version="4.8.1", kernel_sources="5ca1ab1e",
    package_version="0.1.0",
)  # fmt: skip
LAYER = {"hidden_size": 7168, "intermediate_size": 2048, "combine_format": "bf16"}
OTHER_LAYER = {**LAYER, "combine_format": "fp8"}
BUCKETS = [16, 64, 256]
TUNED = [
    TunedBucket(16, tactic(16), 40.5, 50.25, 5, (Failure(tactic(64), 3, "RuntimeError: no"),)),
    TunedBucket(64, tactic(24), 41.5, None, 5),
]
HEURISTIC = {16: tactic(8), 64: tactic(8), 256: tactic(32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "tactics.json"
    TacticTable(HERE).put(LAYER, TUNED).save(target)
    return target


def resolve(path: Path | None, comm: Communicator | None = None, **options: Any) -> dict[int, Tactic]:
    given: dict[str, Any] = {"space": SPACE, "buckets": BUCKETS, "layer": LAYER, "here": HERE, "timeout_s": WAIT_S}
    resolved = resolve_tactics(path=path, comm=comm or single(), **(given | options))
    assert {bucket for bucket, one in resolved.items() if one.source == "heuristic"} >= {
        bucket for bucket, one in resolved.items() if one.tactic not in [tuned.tactic for tuned in TUNED]
    }
    return {bucket: one.tactic for bucket, one in resolved.items()}


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# -- the file


def test_table_survives_the_file(path: Path) -> None:
    table = TacticTable.load(path)
    assert table.environment == HERE
    assert table.of_layer(LAYER) == {tuned.bucket: tuned for tuned in TUNED}
    assert table.of_layer(OTHER_LAYER) == {}
    assert json.loads(path.read_text())["schema"] == "megamoe-tactics/1"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_table_put_replaces_a_bucket_and_keeps_the_rest() -> None:
    new = TunedBucket(64, tactic(32), 1.0, 2.0, 5)
    table = TacticTable(HERE).put(LAYER, TUNED).put(OTHER_LAYER, TUNED[:1]).put(LAYER, [new])
    assert table.of_layer(LAYER) == {16: TUNED[0], 64: new}
    assert table.of_layer(OTHER_LAYER) == {16: TUNED[0]}
    assert len(table.layers) == 2


def test_table_saved_to_nowhere_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MegaMoeConfigError, match="cannot write the tactic table"):
        TacticTable(HERE).save(tmp_path / "no" / "x.json")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema": "megamoe-bench/1"}', '{"schema": "megamoe-tactics/1"}',
     '{"schema": "megamoe-tactics/1", "environment": {"kernel": "toy"}, "layers": []}', "\udc80"],
    ids=["empty", "list", "no schema", "another schema", "no environment", "half an environment", "no text"],
)  # fmt: skip
def test_table_that_is_none_is_an_error_on_every_rank(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    errors: list[str] = []

    def body(comm: Communicator) -> None:
        try:
            resolve(path if comm.rank == 0 else None, comm)
        except MegaMoeConfigError as err:
            errors.append(str(err))

    run_threads(3, body, WATCHDOG_S)
    assert len(errors) == 3 and len(set(errors)) == 1 and str(path) in errors[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda bucket: bucket.pop("tactic"),
        lambda bucket: bucket["tactic"].pop("tile_rows"),
        lambda bucket: bucket["tactic"].update(tile_rows="256"),
        lambda bucket: bucket.update(bucket="16"),
        lambda bucket: bucket.update(extra=1),
    ],
    ids=["no tactic", "half a tactic", "text", "bucket as text", "extra field"],
)
def test_table_with_a_damaged_entry_is_an_error_that_names_the_file(path: Path, change: Any) -> None:
    edit(path, lambda document: change(document["layers"][0]["buckets"][0]))
    with pytest.raises(MegaMoeConfigError, match=r"tactics\.json is damaged"):
        TacticTable.load(path)
    with pytest.raises(MegaMoeConfigError, match=r"tactics\.json is damaged"):
        resolve(path)


def test_table_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MegaMoeConfigError, match="cannot read the tactic table"):
        resolve(tmp_path / "x.json")


# -- what serving takes


def test_lookup_without_a_table_is_the_heuristic(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(None) == HEURISTIC
    assert "no tactic table" in caplog.text


def test_lookup_takes_tuned_buckets_and_the_heuristic_for_the_rest(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(path) == {16: tactic(16), 64: tactic(24), 256: tactic(32)}
    assert "no entry for buckets [256]" in caplog.text
    assert "bucket 16: Tactic(" in caplog.text


def test_lookup_of_an_untuned_layer_is_the_heuristic(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(path, layer=OTHER_LAYER) == HEURISTIC
    assert "no entry for buckets [16, 64, 256]" in caplog.text


@pytest.mark.parametrize("fact", ["kernel", "arch"])
def test_lookup_with_a_hard_mismatch_is_the_heuristic_and_says_so(
    path: Path, caplog: pytest.LogCaptureFixture, fact: str
) -> None:
    assert resolve(path, here=replace(HERE, **{fact: "other"})) == HEURISTIC
    assert f"is not used: {fact}: table {getattr(HERE, fact)!r}, here 'other'" in caplog.text


@pytest.mark.parametrize("fact", ["gpu_name", "num_sms", "dsl_version", "kernel_sources", "package_version"])
def test_lookup_with_a_soft_mismatch_uses_the_table_and_says_so(
    path: Path, caplog: pytest.LogCaptureFixture, fact: str
) -> None:
    there: dict[str, Any] = {fact: 7 if fact == "num_sms" else "other"}
    assert resolve(path, here=replace(HERE, **there))[16] == tactic(16)
    assert "was made elsewhere and is used" in caplog.text and fact in caplog.text


def test_every_environment_fact_is_either_hard_or_soft() -> None:
    for fact, value in asdict(HERE).items():
        other = replace(HERE, **{fact: value + 1 if isinstance(value, int) else "other"})
        hard, soft = HERE.mismatches(other)
        assert len(hard) + len(soft) == 1
        assert (len(hard) == 1) == (fact in ("kernel", "arch"))


@pytest.mark.parametrize("schema", ["megamoe-tactics/0", "megamoe-tactics/2"])
def test_lookup_in_another_versions_table_is_the_heuristic_and_says_so(
    path: Path, caplog: pytest.LogCaptureFixture, schema: str
) -> None:
    edit(path, lambda document: document.update(schema=schema, layers="a form of its own"))
    assert resolve(path) == HEURISTIC
    assert f"is not used: schema is '{schema}'" in caplog.text
    with pytest.raises(MegaMoeConfigError, match="tune again"):
        TacticTable.load(path)


def test_lookup_of_an_illegal_tactic_is_the_heuristic_for_that_bucket(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(path, lambda document: document["layers"][0]["buckets"][0]["tactic"].update(token_widths=[256]))
    assert resolve(path) == {**HEURISTIC, 64: tactic(24)}
    assert "not legal on rank 0 (token width 256 exceeds 128)" in caplog.text


# -- ranks


def test_lookup_on_ranks_with_other_files_or_none_is_rank_0s(tmp_path: Path, path: Path) -> None:
    other = tmp_path / "other.json"
    TacticTable(HERE).put(LAYER, [TunedBucket(16, tactic(64), 1.0, 2.0, 5)]).save(other)
    files = [path, other, tmp_path / "missing.json", None]

    def body(comm: Communicator) -> tuple[dict[int, Tactic], int]:
        counting = CountingCommunicator(comm)
        return resolve(files[comm.rank], counting), counting.num_exchanges

    results = run_threads(4, body, WATCHDOG_S)
    assert all(found == {16: tactic(16), 64: tactic(24), 256: tactic(32)} for found, _ in results)
    assert len({exchanges for _, exchanges in results}) == 1


def test_lookup_that_one_rank_cannot_run_is_the_heuristic_on_all(path: Path) -> None:
    def body(comm: Communicator) -> dict[int, Tactic]:
        poor = replace(SPACE, why_illegal=lambda t, b: "no room" if t == tactic(16) else SPACE.why_illegal(t, b))
        return resolve(path, comm, space=poor if comm.rank == 2 else SPACE)

    assert run_threads(3, body, WATCHDOG_S) == [{**HEURISTIC, 64: tactic(24)}] * 3


def test_lookup_on_ranks_whose_heuristics_differ_is_refused_on_all() -> None:
    errors: list[str] = []

    def body(comm: Communicator) -> None:
        space = replace(SPACE, heuristic=lambda bucket: tactic(8 if comm.rank else 16))
        try:
            resolve(None, comm, space=space)
        except MegaMoeRankDivergenceError as err:
            errors.append(str(err))

    run_threads(2, body, WATCHDOG_S)
    assert len(errors) == 2 and len(set(errors)) == 1


def test_lookup_says_where_each_tactic_comes_from(path: Path) -> None:
    resolved = resolve_tactics(SPACE, BUCKETS, LAYER, HERE, path, single(), WAIT_S)
    assert {bucket: one.source for bucket, one in resolved.items()} == {16: "tuned", 64: "tuned", 256: "heuristic"}


def test_lookup_of_many_layers_warns_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            resolve(path)
    assert len([record for record in caplog.records if "no entry for buckets [256]" in record.getMessage()]) == 1
