# SPDX-License-Identifier: Apache-2.0
"""What can be taken away from the protocol, one thing at a time, and what must come of it.

The first part is made from the list of synchronisation edges, so that no wait, acquire, release or bank is forgotten;
the second part lists rules of the design. A variant that is safe says why. Used by `protocol` and `builder`, which
leave the thing out, and by `study`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing taken away.

    drop: waits, releases and clears left out. hoist: waits whose acquire is missing, so that what they guard may come
    before them. early: (release, object) pairs, the release visible before the object. short: waits content with one
    arrival too few. one_bank: objects without their second bank. rules: everything else, by name.
    """

    name: str
    group: str
    safe: str = ""
    drop: frozenset[str] = frozenset()
    hoist: frozenset[str] = frozenset()
    early: frozenset[tuple[str, str]] = frozenset()
    short: frozenset[str] = frozenset()
    one_bank: frozenset[str] = frozenset()
    rules: frozenset[str] = frozenset()
    ring: bool = False


PROTOCOL = Variant("protocol", "protocol", safe="the protocol itself")


@dataclass(frozen=True, slots=True)
class Edge:
    """A release, what it announces, and the waits for it.

    counted: arrivals add up. grows: stored, not added, but never less than before, and compared with >=.
    """

    release: str
    announces: tuple[str, ...]
    waits: tuple[str, ...]
    counted: bool = True
    grows: bool = False
    ring: bool = False


EDGES = (
    Edge("staged", ("payload", "payload_scales", "index_rows"), ("offer: staged",)),
    Edge("size_cells", ("header",), ("cells: size_cells", "tiles: size_cells"), counted=False),
    Edge(
        "payload_tags", ("payload", "payload_scales", "index_rows"), ("pull: payload_tags",), counted=False, grows=True
    ),
    Edge("pool_ready", ("pool", "pool_scales", "pool_meta"), ("fc1: pool_ready",)),
    Edge("fc1_ready", ("fc1_out",), ("fc2: fc1_ready",)),
    Edge("return_counters", ("result_data", "result_scales"), ("reduce: return_counters",)),
    Edge("credits", ("pool",), ("pull: credits",), ring=True),
)
"""Every synchronisation edge of a launch but the exit ticket (stream order). Payload tags announce what is behind
`staged`. For `credits` the announced access is the last READ of the slot."""

BANKED = ("size_cells", "header", "staged", "pool_ready", "fc1_ready", "claim")
CLEARED = ("staged", "pool_ready", "fc1_ready", "claim")


def edge_variants() -> list[Variant]:
    """Without each wait, acquire, release, order, bank and clear; with each count one short."""
    found = []
    for edge in EDGES:
        for wait in edge.waits:
            found.append(Variant(f"no wait {wait}", "wait dropped", drop=frozenset({wait}), ring=edge.ring))
            found.append(Variant(f"no acquire {wait}", "acquire dropped", hoist=frozenset({wait}), ring=edge.ring))
            if edge.counted or edge.grows:
                name = f"wait {wait} one {'arrival' if edge.counted else 'launch'} short"
                found.append(Variant(name, "wait too short", short=frozenset({wait}), ring=edge.ring))
        for obj in edge.announces:
            name = f"{edge.release} visible before {obj}" + (" is read" if edge.ring else "")
            found.append(Variant(name, "release order", early=frozenset({(edge.release, obj)}), ring=edge.ring))
        if edge.counted or edge.grows:
            found.append(
                Variant(f"no release {edge.release}", "release dropped", drop=frozenset({edge.release}), ring=edge.ring)
            )
    for name in BANKED:
        found.append(Variant(f"one bank of {name}", "bank dropped", one_bank=frozenset({name})))
    for name in CLEARED:
        found.append(Variant(f"{name} never cleared", "clear dropped", drop=frozenset({f"clear: {name}"})))
    return found


def _rule(name: str, group: str, safe: str = "", *, ring: bool = False) -> Variant:
    return Variant(name, group, safe, rules=frozenset({name}), ring=ring)


