# SPDX-License-Identifier: Apache-2.0
"""All planted faults of one Blackwell build, one line each: `python -m tests.helpers.sm100_mutants BUILD TOKENS...`.

BUILD is a file of tests/data/ptx, TOKENS one count per rank. Takes about ten minutes of one core for one rank, an hour
for two; the tables in docs/blackwell.md are its summary. `--part I/N` runs every N-th fault from the I-th on.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.helpers.ranks_case import RanksCase
from tests.helpers.sm100_case import Sm100Case
from tests.helpers.synthetic import RoutingKind
from tools.ptxsim import SimError
from tools.ptxsim.mutate import mutants

SEEDS = (0, 1)


def verdict(attempt: Callable[..., None], text: str, launches: int) -> str:
    """How a fault shows, or an empty text."""
    for seed in SEEDS:
        try:
            attempt(text, seed=seed, launches=launches, grid=2, max_rounds=3000)
        except SimError as err:
            return f"{type(err).__name__}: {err}".split("\n")[0]
        except AssertionError:
            return "wrong result"
    return ""


def case_of(build: str, counts: tuple[int, ...]) -> tuple[str, Callable[..., None]]:
    """The kernel's text, and a function that runs a text of it and compares with the oracle."""
    case: Sm100Case | RanksCase
    if len(counts) == 1:
        case = Sm100Case(build.removeprefix("sm100_"), RoutingKind.RANDOM, counts[0])
    else:
        case = RanksCase(build, RoutingKind.RANDOM, counts)

    def attempt(text: str, **options: Any) -> None:
        case.check(case.run(text, **options))  # type: ignore[arg-type]

    return case.kernel.text, attempt


def main() -> None:
    """Print every fault and its verdict, then the counts by kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build")
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--kind", action="append", default=[], help="only faults of this kind")
    arguments = parser.parse_args()
    text, attempt = case_of(arguments.build, tuple(arguments.tokens))
    first, step = (int(number) for number in arguments.part.split("/"))
    caught: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    for mutant in list(mutants(text, tuple(arguments.kind)))[first::step]:
        found = verdict(attempt, mutant.text, arguments.launches)
        planted[mutant.kind] += 1
        caught[mutant.kind] += bool(found)
        print(f"{mutant.line} {mutant.kind} | {mutant.before[:70]} | {found[:160] or 'NOT CAUGHT'}", flush=True)
    for kind, count in planted.items():
        print(f"| {kind} | {count} | {caught[kind]} |")


if __name__ == "__main__":
    main()
