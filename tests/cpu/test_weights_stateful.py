# SPDX-License-Identifier: Apache-2.0
"""Any sequence of load windows with any interleaving of tensors: the one-shot result, or the documented error.

The model below restates docs/weights.md sections 5 and 6 over sets of names; it stages nothing and packs nothing.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.helpers.weight_models import (
    LAYERS,
    SPEC,
    expected_store,
    key_of,
    layer_of,
    model_tensors,
    same,
    store_bytes,
)
from trtllm_megamoe.errors import MegaMoeStateError, MegaMoeWeightError
from trtllm_megamoe.weights.faults import id_ranges
from trtllm_megamoe.weights.layouts import LAYOUTS
from trtllm_megamoe.weights.loader import WeightLoader
from trtllm_megamoe.weights.spec import AuxFamily, TensorKey
from trtllm_megamoe.weights.store import WeightStore

GLOBAL, FC1, FC2 = AuxFamily.GLOBAL, AuxFamily.FC1_INPUT, AuxFamily.FC2_INPUT
NEEDED_BULK = frozenset(SPEC.bulk_keys())
NEEDED = {family: frozenset(SPEC.family_keys(family)) for family in AuxFamily}

ORDERS = {
    "layer-atomic": lambda name: (layer_of(name), key_of(name)),
    "suffix": lambda name: (key_of(name).parameter, layer_of(name), key_of(name).expert),
    "expert": lambda name: (key_of(name).expert, layer_of(name), key_of(name).parameter),
    "aux-tail": lambda name: (key_of(name).family is not None, layer_of(name), key_of(name)),
    "aux-first": lambda name: (key_of(name).family is None, key_of(name)),
    "random": None,
}
DISTURBANCES = (*["none"] * 5, *["duplicates"] * 3, "aux", "input_scale", "fc1", "fc2", "weight_scale_2", "some")
"""What goes wrong with a delivery, one thing a window, so that many windows succeed."""


@dataclass
class Content:
    """Which model each part of a layer comes from; None: the layer has no such input scales."""

    bulk: str
    scales: str
    fc1: str | None
    fc2: str | None

    @property
    def families(self) -> set[AuxFamily]:
        return {GLOBAL} | ({FC1} if self.fc1 else set()) | ({FC2} if self.fc2 else set())


@dataclass
class LayerModel:
    """One layer during one window."""

    previous: Content | None
    awaited: set[AuxFamily]
    current: Content | None = None
    committed: bool = False
    faulty: bool = False
    seen: set[TensorKey] = field(default_factory=set)
    applied: set[AuxFamily] = field(default_factory=set)

    def came(self) -> set[AuxFamily]:
        return {family for family in AuxFamily if self.seen >= NEEDED[family]}

    def is_legal(self) -> bool:
        came = self.came()
        if any(self.seen & NEEDED[family] and family not in came for family in AuxFamily):
            return False
        base = self.current if self.committed else self.previous
        if base is None:
            return GLOBAL in came and (FC2 in came or FC1 not in came)
        now = came | self.applied
        if came & {FC1, FC2} and GLOBAL not in now:
            return False
        if GLOBAL in came and base.fc2 and FC2 not in now:
            return False
        return came <= base.families

    def try_commit(self, model: str, final: bool) -> None:
        if not self.seen or (not self.committed and not self.seen >= NEEDED_BULK):
            return
        awaited = self.awaited | (self.current.families if self.committed and self.current else set())
        if not final and not awaited <= self.came() | self.applied:
            return
        if not self.is_legal():
            return
        base, came = (self.current if self.committed else self.previous), self.came()
        self.current = Content(
            bulk=base.bulk if self.committed and base else model,
            scales=model if GLOBAL in came or base is None else base.scales,
            fc1=model if FC1 in came else (base.fc1 if base else None),
            fc2=model if FC2 in came else (base.fc2 if base else None),
        )
        self.committed = True
        self.applied |= came
        self.seen = set()

    def take(self, key: TensorKey, model: str) -> None:
        if not SPEC.needs(key):
            return
        if self.committed and key.family is None:
            self.faulty = True
            return
        self.seen.add(key)
        self.try_commit(model, final=False)

    def close(self, model: str) -> None:
        self.try_commit(model, final=True)
        self.faulty |= not self.committed or bool(self.seen)


class LoadWindows(RuleBasedStateMachine):
    """Sequences of windows over three layers, compared with the model after each."""

    @initialize(layout=st.sampled_from(sorted(LAYOUTS)))
    def start(self, layout: str) -> None:
        self.layout = layout
        self.loader = WeightLoader({n: WeightStore(SPEC, layout=layout, layer=n) for n in LAYERS})
        self.contents: dict[int, Content | None] = dict.fromkeys(LAYERS)
        self.is_mixed = False

    @rule(
        model=st.sampled_from("ABC"),
        order=st.sampled_from(sorted(ORDERS)),
        disturbance=st.sampled_from(DISTURBANCES),
        bucket=st.sampled_from([1, 7, 40, 10**6]),
        keep_scales=st.sampled_from([False, False, True]),
        seed=st.integers(0, 2**32 - 1),
    )
    def load(self, model: str, order: str, disturbance: str, bucket: int, keep_scales: bool, seed: int) -> None:
        rng = random.Random(seed)
        tensors = model_tensors(model)
        names = self.arrange(rng, list(tensors), order, disturbance)
        layers = {
            n: LayerModel(old, set() if keep_scales else set(AuxFamily) if old is None else old.families)
            for n, old in self.contents.items()
        }
        for name in names:
            layers[layer_of(name)].take(key_of(name), model)
        for layer in layers.values():
            layer.close(model)
        new = [n for n, layer in layers.items() if layer.committed]
        old = [n for n in LAYERS if n not in new]

        window = self.loader.open(families=() if keep_scales else None)
        for start in range(0, len(names), bucket):
            window.deliver([(name, tensors[name]) for name in names[start : start + bucket]])
        if any(layer.faulty for layer in layers.values()):
            with pytest.raises(MegaMoeWeightError) as caught:
                window.close()
            lists = re.search(r"Layers wholly old: (.+?); wholly new: (.+?); ", str(caught.value))
            assert lists and lists.groups() == (id_ranges(old) or "none", id_ranges(new) or "none")
            self.is_mixed |= bool(new)
        else:
            window.close()
            self.is_mixed = False
        for n in new:
            self.contents[n] = layers[n].current

    def arrange(self, rng: random.Random, names: list[str], order: str, disturbance: str) -> list[str]:
        rng.shuffle(names)
        key = ORDERS[order]
        if key is not None:
            names.sort(key=key)
        patterns = {
            "aux": r"scale_2$|input_scale$", "input_scale": r"input_scale$", "fc1": r"w[13]\.input_scale$",
            "fc2": r"w2\.input_scale$", "weight_scale_2": r"scale_2$",
        }  # fmt: skip
        if disturbance in patterns:
            names = [name for name in names if not re.search(patterns[disturbance], name)]
        elif disturbance == "some":
            lost = set(rng.sample(names, rng.randint(1, 3)))
            names = [name for name in names if name not in lost]
        for _ in range(rng.randint(1, 6) if disturbance == "duplicates" else 0):
            index = rng.randrange(len(names))
            later = rng.randint(index, min(len(names), index + rng.choice([5, 60, 1000])))
            names.insert(later, names[index])
        return names

    @rule()
    def accept_mix(self) -> None:
        self.loader.accept_mix()
        self.is_mixed = False

    @invariant()
    def stores_hold_what_the_model_says(self) -> None:
        for n, content in self.contents.items():
            store = self.loader.stores[n]
            if content is None:
                assert store.packed == {} and store.alphas == {}
                continue
            want = expected_store(
                n, self.layout, bulk=content.bulk, scales=content.scales, fc1_input=content.fc1,
                fc2_input=content.fc2 is not None,
            )  # fmt: skip
            if content.fc2 is not None and content.fc2 != content.scales:
                raise AssertionError("scale families never part")
            assert same(store_bytes(store), want)
            assert store.staged_bytes == 0

    @invariant()
    def forward_is_refused_exactly_while_mixed_or_empty(self) -> None:
        for n, content in self.contents.items():
            if content is None or self.is_mixed:
                with pytest.raises(MegaMoeStateError):
                    self.loader.stores[n].require_ready()
            else:
                self.loader.stores[n].require_ready()


TestLoadWindows = LoadWindows.TestCase
TestLoadWindows.settings = settings(max_examples=60, stateful_step_count=10, deadline=None)
