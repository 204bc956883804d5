# SPDX-License-Identifier: Apache-2.0
"""The fence book under hypothesis: any sequence of `tests/helpers/fence_sequences.py` against the model alone."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.fence_sequences import LOCALS, RULES, SHAREDS, TACTICS, FenceSequence
from tests.helpers.fences import Device

STRATEGIES = {
    "index": st.integers(0, 3),
    "flag": st.booleans(),
    "tactic": st.sampled_from(TACTICS),
    "tactics": st.sets(st.sampled_from(TACTICS)),
}


class FenceMachine(FenceSequence, RuleBasedStateMachine):
    """One rank of two; its rules are those of the sequence, added below."""

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        FenceSequence.__init__(self, Device(local=LOCALS, shared=SHAREDS), ep_size=2)

    warm_up = initialize(num_captured=st.integers(0, 2))(FenceSequence.warm_up)
    require_book = invariant()(FenceSequence.require_book_holds_the_pairs_in_step_and_nothing_else)

    def teardown(self) -> None:
        self.close()


for _name, _known in RULES.items():
    _drawn = {argument: STRATEGIES[kind] for argument, kind in _known.arguments.items()}
    setattr(FenceMachine, _name, precondition(_known.is_possible)(rule(**_drawn)(getattr(FenceSequence, _name))))

FenceMachineTest = FenceMachine.TestCase
FenceMachineTest.settings = settings(max_examples=120, stateful_step_count=30)

