# SPDX-License-Identifier: Apache-2.0
"""What a self-test runs on an engine and a GPU: items in order, what is left out and why, the kernels that it needs.

Pure but for the items' own `run`. Used by :mod:`trtllm_megamoe.selftest.process` and by the `selftest` and `compile`
commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.contract import require_eligible
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.kernels.family import Family
from trtllm_megamoe.selftest import one_rank, ranks
from trtllm_megamoe.selftest.cases import EVERY_TILE, Case, selected
from trtllm_megamoe.selftest.one_rank import Outcome
from trtllm_megamoe.tuning.tactic import Tactic

H200_SMS = 132
B200_SMS = 148


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how much.

    Attributes:
        family: Kernels of the GPU; None runs the CPU engine.
        num_sms: Multiprocessors of the GPU; they choose tiles.
        quick: Few cases.
        ep_size: Virtual ranks of the cases with ranks; 1 leaves them out.
        only: Just the cases whose name contains this.
    """

    family: Family | None
    num_sms: int
    quick: bool
    ep_size: int
    only: str = ""

    @property
    def engine(self) -> str:
        """The engine's name."""
        return "cpu" if self.family is None else "cuda"


@dataclass(frozen=True, slots=True)
class Item:
    """One group of checks on one case; `limit_s` is how long it may take at most."""

    group: str
    case: str
    run: Callable[[], Iterator[Outcome]]
    limit_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Items in order, and (case, reason) of what this target cannot run."""

    items: tuple[Item, ...]
    left_out: tuple[tuple[str, str], ...]


def _spec(target: Target, case: Case) -> Any:
    """The compiled-in facts of a case, or None on the CPU; refuses what the target does not support."""
    require_eligible(case.config, case.ep_size, case.name)
    if target.family is None:
        return None
    if case.mode not in target.family.modes:
        raise MegaMoeConfigError(f"{target.family.name} kernels have no {case.mode.value} activations")
    return target.family.layer_spec(case.config, case.ep_size, case.mode)


def _cases(target: Target) -> tuple[list[Case], list[tuple[str, str]]]:
    """The cases that the target runs, and the others with the reason."""
    kept, left_out = [], []
    for case in selected(quick=target.quick):
        if target.only not in case.name:
            continue
        if case.ep_size > 1:
            case = replace(case, ep_size=target.ep_size)
        case = replace(case, config=case.config.model_copy(update={"engine": target.engine}))
        try:
            if case.ep_size == 1 and case.name.startswith("ranks-"):
                raise MegaMoeConfigError("one rank was asked for")
            _spec(target, case)
        except MegaMoeConfigError as err:
            left_out.append((case.name, str(err)))
        else:
            kept.append(case)
    return kept, left_out


def _tile_tactics(target: Target, case: Case, bucket: int) -> list[Tactic]:
    """One legal tactic for each tile configuration."""
    assert target.family is not None
    space = target.family.tactic_space(_spec(target, case), target.num_sms)
    tactics = space.legal_candidates(bucket)
    return list({target.family.tile_of(tactic).name: tactic for tactic in reversed(tactics)}.values())


def make_plan(target: Target) -> Plan:
    """Everything that a self-test runs on a target.

    Raises:
        MegaMoeConfigError: Nothing is left of the cases.
    """
    cases, left_out = _cases(target)
    is_gpu = target.family is not None
    singles = [case for case in cases if case.ep_size == 1]
    groups = [case for case in cases if case.ep_size > 1]
    if not cases:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise MegaMoeConfigError(
            f"no case of the self-test is left to run ({reasons or f'none is named {target.only!r}'})"
        )
    many = (20 if target.quick else 300) if is_gpu else 3
    items = []
    for case in singles:
        every_tile = None
        if is_gpu and case.name == EVERY_TILE and not target.quick:
            every_tile = partial(_tile_tactics, target, case)
        items.append(Item("one rank, oracle", case.name, partial(one_rank.against_oracle, case, every_tile)))
    for basic in singles[:1]:
        items.append(Item("token counts", basic.name, partial(one_rank.token_counts, basic)))
        items.append(Item("determinism", basic.name, partial(one_rank.determinism, basic, many)))
        if is_gpu:
            items.append(Item("time-outs", basic.name, partial(one_rank.expired_wait, basic)))
    if is_gpu:
        for case in singles if target.quick else singles[:2]:
            items.append(Item("graphs", case.name, partial(one_rank.graphs, case, 10)))
    for case in groups:
        launches = many if case is groups[0] else 3
        name = f"{case.name} x{case.ep_size}"
        items.append(Item("virtual ranks", name, partial(ranks.against_one_rank, case, launches)))
    if groups:
        items.append(Item("time-outs", f"{groups[0].name} x{target.ep_size}", partial(ranks.missing_rank, groups[0])))
    return Plan(tuple(items), tuple(left_out))


def needed_kernels(target: Target) -> list[tuple[Any, Any]]:
    """(layer spec, tile) of every kernel that the items launch, each once."""
    family = target.family
    if family is None:
        return []
    found: dict[tuple[Any, str], tuple[Any, Any]] = {}
    cases = _cases(target)[0]
    for case in (*cases, *(ranks.one_rank_twin(case) for case in cases if case.ep_size > 1)):
        spec = _spec(target, case)
        space = family.tactic_space(spec, target.num_sms // case.ep_size)
        rungs = BucketLadder.for_cap(case.config.max_tokens_per_rank).rungs
        tactics = [space.heuristic(rung) for rung in rungs]
        if case.name == EVERY_TILE and not target.quick:
            tactics += _tile_tactics(target, case, rungs[-1])
        for tile in map(family.tile_of, tactics):
            found[spec, tile.name] = (spec, tile)
    return list(found.values())
