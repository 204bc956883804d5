# SPDX-License-Identifier: Apache-2.0
"""The host's staged weight hooks over this package's load windows (R20 to R26). No import of tensorrt_llm.

The host calls `create_weights`, then `load_weights` once with everything or several times with parts, then any of
`process_weights_after_loading`, `transform_weights`, `cache_derived_state`, `post_load_weights`,
`_finalize_shared_weights`, each possibly more than once. Every finishing hook closes the open window, if any; without
one it does nothing. `pre_reload_weights` opens the window of a hot reload, and from then on forward refuses until the
reload is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trtllm_megamoe.errors import MegaMoeError, MegaMoeStateError, MegaMoeWeightError
from trtllm_megamoe.host.migration import Balancing, Migration, balancing_of, slots_of_expert
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.weights.loader import LoadWindow, WeightLoader
from trtllm_megamoe.weights.spec import TensorKey, parse_name
from trtllm_megamoe.weights.store import SOURCE_NAMES, StoreState, WeightStore

logger = logging.getLogger(__name__)


class LoadBook:
    """Which layers of this process are being replaced right now and which already were, for error texts."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.replaced: set[str] = set()

    def begin(self, where: str) -> None:
        """A layer's window opens; the first of a reload starts a new page."""
        if not self.open:
            self.replaced = set()
        self.open.add(where)

    def end(self, where: str, replaced: bool) -> None:
        """A layer's window is closed."""
        self.open.discard(where)
        if replaced:
            self.replaced.add(where)

    def describe(self) -> str:
        """Both sets, for the error of a failed reload."""
        return f"already new: {_listed(self.replaced)}; not replaced yet: {_listed(self.open)}"


_book = LoadBook()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


