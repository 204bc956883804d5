# SPDX-License-Identifier: Apache-2.0
"""The host's expert load balancing (EPLB) for one layer: which kind it is, and our part in moving experts (R25).

Static: each slot holds one expert for good. Dynamic: between steps the host's balancer overwrites slots with copies of
experts that it keeps in host memory, byte by byte, under the names and in the sizes that a backend registered. What we
register is what a launch reads of an expert (packed records and factors, never sources), so a moved expert is whole.

Called by the quantisation method. No import of tensorrt_llm: the balancer comes as an object.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.weights.spec import LayerShape, ModuleSpec
from trtllm_megamoe.weights.store import WeightStore

logger = logging.getLogger(__name__)

_PREFIX = "megamoe_"
"""Of the parameters that the balancer finds a module's slots by."""


class Balancing(enum.Enum):
    """How the host places a layer's experts."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"


def balancing_of(balancer: Any) -> Balancing:
    """The kind of a layer's load balancer.

    Raises:
        MegaMoeConfigError: It is neither static nor one that moves experts by copies in host memory.
    """
    if balancer is None:
        return Balancing.NONE
    if balancer.is_dynamic_routing():
        return Balancing.DYNAMIC
    if balancer.is_static_routing():
        return Balancing.STATIC
    raise MegaMoeConfigError(
        f"the load balancer {type(balancer).__name__} neither keeps experts where they are nor moves them by copies in "
        "host memory; static placement and layer_updates_per_iter are supported"
    )


def slots_of_expert(assignments: Sequence[int] | None, num_experts: int) -> dict[int, list[int]] | None:
    """Expert -> its slots, or None where slots are the experts themselves.

    Raises:
        MegaMoeConfigError: An assignment names no expert, or an expert has no slot.
    """
    if assignments is None or list(assignments) == list(range(num_experts)):
        return None
    slots: dict[int, list[int]] = {}
    for slot, expert in enumerate(assignments):
        slots.setdefault(int(expert), []).append(slot)
    wrong = sorted(set(slots) - set(range(num_experts)))
    homeless = sorted(set(range(num_experts)) - set(slots))
    if wrong or homeless:
        raise MegaMoeConfigError(
            f"illegal expert placement: slots name unknown experts {wrong}; experts without a slot: {homeless}"
        )
    return slots


class Migration:
    """This rank's share of the experts in host memory, and the registration of its slots.

    `store` is loaded beside the layer's own; :meth:`publish` hands both to the balancer and forgets the share.

    Raises:
        MegaMoeUnavailableError: The balancer gives out experts in a way this plug-in does not know.
    """

    def __init__(self, module: Any, layer: MegaMoELayer) -> None:
        share = [int(expert) for expert in module.layer_load_balancer.get_load_expert_ids()]
        if not share or share != list(range(share[0], share[0] + len(share))):
            raise MegaMoeUnavailableError(
                f"{layer.weights.where}: the load balancer gives this rank the experts {share} to keep in host memory, "
                "expected consecutive ones; set layer_updates_per_iter: 0"
            )
        shape = LayerShape(module.hidden_size, module.intermediate_size, module.num_experts, layer.config.top_k)
        self.store: WeightStore | None = WeightStore(
            ModuleSpec(shape, share[0], len(share)),
            layout=layer.weights.layout.name,
            mode=layer.weights.activation_mode,
            layer=layer.weights.layer,
        )
        self._layer = layer
        self._names: tuple[str, ...] = ()

    def publish(self, module: Any) -> None:
        """Register slots and host copies with the balancer, which copies them; once, when both stores are loaded."""
        if self.store is None:
            return
        images = self._layer.slot_tensors(self.store)
        num_experts, self.store = self.store.spec.num_local_experts, None
        slots = self._layer.slot_tensors()
        self._names = tuple(slots)
        for name, tensor in slots.items():
            module.register_parameter(_PREFIX + name, nn.Parameter(_by_row(tensor), requires_grad=False))
        module.register_all_parameter_slot_and_to_fix_weight_fns(
            {_PREFIX + name: _by_row(image)[:num_experts].contiguous() for name, image in images.items()}
        )
        # runs after the balancer has moved the parameters to memory that it can write from the host
        module.layer_load_balancer.add_register_weight_fn(self._adopt, (module,))
        module.layer_load_balancer.host_tensor_sharer.finalize_layer_weights()
        logger.info("%s: %d experts of %d in host memory", self._layer.weights.where, num_experts, module.num_experts)

    def _adopt(self, module: Any) -> None:
        moved: Mapping[str, torch.Tensor] = {name: getattr(module, _PREFIX + name).data for name in self._names}
        strangers = sorted({str(t.device) for t in moved.values() if t.device.type != self._layer.device.type})
        if strangers:
            raise MegaMoeUnavailableError(
                f"{self._layer.weights.where}: the load balancer moved the experts to {', '.join(strangers)}, engine "
                f"'{self._layer.engine_name}' reads them on {self._layer.device}"
            )
        self._layer.adopt_slot_tensors(moved)


def _by_row(tensor: torch.Tensor) -> torch.Tensor:
    """(n, bytes) view: the balancer takes slots of one dimension or two."""
    return tensor.view(tensor.shape[0], -1)
