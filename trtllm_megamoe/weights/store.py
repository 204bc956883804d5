# SPDX-License-Identifier: Apache-2.0
"""One module's weights on one rank: packed buffers at addresses that never change, their scales, and a state.

The loader opens and closes load windows over stores; engines read `packed`, `alphas` or `expert_weights()`. A store is
replaced as a whole or not at all (R24): new weights are packed aside first, then copied over the old ones.

States and moves (anything else is an error that names the state):

    EMPTY --open--> LOADING --commit--> COMMITTED --close--> READY
    READY --open--> LOADING        LOADING --close--> EMPTY or READY (nothing was replaced)
    any of them at the end of a window that left a mix --> HELD --open--> LOADING, HELD --release--> READY
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeStateError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.weights.build import reference_weights
from trtllm_megamoe.weights.calibration import InputScales
from trtllm_megamoe.weights.experts import ExpertWeights
from trtllm_megamoe.weights.faults import FaultKind, FaultLog
from trtllm_megamoe.weights.host_memory import return_freed_memory
from trtllm_megamoe.weights.layout_base import Buffers
from trtllm_megamoe.weights.layouts import allocate_packed, expert_rows, get_layout, pack_staged
from trtllm_megamoe.weights.scales import LayerScales, derive_alphas, resolve_scales
from trtllm_megamoe.weights.spec import AuxFamily, ModuleSpec, TensorKey
from trtllm_megamoe.weights.spill import SpillFile
from trtllm_megamoe.weights.staging import ExpertStaging

logger = logging.getLogger(__name__)

FC2_INPUT_SCALE = "fc2_input_scale"
"""Name of a2, one per expert, among :meth:`WeightStore.migratable`."""

SOURCE_NAMES = ("w3_w1_weight", "w3_w1_weight_scale", "w2_weight", "w2_weight_scale")
"""The host's names of the source parameters; they stay 0-element placeholders (R20)."""


class StoreState(str, enum.Enum):
    """Where a store is in its life."""

    EMPTY = "empty"
    LOADING = "loading"
    COMMITTED = "committed"
    READY = "ready"
    HELD = "held"


_MOVES: dict[StoreState, frozenset[StoreState]] = {
    StoreState.EMPTY: frozenset({StoreState.LOADING}),
    StoreState.LOADING: frozenset({StoreState.COMMITTED, StoreState.EMPTY, StoreState.READY, StoreState.HELD}),
    StoreState.COMMITTED: frozenset({StoreState.READY, StoreState.HELD}),
    StoreState.READY: frozenset({StoreState.LOADING}),
    StoreState.HELD: frozenset({StoreState.LOADING, StoreState.READY}),
}

_FORWARD_ADVICE: dict[StoreState, str] = {
    StoreState.EMPTY: "load weights first",
    StoreState.LOADING: "close the load window first",
    StoreState.COMMITTED: "close the load window first",
    StoreState.HELD: "the last load left old and new layers side by side; repeat it, or accept the mix",
}