class ModuleWeights:
    """One backend module's weights: its store, its loader, the open window, and why forward must refuse.

    Args:
        layer: The module's layer; its store counts slots.
        slots_of_expert: Where experts go; None where slots are the experts.
        share: A second store, which counts experts and takes the same tensors: those that the host keeps for migration.
    """

    def __init__(
        self,
        layer: MegaMoELayer,
        slots_of_expert: Mapping[int, Sequence[int]] | None,
        share: WeightStore | None = None,
    ) -> None:
        self.store: WeightStore = layer.weights
        stores = [self.store] if share is None else [share, self.store]  # the module's own is replaced last
        self._loaders = [WeightLoader({store.layer or 0: store}, rank=layer.ep_rank) for store in stores]
        self._who = f"rank {layer.ep_rank}: {self.store.where}"
        self._slots_of_expert = slots_of_expert
        self._windows: list[LoadWindow] = []
        self._held: str | None = None

    def require_usable(self) -> None:
        """For forward.

        Raises:
            MegaMoeStateError: A load is open, or the last reload failed and was not repeated.
        """
        if self._held is not None:
            raise MegaMoeStateError(
                f"{self._who}: the last reload failed ({self._held}); old and new layers may stand side by side. "
                "Repeat the reload, or call trtllm_megamoe.host.accept_mixed_weights()"
            )
        self.store.require_ready()

    def accept(self) -> None:
        """Use what is there although the last reload failed."""
        self._held = None

    def open(self) -> None:
        """Open a window unless one is open."""
        if not self._windows:
            try:
                for loader in self._loaders:
                    self._windows.append(loader.open())
            except MegaMoeError as err:
                self._give_up(str(err))
                raise
            _book.begin(self.store.where)

    def deliver(self, named: Mapping[str, torch.Tensor]) -> None:
        """Take tensors; experts become slots under a static placement."""
        self.open()
        *shares, own = self._windows
        try:
            for share in shares:
                share.deliver(named)
            own.deliver(self._by_slot(named))
        except MegaMoeWeightError as err:
            raise self._failed(err) from err

    def finish(self) -> None:
        """Close the open window, if any. Idempotent.

        Raises:
            MegaMoeWeightError: Something is missing or wrong; the module keeps its old weights whole.
        """
        if not self._windows:
            return
        try:
            for window in self._windows:
                window.close()
        except MegaMoeWeightError as err:
            raise self._failed(err) from err
        self._windows, self._held = [], None
        _book.end(self.store.where, True)

    def _failed(self, err: MegaMoeWeightError) -> MegaMoeWeightError:
        replaced = self.store.was_replaced
        text = f"{err}. Layers of this reload {_book.describe()}"
        self._give_up(str(err))
        _book.end(self.store.where, replaced)
        if self.store.state is StoreState.READY:
            self._held = str(err)
            logger.error("%s: forward refuses from now on: %s", self._who, text)
        return MegaMoeWeightError(text)

    def _give_up(self, reason: str) -> None:
        for window in self._windows:
            if window.is_open:
                window.abort(reason)
        self._windows = []

    def forget_share(self) -> None:
        """The host has its copies; a second load is a reload of the module's own store alone."""
        del self._loaders[:-1]

    def _by_slot(self, named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named.items():
            parsed = parse_name(name)
            if self._slots_of_expert is None or parsed is None or parsed.reciprocal:
                yield name, tensor
                continue
            for slot in self._slots_of_expert.get(parsed.key.expert, ()):
                yield TensorKey(slot, parsed.key.projection, parsed.key.component).name, tensor


class QuantMethodLogic:
    """The host's quantisation method; stateless, all state is the module's `megamoe_weights`."""

    def create_weights(self, module: Any, *_: Any, **__: Any) -> None:
        """Construct the layer (collective) and register the host's four source parameters as 0-element placeholders."""
        layer = module.build_layer()
        slots = slots_of_expert(module.initial_global_assignments, module.num_experts)
        is_dynamic = balancing_of(module.layer_load_balancer) is Balancing.DYNAMIC
        module.megamoe_migration = Migration(module, layer) if is_dynamic else None
        share = module.megamoe_migration.store if is_dynamic else None
        module.megamoe_weights = ModuleWeights(layer, slots, share)
        for name in SOURCE_NAMES:
            empty = torch.empty(0, dtype=torch.uint8, device=layer.device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        module.quant_scales = ()
        layer.weights.on_commit(lambda store: setattr(module, "quant_scales", tuple(store.alphas.values())))

    def load_weights(
        self, module: Any, weights: Any, weight_loading_mode: Any = None, allow_partial_loading: bool = False
    ) -> None:
        """Take one mapping of a layer's tensors (or a list of one).

        Raises:
            MegaMoeWeightError: Fused gate-up tensors, or any fault of the tensors, at the latest at the closing hook.
        """
        if getattr(weight_loading_mode, "name", "VANILLA") != "VANILLA":
            raise MegaMoeWeightError(
                f"{module.megamoe_weights.store.where}: weight loading mode {weight_loading_mode.name} is not "
                "supported; one tensor per expert and projection (VANILLA) is"
            )
        for named in (weights,) if isinstance(weights, Mapping) else weights:
            module.megamoe_weights.deliver(named)
        if not allow_partial_loading:
            self._finalize_shared_weights(module)

    def process_weights_after_loading(self, module: Any) -> None:
        """Close the window: everything must have come."""
        module.megamoe_weights.finish()

    def transform_weights(self, module: Any) -> None:
        """Packing happened when the module became complete; closes a window that is still open."""
        self._finalize_shared_weights(module)

    def cache_derived_state(self, module: Any) -> None:
        """Tell a load balancer where the experts are. Scales were rebound at the commit."""
        self._finalize_shared_weights(module)
        if module.layer_load_balancer is not None:
            module.layer_load_balancer.set_initial_weight_assignments(module.initial_global_assignments)

    def post_load_weights(self, module: Any) -> None:
        """Both hooks above, for callers of the older interface."""
        self.transform_weights(module)
        self.cache_derived_state(module)

    def _finalize_shared_weights(self, module: Any) -> None:
        """Hand the host copies of a dynamic balancer over; a static one has none, its slots were filled by loading."""
        self.process_weights_after_loading(module)
        if module.megamoe_migration is not None:
            module.megamoe_migration.publish(module)
            module.megamoe_weights.forget_share()

    def pre_reload_weights(self, module: Any) -> None:
        """Begin a hot reload of this module."""
        module.megamoe_weights.open()
