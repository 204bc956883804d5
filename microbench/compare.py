# SPDX-License-Identifier: Apache-2.0
"""Two results side by side: rows that measured the same thing, never two geometries. Pure, over parsed JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_megamoe.cli.text import table
from trtllm_megamoe.errors import MegaMoeConfigError

Row = Mapping[str, Any]

# Rows equal in all of these measured the same thing. `engine` is not among them: that is worth comparing.
IDENTITY = (
    "label", "weights", "hidden", "intermediate", "num_experts", "top_k", "share_of_ep", "ep_size", "tokens_per_rank",
    "requested_rows_per_expert", "routing", "imbalance", "seed", "steps", "combine_format", "activations",
    "score_placement", "mode", "region",
)  # fmt: skip
ENVIRONMENT = ("commit", "gpu", "driver", "cpu", "torch", "cutlass_dsl", "threads_per_rank", "transport")


REPEAT_PCT = 3.0
"""Two runs of one command agree within this up to `FEW_ROWS` rows per expert,"""
REPEAT_PCT_ABOVE = 10.0
"""and within this above, where a GPU runs into its power limit."""
FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pairs of rows of A and B, and the rows that have no partner; rows without a time are among the latter."""

    pairs: tuple[tuple[Row, Row], ...]
    only_a: tuple[Row, ...]
    only_b: tuple[Row, ...]
    differences: tuple[str, ...]  # of the environments

    @property
    def ratios(self) -> list[float]:
        """B's median over A's, pair by pair."""
        return [b["us"]["p50"] / a["us"]["p50"] for a, b in self.pairs]

    @property
    def geometric_mean(self) -> float:
        """Over all ratios.

        Raises:
            MegaMoeConfigError: no pair.
        """
        if not self.pairs:
            raise MegaMoeConfigError("the two results have no timed row in common; compare runs of the same command")
        return math.exp(sum(map(math.log, self.ratios)) / len(self.pairs))


def _keys_of(documents: Sequence[Mapping[str, Any]]) -> Callable[[Row], tuple[Any, ...]]:
    """What identifies a row: how it was launched only where one of the documents has rows that differ in that alone."""

    def key(row: Row, names: Sequence[str] = IDENTITY) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    keys = [[key(row) for row in document["rows"]] for document in documents]
    if any(len(set(of_document)) < len(of_document) for of_document in keys):
        return lambda row: key(row, (*IDENTITY, "timing"))
    return key


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Match the rows of two `megamoe-bench/1` documents."""
    key_of = _keys_of((a, b))
    timed = [{key_of(row): row for row in document["rows"] if row["us"] is not None} for document in (a, b)]
    common = [key for key in timed[0] if key in timed[1]]
    pairs = tuple((timed[0][key], timed[1][key]) for key in common)
    alone = []
    for document, times in zip((a, b), timed, strict=True):
        alone.append(
            tuple(row for row in document["rows"] if key_of(row) not in common or row is not times[key_of(row)])
        )
    differences = tuple(
        f"{name}: {a['env'][name]} -> {b['env'][name]}" for name in ENVIRONMENT if a["env"][name] != b["env"][name]
    )
    return Comparison(pairs, alone[0], alone[1], differences)


def _name(row: Row) -> str:
    what = f"{row['label']}, EP {row['ep_size']}, {row['tokens_per_rank']} tok/rank, {row['routing']}"
    return f"{what}, {row['combine_format']}, {row['activations']}, {row['mode']}"


def describe(comparison: Comparison) -> str:
    """The comparison for people."""
    lines = [f"environment differs in {difference}" for difference in comparison.differences]
    cells: Sequence[Sequence[str]] = [
        (
            _name(a),
            f"{a['us']['p50']:,.1f}",
            f"{b['us']['p50']:,.1f}",
            f"{ratio:.3f}",
            "" if a["engine"] == b["engine"] else f"{a['engine']} -> {b['engine']}",
        )
        for (a, b), ratio in zip(comparison.pairs, comparison.ratios, strict=True)
    ]
    lines.append(table(["row", "A p50 us", "B p50 us", "B / A", "engine"], cells, right=(1, 2, 3)))
    lines.append(f"geometric mean of B / A over {len(comparison.pairs)} rows: {comparison.geometric_mean:.3f}")
    lines.append(describe_agreement(agreement(comparison)))
    for name, rows in (("A", comparison.only_a), ("B", comparison.only_b)):
        lines += [f"only in {name}, or not timed: {_name(row)}" for row in rows]
    return "\n".join(lines)


def agreement(comparison: Comparison) -> dict[str, Any]:
    """How far two runs of one command agree, JSON-ready.

    Returns:
        `bands`: up to and above `FEW_ROWS` rows per expert, each with its `bound_pct`, the number of `rows`, how many
        are `within` the bound, and the `worst_pct`, None without rows; `outside`: the rows beyond their bound;
        `agrees`: there are none, and there was something to compare.
    """
    bands: list[dict[str, Any]] = []
    outside: list[dict[str, Any]] = []
    for few, bound in ((True, REPEAT_PCT), (False, REPEAT_PCT_ABOVE)):
        changes = []
        for (a, b), ratio in zip(comparison.pairs, comparison.ratios, strict=True):
            if (a["rows_per_expert"] <= FEW_ROWS) is few:
                changes.append(abs(ratio - 1) * 100)
                if changes[-1] > bound:
                    outside.append({"row": _name(a), "a_us": a["us"]["p50"], "b_us": b["us"]["p50"]})
        within = sum(change <= bound for change in changes)
        worst = max(changes, default=None)
        bands.append({"bound_pct": bound, "rows": len(changes), "within": within, "worst_pct": worst})
    return {"bands": bands, "outside": outside, "agrees": bool(comparison.pairs) and not outside}


def describe_agreement(found: Mapping[str, Any]) -> str:
    """An :func:`agreement` for people."""
    lines = [f"two runs of one command {'agree' if found['agrees'] else 'do not agree'}:"]
    for band, where in zip(found["bands"], (f"up to {FEW_ROWS}", f"above {FEW_ROWS}"), strict=True):
        counts = f"{band['within']} of {band['rows']} rows within {band['bound_pct']:g} %"
        worst = "" if band["worst_pct"] is None else f"; the worst differs by {band['worst_pct']:.1f} %"
        lines.append(f"  {where} rows per expert: {counts}{worst}")
    lines += [f"  outside: {row['row']}: {row['a_us']:,.1f} and {row['b_us']:,.1f} us" for row in found["outside"]]
    return "\n".join(lines)
