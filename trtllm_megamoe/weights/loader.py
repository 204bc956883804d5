# SPDX-License-Identifier: Apache-2.0
"""Loads and reloads the stores of several layers under one load window, in any order of delivery.

    loader = WeightLoader({3: store3, 4: store4})
    with loader.open() as window:
        window.deliver(named_tensors)

Sources stage on the host until their module is complete, then it is packed and its sources are freed at once (R22). A
failure leaves every module wholly old or wholly new, and the error lists both sets (R24). Not collective; one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from trtllm_megamoe.errors import MegaMoeStateError, MegaMoeUnavailableError, MegaMoeWeightError
from trtllm_megamoe.weights.delivery import DeliveryOrder, MixLedger, staging_peak
from trtllm_megamoe.weights.faults import FaultKind, FaultLog, id_ranges
from trtllm_megamoe.weights.host_memory import PAGES, available_host_bytes, return_freed_memory
from trtllm_megamoe.weights.spec import AuxFamily, parse_name
from trtllm_megamoe.weights.spill import SpillFile
from trtllm_megamoe.weights.staging import NamedTensors, iter_named
from trtllm_megamoe.weights.store import WeightStore

_TRIMS_PER_LAYER = 8
"""How often the caller's freed tensors are returned to the system, per layer's worth of deliveries."""


class WeightLoader:
    """The stores of a model (or of a part) by layer index; at most one window is open at a time.

    Args:
        stores: layer index -> store.
        rank: for error texts.
        available_bytes: tells free host memory; None from it means unknown and refuses nothing.
    """

    def __init__(
        self,
        stores: Mapping[int, WeightStore],
        *,
        rank: int | None = None,
        available_bytes: Callable[[], int | None] = available_host_bytes,
    ) -> None:
        self.stores = dict(sorted(stores.items()))
        self.who = "" if rank is None else f"rank {rank}: "
        self._available_bytes = available_bytes
        self._window: LoadWindow | None = None
        self._mix = MixLedger()

    @property
    def mixed_layers(self) -> tuple[list[int], list[int]]:
        """(layers still old, layers already new) after a failed window; both empty when all is well."""
        return sorted(self._mix.old), sorted(self._mix.new)

    def open(
        self,
        *,
        layers: Iterable[int] | None = None,
        order: DeliveryOrder | str = DeliveryOrder.ANY,
        families: Iterable[AuxFamily] | None = None,
        names: Iterable[str] | None = None,
        spill_directory: Path | None = None,
    ) -> LoadWindow:
        """Open a load or reload window.

        Args:
            layers: which layers are replaced; None takes all. Each must be complete at the end.
            order: `LAYER` promises layer after layer and then stages one layer only.
            families: scale families that will come; None waits for those in use (all three at a first load). `()`
                announces a weights-only reload, which keeps the scales and commits each layer as early as possible.
            names: the tensor names in order of delivery, where known: makes the memory check exact.
            spill_directory: stage in a temporary file there instead of in memory; slower, and any order then needs the
                memory of one expert only.

        Raises:
            MegaMoeConfigError: unknown order.
            MegaMoeStateError: a window is open, or a store may not be reloaded.
            MegaMoeUnavailableError: the host has not the memory (or disk) that staging will need; nothing was changed.
        """
        self._require_closed("opening another")
        order = DeliveryOrder.parse(order)
        chosen = list(self.stores) if layers is None else sorted(set(layers))
        unknown = [layer for layer in chosen if layer not in self.stores]
        if unknown:
            raise MegaMoeStateError(f"{self.who}no store for layers {unknown}; known: {id_ranges(self.stores)}")
        declared = None if families is None else frozenset(families)
        spill = None
        if spill_directory is None:
            self._check_memory(chosen, order, declared, names)
        else:
            spill = SpillFile(spill_directory, sum(self.stores[layer].spec.source_bytes for layer in chosen))
        begun: list[int] = []
        try:
            for layer in chosen:
                self.stores[layer].begin(declared, spill)
                begun.append(layer)
        except MegaMoeStateError:
            self._end_stores(begun)
            if spill is not None:
                spill.close()
            raise
        # Pages of one layer are kept from layer to layer, unless packing fills host memory at the same time.
        stores = [self.stores[layer] for layer in chosen]
        if all(store.device.type != "cpu" or store.layout.name == "reference" for store in stores):
            PAGES.limit_bytes = max((store.spec.source_bytes for store in stores), default=0)
        self._window = LoadWindow(self, chosen, order, spill)
        return self._window

    def accept_mix(self) -> None:
        """Let `forward` use old and new layers side by side after a failed window.

        Raises:
            MegaMoeStateError: a window is open.
        """
        self._require_closed("accepting a mix")
        self._mix.clear()
        self._release_held()

    def finish(self, window: LoadWindow, *, failed: bool) -> None:
        """Give every store of a window its state after it; called by the window."""
        self._window = None
        new = frozenset(layer for layer in window.layers if self.stores[layer].was_replaced)
        if failed:
            self._mix.failed(frozenset(window.layers) - new, new)
        else:
            self._mix.succeeded(new)
        self._end_stores(window.layers)
        PAGES.close()
        if window.spill is not None:
            window.spill.close()
        if not self._mix.layers:
            self._release_held()

    def _end_stores(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self.stores[layer].end(hold=layer in self._mix.layers)

    def _release_held(self) -> None:
        for store in self.stores.values():
            store.release()

    def _require_closed(self, intent: str) -> None:
        if self._window is not None:
            raise MegaMoeStateError(f"{self.who}a load window is open; close it before {intent}")

    def _check_memory(
        self,
        layers: list[int],
        order: DeliveryOrder,
        families: frozenset[AuxFamily] | None,
        names: Iterable[str] | None,
    ) -> None:
        specs = {layer: self.stores[layer].spec for layer in layers}
        expected = {layer: self.stores[layer].expected_families(families) for layer in layers}
        need, available = staging_peak(specs, expected, order, names), self._available_bytes()
        if available is not None and need > available:
            least = staging_peak(specs, expected, DeliveryOrder.LAYER, None)
            raise MegaMoeUnavailableError(
                f"{self.who}loading layers {id_ranges(layers)} in this order stages up to {need} bytes on the host, "
                f"{available} are available; deliver layer by layer (order='layer'), which needs {least} bytes, "
                "or give a spill_directory. Nothing was changed"
            )


class LoadWindow:
    """One load or reload in progress. Leaving the `with` block closes it; an exception inside it aborts it."""

    def __init__(self, loader: WeightLoader, layers: list[int], order: DeliveryOrder, spill: SpillFile | None) -> None:
        self.layers = layers
        self.spill = spill
        self._loader = loader
        self._order = order
        self._faults = FaultLog()
        self._current: int | None = None
        self._is_open = True
        self._since_trim = 0
        only = loader.stores[layers[0]] if len(layers) == 1 else None
        # A store without a layer index of its own takes names of one layer, whatever its number.
        self._takes_any_layer = only is not None and only.layer is None
        self._seen_layer: int | None = None

    def deliver(self, named: NamedTensors, *, hand_over: bool = False) -> None:
        """Take tensors in any order and any grouping; each complete module is replaced at once (eager finalize).

        Faults of the tensors are collected and raised together by :meth:`close`. Tensors are copied; nothing of the
        caller's is kept.

        Args:
            named: tensors in any supported spelling.
            hand_over: the caller gives the tensors away and will not touch their memory again (e.g. straight from
                :meth:`Checkpoint.iter_layer`); saves the copy.

        Raises:
            MegaMoeStateError: the window is closed.
            MegaMoeWeightError: packing failed, e.g. out of memory; the window is then closed.
        """
        self._require_open()
        for name, tensor in iter_named(named):
            self._take(name, tensor, hand_over)

    def close(self) -> None:
        """End of the delivery: decide absent families, replace what is complete, and judge the rest.

        Raises:
            MegaMoeWeightError: every fault of every layer, and which layers are old and which new.
            MegaMoeStateError: the window is closed already.
        """
        self._require_open()
        for layer in self.layers:
            self._commit(layer, final=True)
        logs = {f"layer {layer}": self._loader.stores[layer].faults() for layer in self.layers}
        texts = [log.text(where) for where, log in {**logs, "delivery": self._faults}.items() if log]
        if texts:
            raise self._failure("; ".join(texts))
        self._end(failed=False)

    @property
    def is_open(self) -> bool:
        """Whether tensors are still taken; a failure closes the window."""
        return self._is_open

    def abort(self, reason: str) -> MegaMoeWeightError:
        """Give up: complete modules stay new, all others old. Returns the error for the caller to raise."""
        self._require_open()
        return self._failure(f"the load was given up: {reason}")

    def __enter__(self) -> LoadWindow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_open:
            return
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            raise self.abort(f"{type(error).__name__}: {error}") from error
        else:
            self._end(failed=True)

    def _require_open(self) -> None:
        if not self._is_open:
            raise MegaMoeStateError(f"{self._loader.who}the load window is closed; open another")

    def _take(self, name: str, tensor: torch.Tensor, hand_over: bool) -> None:
        parsed = parse_name(name)
        if parsed is None:
            self._faults.add(FaultKind.UNEXPECTED, name, None, "not a routed-expert tensor name of a supported dialect")
            return
        layer = self._route(name, parsed.layer)
        if layer is None:
            return
        if parsed.key.component.is_bulk and self._order is DeliveryOrder.LAYER and layer != self._current:
            if self._current is not None:
                self._commit(self._current, final=True)
                self._loader.stores[self._current].end_of_bulk()
            self._current = layer
        self._loader.stores[layer].stage(parsed.key, tensor, parsed.reciprocal, hand_over=hand_over)
        self._commit(layer, final=False)
        if hand_over or tensor.device.type != "cpu":
            return  # leaves nothing of the caller's in the heap
        self._since_trim += tensor.nbytes
        if self._since_trim * _TRIMS_PER_LAYER > self._loader.stores[layer].spec.source_bytes:
            return_freed_memory()
            self._since_trim = 0

    def _route(self, name: str, layer: int | None) -> int | None:
        """Which store a tensor belongs to; None (and a fault) when to none of this window's."""
        if layer is not None and self._takes_any_layer:
            if self._seen_layer not in (None, layer):
                what = f"tensors of layers {self._seen_layer} and {layer}; load one layer at a time"
                self._faults.add(FaultKind.UNEXPECTED, name, None, what)
                return None
            self._seen_layer = layer
            return self.layers[0]
        if layer is None and len(self.layers) == 1:
            return self.layers[0]
        if layer in self.layers:
            return layer
        what = f"this window loads layers {id_ranges(self.layers)}"
        self._faults.add(FaultKind.UNEXPECTED, name, None, what if layer is not None else f"no layer given; {what}")
        return None

    def _commit(self, layer: int, *, final: bool) -> None:
        try:
            self._loader.stores[layer].try_commit(final=final)
        except Exception as error:  # out of memory and the like; the module is still wholly old
            raise self._failure(f"layer {layer} could not be replaced: {type(error).__name__}: {error}") from error

    def _failure(self, reason: str) -> MegaMoeWeightError:
        new = [layer for layer in self.layers if self._loader.stores[layer].was_replaced]
        old = [layer for layer in self.layers if layer not in new]
        self._end(failed=True)
        if any(self._loader.mixed_layers):
            advice = "forward refuses until a retry completes, or until the mix is accepted (accept_mix)"
        else:
            advice = "nothing was replaced; earlier weights, where loaded, stay in use"
        return MegaMoeWeightError(
            f"{self._loader.who}{reason}. Layers wholly old: {id_ranges(old) or 'none'}; wholly new: "
            f"{id_ranges(new) or 'none'}; {advice}"
        )

    def _end(self, *, failed: bool) -> None:
        self._is_open = False
        self._loader.finish(self, failed=failed)


def load_one(
    store: WeightStore,
    named: NamedTensors,
    *,
    families: Iterable[AuxFamily] | None = None,
    rank: int | None = None,
) -> None:
    """Load or reload a single store in one call.

    Args:
        store: a store; with `layer=None` it takes names of any one layer, or bare canonical names.
        named: the layer's tensors, in any order; other ranks' experts may be among them.
        families: as for :meth:`WeightLoader.open`.
        rank: for error texts.

    Raises:
        MegaMoeWeightError: every fault, together; the earlier weights stay in use.
        MegaMoeUnavailableError: not enough host memory for one layer of sources.
        MegaMoeStateError: the store may not be loaded now.
    """
    loader = WeightLoader({0 if store.layer is None else store.layer: store}, rank=rank)
    with loader.open(families=families) as window:
        window.deliver(named)