def rule_variants() -> list[Variant]:
    """Rules of the design that are no single wait or release."""
    return [
        Variant("no size cell where the count is 0", "cells", drop=frozenset({"size_cells"})),
        _rule("a rank without tokens leaves at once", "cells"),
        _rule("first tag equals initial tag", "cells"),
        Variant(
            "one bank of size_cells, newer tags accepted",
            "cells",
            rules=frozenset({"size_cells accepted when newer"}),
            one_bank=frozenset({"size_cells"}),
        ),
        _rule("no payload tag where nothing was sent", "payload tags"),
        Variant(
            "payload offered before the wait for cells, payload_tags compared for equality",
            "payload tags",
            rules=frozenset({"payload offered before the wait for cells", "payload_tags compared for equality"}),
        ),
        _rule("payload of the next launch staged before the reduction", "stream order"),
        _rule("exit ticket before the wait for returns", "exit"),
        _rule("first CTA out advances expected_returns", "exit"),
        Variant("expected_returns not advanced", "exit", drop=frozenset({"exit"})),
        _rule("a tile waits for its first block only", "pool blocks"),
        _rule("a tile counts its own rows of a block only", "pool blocks"),
        _rule("clear covers only the blocks of the running launch", "clear"),
        _rule("fc2 before fc1 in the tile stream", "tile order"),
        _rule("return_counters zeroed after publish", "returns"),
        _rule("return_counters in tiles, ranks differ in column tiles", "returns"),
        _rule("pool_meta in the ring", "ring", ring=True),
        _rule("credit of the first row tile is enough", "ring", ring=True),
        _rule("credits expected from zero in every launch", "ring", ring=True),
        Variant(
            "pull order against tile order, ring",
            "ring",
            rules=frozenset({"pull order against tile order"}),
            ring=True,
        ),
        Variant(
            "math warps pull before their tiles, ring",
            "ring",
            rules=frozenset({"rows pulled before the tile loop"}),
            ring=True,
        ),
        # What the protocol does not need.
        _rule(
            "payload_tags awaited where rows were sent",
            "superfluous",
            "nobody reads what was not sent; waiting for every source costs nothing and names the one that is late",
        ),
        _rule(
            "payload offered before the wait for cells",
            "superfluous",
            "a tag only grows and is compared with >=, so it may be a launch ahead of an owner that was sent nothing",
        ),
        _rule(
            "payload_tags compared for equality",
            "superfluous",
            "an offer follows the wait for all cells of its launch, so every owner has ended the launch before",
        ),
        _rule(
            "size_cells sent after staging",
            "superfluous",
            "nothing needs cells early; it costs everybody's tile table and weight loads the time of staging",
        ),
        _rule(
            "two banks of index_rows",
            "superfluous",
            "one bank suffices: a row is read before its result returns, and its source cannot end the launch before",
        ),
        _rule(
            "one return counter",
            "superfluous",
            "a sum over owners reaches its total only when every owner's rows are there; it costs the name of the "
            "missing rank in the error record",
        ),
        _rule(
            "return_counters compared for equality",
            "superfluous",
            "a counter cannot pass the expectation before the owner of the tokens publishes its next cells",
        ),
        _rule(
            "return_counters zeroed before publish",
            "superfluous",
            "nobody adds between the end of a launch and the next cells; it costs a store before every publish",
        ),
        _rule(
            "return_counters in columns, ranks differ in column tiles",
            "superfluous",
            "counted in columns instead of tiles the expectation is the same whatever tile the expert owner runs",
        ),
        Variant(
            "pull order against tile order, whole pool",
            "superfluous",
            "with a slot for every block a pull waits for cells and tags only, so its order costs time, not progress",
            rules=frozenset({"pull order against tile order"}),
        ),
        Variant(
            "math warps pull before their tiles, whole pool",
            "superfluous",
            "a pull waits for cells and tags only; the same warps may do both, one after the other",
            rules=frozenset({"rows pulled before the tile loop"}),
        ),
    ]


def all_variants() -> list[Variant]:
    """All of them, edges first."""
    return [*edge_variants(), *rule_variants()]
