# SPDX-License-Identifier: Apache-2.0
"""The tactic table: what tuning found, as a versioned JSON file, and the lookup that serving does at start-up.

Rules of a lookup, each outcome logged:

- hard mismatch (schema, kernel family, architecture): the table is not used, heuristics run;
- soft mismatch (everything else about the machine and the build): the table is used, times may differ;
- no entry, or an entry that the legality predicate refuses: the heuristic runs that bucket.

Rank 0 reads the file; every rank must be able to run what it found, or all take the heuristic.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trtllm_megamoe.agreement import require_rank_identical
from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.tuning.tactic import DEFAULT_TACTIC, Tactic, TacticSpace
from trtllm_megamoe.tuning.tuner import Failure, TunedBucket

logger = logging.getLogger(__name__)

SCHEMA = "megamoe-tactics/1"

TacticSource = Literal["heuristic", "tuned", "pinned"]


class _ForeignTableError(Exception):
    """The file is a table, but of a version this code does not read."""


@dataclass(frozen=True, slots=True)
class TuningEnvironment:
    """Where a table was made, or where it is used. The first two are hard facts, the others soft."""

    kernel: str
    arch: str
    gpu_name: str
    num_sms: int
    dsl_version: str
    kernel_sources: str
    package_version: str

    def mismatches(self, here: TuningEnvironment) -> tuple[list[str], list[str]]:
        """Facts in which this (the table's) environment differs from `here`, as (hard, soft) lines."""
        hard: list[str] = []
        soft: list[str] = []
        for name, value in asdict(self).items():
            if value != getattr(here, name):
                line = f"{name}: table {value!r}, here {getattr(here, name)!r}"
                (hard if name in ("kernel", "arch") else soft).append(line)
        return hard, soft


@dataclass(frozen=True, slots=True)
class ResolvedTactic:
    """What a bucket runs, and who says so: the heuristic, a table that tuning wrote, or a caller that pinned it."""

    tactic: Tactic
    source: TacticSource


@dataclass(frozen=True, slots=True)
class TacticTable:
    """Outcomes of one environment, for any number of layers; a layer is the facts that change its times."""

    environment: TuningEnvironment
    layers: Sequence[tuple[Mapping[str, Any], Sequence[TunedBucket]]] = ()

    def of_layer(self, layer: Mapping[str, Any]) -> dict[int, TunedBucket]:
        """Outcomes of one layer by bucket; empty where it was not tuned."""
        return {tuned.bucket: tuned for facts, outcomes in self.layers if facts == layer for tuned in outcomes}

    def put(self, layer: Mapping[str, Any], outcomes: Sequence[TunedBucket]) -> TacticTable:
        """A table in which these outcomes replace or join the layer's."""
        merged = {**self.of_layer(layer), **{tuned.bucket: tuned for tuned in outcomes}}
        others = [(facts, found) for facts, found in self.layers if facts != layer]
        return TacticTable(self.environment, [*others, (dict(layer), [merged[bucket] for bucket in sorted(merged)])])

    def save(self, path: Path) -> None:
        """Write the file as a whole or not at all.

        Raises:
            MegaMoeConfigError: It cannot be written.
        """
        document = {
            "schema": SCHEMA,
            "environment": asdict(self.environment),
            "layers": [
                {"layer": dict(facts), "buckets": [_bucket_to_json(tuned) for tuned in outcomes]}
                for facts, outcomes in self.layers
            ],
        }
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, path)
        except OSError as err:
            raise MegaMoeConfigError(f"cannot write the tactic table {path}: {err}") from None
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> TacticTable:
        """Read a file.

        Raises:
            MegaMoeConfigError: It cannot be read, is no table, or is one of another version.
        """
        try:
            return _read(path)
        except _ForeignTableError as err:
            raise MegaMoeConfigError(f"tactic table {path}: {err}; tune again with this version") from None