class WeightStore:
    """Weights of one MoE layer on one rank.

    Args:
        spec: sizes and local experts.
        layout: `reference`, `sm90` or `sm100`.
        device: where packed weights and alphas live.
        mode: activation mode; None decides at the first load (nvfp4 where the checkpoint has input scales).
        layer: model layer index, for names and error texts.
        dynamic_eplb: experts will migrate between ranks at run time.
        has_bias: the layer has expert biases.

    Creating a store allocates no weight memory and is not collective (B26). Loading is not graph-safe; weights loaded
    later are seen by graphs captured earlier, because addresses stay.

    Raises:
        MegaMoeConfigError: unknown layout, or biases together with dynamic EPLB (R25).
    """

    def __init__(
        self,
        spec: ModuleSpec,
        *,
        layout: str = "reference",
        device: torch.device | str = "cpu",
        mode: ActivationMode | None = None,
        layer: int | None = None,
        dynamic_eplb: bool = False,
        has_bias: bool = False,
    ) -> None:
        self.spec = spec
        self.layout = get_layout(layout)
        self.device = torch.device(device)
        self.layer = layer
        self.dynamic_eplb = dynamic_eplb
        if dynamic_eplb and has_bias:
            raise MegaMoeConfigError(f"{self.where}: expert biases with dynamic EPLB are not supported; disable one")
        self._mode = mode
        self._state = StoreState.EMPTY
        self._packed: Buffers = {}
        self._alphas: dict[str, torch.Tensor] = {}
        self._scales: LayerScales | None = None
        self._listeners: list[Callable[[WeightStore], None]] = []
        self._staging = ExpertStaging(spec)
        self._late = FaultLog()
        self._is_bulk_over = False
        self._expected: frozenset[AuxFamily] = frozenset()
        self._applied: frozenset[AuxFamily] = frozenset()

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """How error texts name this store."""
        return "layer" if self.layer is None else f"layer {self.layer}"

    @property
    def state(self) -> StoreState:
        """Present state."""
        return self._state

    @property
    def has_weights(self) -> bool:
        """Whether a complete set of weights is there, usable now or not."""
        return self._scales is not None

    @property
    def staged_bytes(self) -> int:
        """Host bytes that wait for this module's completion."""
        return self._staging.staged_bytes

    @property
    def sources(self) -> dict[str, torch.Tensor]:
        """The host's source parameters: 0-element placeholders at all times; sources only ever exist in staging."""
        return {name: torch.empty(0, dtype=torch.uint8, device=self.device) for name in SOURCE_NAMES}

    def require_ready(self) -> None:
        """For `forward`: raise unless the weights may be used now.

        Raises:
            MegaMoeStateError: names the state and the way out.
        """
        if self._state is not StoreState.READY:
            raise MegaMoeStateError(
                f"{self.where}: weights are {self._state.value}, forward needs ready: {_FORWARD_ADVICE[self._state]}"
            )

    @property
    def packed(self) -> Buffers:
        """Packed uint8 buffers by name, dimension 0 counting local experts; empty before the first load.

        Addresses do not change after the first commit.
        """
        return dict(self._packed)

    @property
    def alphas(self) -> dict[str, torch.Tensor]:
        """`fc1_alpha` (L, 2), `fc2_alpha` (L,), `fc1_norm_const` (L,), float32 on the device; addresses stay."""
        return dict(self._alphas)

    @property
    def scales(self) -> LayerScales:
        """Global scales in use.

        Raises:
            MegaMoeStateError: nothing is loaded.
        """
        if self._scales is None:
            raise MegaMoeStateError(f"{self.where}: weights are {self._state.value}; load weights first")
        return self._scales

    @property
    def activation_mode(self) -> ActivationMode | None:
        """The mode in use; None while it is undecided."""
        return self._mode

    def expert_weights(self) -> ExpertWeights:
        """The weights as :class:`ExpertWeights` (reference layout only): a view, a later reload shows through bulk
        fields at once and through scales after the commit callback asked again."""
        if self.layout.name != "reference":
            raise MegaMoeStateError(f"{self.where}: layout {self.layout.name} cannot be viewed as ExpertWeights")
        return reference_weights(self.spec, self._packed, self.scales)

    def set_input_scales(self, scales: InputScales, mode: ActivationMode | None = None) -> None:
        """Replace the activation scales of a loaded store, e.g. by calibrated ones (R27); codes and addresses stay.

        Args:
            scales: a1 and a2.
            mode: activation mode from now on; None keeps the present one.

        Raises:
            MegaMoeStateError: the store is not ready, or its experts migrate and bring their own scales.
        """
        self.require_ready()
        if self.dynamic_eplb:
            raise MegaMoeStateError(f"{self.where}: input scales cannot be replaced where experts migrate")
        new = replace(self.scales, input_global=scales.input_global, down_input_global=scales.down_input_global)
        mode = mode if mode is not None else self._mode
        assert mode is not None  # a ready store has one
        alphas = {name: tensor.to(self.device) for name, tensor in derive_alphas(new, mode).items()}
        self._publish([], {}, alphas)
        self._scales, self._mode = new, mode
        for listener in self._listeners:
            listener(self)

    def migratable(self) -> dict[str, torch.Tensor]:
        """Live tensors that belong to an expert: derived ones only, dimension 0 counting local experts (R25).

        Raises:
            MegaMoeStateError: nothing is loaded.
        """
        a2 = self.scales.down_input_global
        return {**self._packed, **self._alphas, **({} if a2 is None else {FC2_INPUT_SCALE: a2})}

    def relocate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with some of :meth:`migratable` where somebody moved them; whoever holds addresses must ask again."""
        for live in (self._packed, self._alphas):
            live.update({name: tensors[name].view(live[name].shape) for name in live if name in tensors})
        if FC2_INPUT_SCALE in tensors:
            self._scales = replace(self.scales, down_input_global=tensors[FC2_INPUT_SCALE].flatten())

    def on_commit(self, listener: Callable[[WeightStore], None]) -> None:
        """Call `listener(self)` after each replacement of weights or scales; the module's sources are gone by then."""
        self._listeners.append(listener)

    # ---- the loader's side ---------------------------------------------------------------------------------------

    def begin(self, families: frozenset[AuxFamily] | None, spill: SpillFile | None = None) -> None:
        """Open this store for a load window.

        Args:
            families: scale families that will come and are waited for before the commit; None waits for what the store
                has now, or for all of them at the first load. What has not come by the end is decided then.
            spill: where sources wait instead of in memory.

        Raises:
            MegaMoeStateError: a window is open, or a reload under dynamic EPLB (R25).
        """
        if self.dynamic_eplb and self.has_weights:
            raise MegaMoeStateError(
                f"{self.where}: hot reload with dynamic EPLB is not supported: experts have migrated; restart instead"
            )
        self._move(StoreState.LOADING)
        self._expected = self.expected_families(families)
        self._applied = frozenset()
        self._staging = ExpertStaging(self.spec, spill)
        self._late = FaultLog()
        self._is_bulk_over = False

    def expected_families(self, families: frozenset[AuxFamily] | None) -> frozenset[AuxFamily]:
        """What a window waits for: the declared families, or else those in use, or else (first load) all."""
        if families is not None:
            return families
        return frozenset(AuxFamily) if self._scales is None else self._scales.families

    def end_of_bulk(self) -> None:
        """The caller's order says that no bulk of this module comes any more; what is incomplete is dropped."""
        self._is_bulk_over = True
        if self._state is StoreState.LOADING:
            self._staging.drop_bulk()

    def stage(self, key: TensorKey, tensor: torch.Tensor, reciprocal: bool, *, hand_over: bool = False) -> None:
        """Take one tensor; faults are recorded. After the commit only scales may still come (an aux tail)."""
        over = self._is_bulk_over or self._state is StoreState.COMMITTED
        if over and key.component.is_bulk and self.spec.needs(key):
            why = (
                "order='layer' was promised and the next layer had begun" if self._is_bulk_over else "replaced already"
            )
            self._late.add(FaultKind.LATE, key.parameter, key.expert, why)
        else:
            self._staging.stage(key, tensor, reciprocal, hand_over=hand_over)

    def try_commit(self, *, final: bool) -> bool:
        """Replace weights or scales when what has come is complete and legal.

        Args:
            final: nothing more comes; absent families are decided now (kept, or weight-only at a first load).

        Returns:
            Whether something was replaced.
        """
        staging = self._staging
        if staging.faults or staging.is_empty or (self._state is StoreState.LOADING and not staging.bulk_complete):
            return False
        if not final and not self._has_expected():
            return False
        scales, log = resolve_scales(staging, self._scales, self._applied)
        if scales is None:
            if final:
                staging.faults.extend(log)
            return False
        mode = self._mode
        if mode is None:
            mode = ActivationMode.NVFP4 if scales.has_input_scales else ActivationMode.BF16
        try:
            alphas = derive_alphas(scales, mode)
        except MegaMoeWeightError as error:
            staging.faults.add(FaultKind.FAMILY, "input_scale", None, str(error))
            return False
        self._replace(scales, mode, alphas)
        return True

    def faults(self) -> FaultLog:
        """Everything that is wrong or missing at the end of a window."""
        log = FaultLog()
        log.extend(self._late)
        log.extend(self._staging.faults)
        if self._state is StoreState.LOADING:
            log.extend(self._staging.missing_bulk())
        if self._state is StoreState.LOADING or not self._staging.is_empty:
            log.extend(resolve_scales(self._staging, self._scales, self._applied)[1])
        return log

    @property
    def was_replaced(self) -> bool:
        """Whether this window has replaced the weights."""
        return self._state is StoreState.COMMITTED

    def end(self, *, hold: bool) -> None:
        """Close this store's part of a window and drop what is staged; `hold` keeps `forward` away."""
        self._staging = ExpertStaging(self.spec)
        if not self.has_weights:
            self._move(StoreState.EMPTY)
        else:
            self._move(StoreState.HELD if hold else StoreState.READY)

    def release(self) -> None:
        """Let `forward` use a held store again."""
        if self._state is StoreState.HELD:
            self._move(StoreState.READY)

    def _has_expected(self) -> bool:
        """Whether every awaited family has come; an aux tail awaits the families in use."""
        awaited = self._expected
        if self._state is StoreState.COMMITTED and self._scales is not None:
            awaited |= self._scales.families
        return all(self._staging.is_complete(family) or family in self._applied for family in awaited)

    # ---- internals -----------------------------------------------------------------------------------------------

    def _move(self, to: StoreState) -> None:
        if to not in _MOVES[self._state]:
            raise MegaMoeStateError(f"{self.where}: weights are {self._state.value} and cannot become {to.value}")
        self._state = to

    def _replace(self, scales: LayerScales, mode: ActivationMode, alphas: dict[str, torch.Tensor]) -> None:
        """Everything that can fail happens before the first byte in use changes."""
        alphas = {name: tensor.to(self.device) for name, tensor in alphas.items()}
        aside: list[Buffers] = []
        fresh: Buffers = {}
        if self._state is StoreState.LOADING and self._packed:
            aside = pack_staged(self.layout, self._staging, self.device, None)
        elif self._state is StoreState.LOADING:
            num_experts = self.spec.num_local_experts
            fresh = allocate_packed(self.layout, self.spec.shape, num_experts, self.device)
            pack_staged(self.layout, self._staging, self.device, expert_rows(fresh, num_experts))
        self._applied |= {family for family in AuxFamily if self._staging.is_complete(family)}
        self._staging = ExpertStaging(self.spec)
        self._publish(aside, fresh, alphas)
        self._scales, self._mode = scales, mode
        if self._state is StoreState.LOADING:
            self._move(StoreState.COMMITTED)
        del aside, fresh
        return_freed_memory()
        logger.debug("%s: replaced, activation mode %s", self.where, mode.value)
        for listener in self._listeners:
            listener(self)

    def _publish(self, aside: list[Buffers], fresh: Buffers, alphas: dict[str, torch.Tensor]) -> None:
        """Adopt tensors at the first load, copy over the live ones later: graphs hold their addresses."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a launch in flight on any stream still reads the old bytes
        self._packed.update(fresh)
        for live, packed in zip(expert_rows(self._packed, len(aside)), aside, strict=True):
            for name, tensor in packed.items():
                live[name].copy_(tensor)
        for name, tensor in alphas.items():
            if name in self._alphas:
                self._alphas[name].copy_(tensor)
            else:
                self._alphas[name] = tensor
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
