# SPDX-License-Identifier: Apache-2.0
"""All planted faults of one Blackwell build, one line each: `python -m tests.helpers.sm100_mutants [BUILD] [TOKENS]`.

Takes about ten minutes of one core; the table in docs/blackwell.md is its summary.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.helpers.sm100_case import Sm100Case
from tests.helpers.synthetic import RoutingKind
from tools.ptxsim import SimError
from tools.ptxsim.mutate import mutants

SEEDS = (0, 1)


def verdict(case: Sm100Case, text: str) -> str:
    """How a fault shows, or an empty text."""
    for seed in SEEDS:
        try:
            case.check(case.run(text, seed=seed, launches=2, max_rounds=3000))
        except SimError as err:
            return f"{type(err).__name__}: {err}".split("\n")[0]
        except AssertionError:
            return "wrong result"
    return ""


def main() -> None:
    """Print every fault and its verdict, then the counts by kind."""
    build = sys.argv[1] if len(sys.argv) > 1 else "b32"
    case = Sm100Case(build, RoutingKind.RANDOM, int(sys.argv[2]) if len(sys.argv) > 2 else 12)
    caught: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    for mutant in mutants(case.kernel.text):
        found = verdict(case, mutant.text)
        planted[mutant.kind] += 1
        caught[mutant.kind] += bool(found)
        print(f"{mutant.line} {mutant.kind} | {mutant.before[:70]} | {found[:160] or 'NOT CAUGHT'}", flush=True)
    for kind, count in planted.items():
        print(f"| {kind} | {count} | {caught[kind]} |")


if __name__ == "__main__":
    main()