def resolve_tactics(
    space: TacticSpace,
    buckets: Sequence[int],
    layer: Mapping[str, Any],
    here: TuningEnvironment,
    path: Path | None,
    comm: Communicator,
    timeout_s: float,
) -> dict[int, ResolvedTactic]:
    """The tactic of every bucket for serving: from the table where it may be used, else from the heuristic. Collective.

    Measures nothing. Every rank makes the same exchanges, whatever it finds.

    Args:
        path: The table, or None for heuristics only; rank 0's counts, and only rank 0 reads it.

    Returns:
        The same mapping on every rank.

    Raises:
        MegaMoeConfigError: The file cannot be read or is no table; the same text on every rank.
        MegaMoeRankDivergenceError: Ranks differ in buckets or in what the heuristic says.
    """
    heuristic = {bucket: space.resolve(DEFAULT_TACTIC, bucket) for bucket in buckets}
    require_rank_identical({"kernel": space.kernel, "heuristic": heuristic}, comm, timeout_s)
    found, error = ({}, None) if comm.rank != 0 else _look_up(buckets, layer, here, path)
    found, error = comm.allgather((found, error), timeout_s)[0]
    if error is not None:
        raise MegaMoeConfigError(error)
    refusals = {bucket: space.why_illegal(tactic, bucket) for bucket, tactic in found.items()}
    chosen = {bucket: ResolvedTactic(tactic, "heuristic") for bucket, tactic in heuristic.items()}
    votes = comm.allgather(refusals, timeout_s)
    for bucket, tactic in found.items():
        against = [(rank, vote[bucket]) for rank, vote in enumerate(votes) if vote[bucket] is not None]
        if against:
            rank, reason = against[0]
            _warn_once(f"bucket {bucket}: {tactic} of {path} is not legal on rank {rank} ({reason}); heuristic")
        else:
            chosen[bucket] = ResolvedTactic(tactic, "tuned")
    return chosen


def table_digest(path: Path | None) -> str:
    """What a table file holds, in one word that ranks can compare: `none`, a digest, or why it cannot be read."""
    if path is None:
        return "none"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as err:
        return f"unreadable ({err.strerror})"


def _look_up(
    buckets: Sequence[int], layer: Mapping[str, Any], here: TuningEnvironment, path: Path | None
) -> tuple[dict[int, Tactic], str | None]:
    """What rank 0 finds: the table's tactics that may be used here, or the error all ranks must raise."""
    if path is None:
        logger.info("no tactic table: heuristics")
        return {}, None
    try:
        table = _read(path)
    except _ForeignTableError as err:
        _warn_once(f"tactic table {path} is not used: {err}; heuristics")
        return {}, None
    except MegaMoeConfigError as err:
        return {}, str(err)
    hard, soft = table.environment.mismatches(here)
    if hard:
        _warn_once(f"tactic table {path} is not used: {'; '.join(hard)}; heuristics")
        return {}, None
    if soft:
        _warn_once(f"tactic table {path} was made elsewhere and is used: {'; '.join(soft)}")
    tuned = table.of_layer(layer)
    missing = [bucket for bucket in buckets if bucket not in tuned]
    if missing:
        _warn_once(f"tactic table {path} has no entry for buckets {missing} of the layer {dict(layer)}: heuristics")
    found = {bucket: tuned[bucket].tactic for bucket in buckets if bucket in tuned}
    for bucket, tactic in found.items():
        logger.info("bucket %d: %s from %s", bucket, tactic, path)
    return found, None


@cache
def _warn_once(text: str) -> None:
    """Sixty layers that look up the same thing say it once."""
    logger.warning("%s", text)


def _bucket_to_json(tuned: TunedBucket) -> dict[str, Any]:
    return {
        **asdict(tuned),
        "tactic": tuned.tactic.to_json(),
        "failures": [{**asdict(failure), "tactic": failure.tactic.to_json()} for failure in tuned.failures],
    }


def _bucket_from_json(value: Mapping[str, Any]) -> TunedBucket:
    failures = tuple(Failure(**{**item, "tactic": Tactic.from_json(item["tactic"])}) for item in value["failures"])
    tuned = TunedBucket(**{**value, "tactic": Tactic.from_json(value["tactic"]), "failures": failures})
    if type(tuned.bucket) is not int or tuned.bucket < 1:
        raise ValueError(f"bucket {tuned.bucket!r} is no token count")
    return tuned


def _read(path: Path) -> TacticTable:
    """Read a file of this version.

    Raises:
        _ForeignTableError: Another version's table.
        MegaMoeConfigError: Not readable, or no table at all.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise MegaMoeConfigError(f"cannot read the tactic table {path}: {err}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith(SCHEMA.partition("/")[0] + "/"):
        raise MegaMoeConfigError(f"{path} is no tactic table (schema {schema!r}, expected {SCHEMA!r})")
    if schema != SCHEMA:
        raise _ForeignTableError(f"schema is {schema!r}, this version reads {SCHEMA!r}")
    try:
        environment = TuningEnvironment(**document["environment"])
        layers = [
            (dict(entry["layer"]), [_bucket_from_json(value) for value in entry["buckets"]])
            for entry in document["layers"]
        ]
    except (KeyError, TypeError, ValueError) as err:
        raise MegaMoeConfigError(f"tactic table {path} is damaged ({type(err).__name__}: {err})") from None
    return TacticTable(environment, layers)
