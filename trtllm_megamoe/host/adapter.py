# SPDX-License-Identifier: Apache-2.0
"""The MoE backend class that the host builds: one per base class of the host, thin over :class:`MegaMoELayer`.

Everything era-free is in :class:`BackendLogic`, which imports nothing of the host; :func:`make_backend_class` puts it
over `MoE` (era C) or `MoEImplBase` (era D). Called by registration only.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trtllm_megamoe.buckets import launch_cap
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError, MegaMoeStateError, MegaMoeUnavailableError
from trtllm_megamoe.formats import ScorePlacement
from trtllm_megamoe.host.activation import constants_of, declared_support, require_no_hidden_activation
from trtllm_megamoe.host.compat import Era, HostApi, require_migration
from trtllm_megamoe.host.eligibility import HOST_REASONS, judge_host
from trtllm_megamoe.host.migration import Balancing, balancing_of
from trtllm_megamoe.host.ops import moe_forward, register_layer
from trtllm_megamoe.host.quant_method import ModuleWeights, QuantMethodLogic
from trtllm_megamoe.host.ranks import ep_communicator, why_not_pure_dep
from trtllm_megamoe.host.settings import HostSettings
from trtllm_megamoe.host.workspaces import WorkspacePool
from trtllm_megamoe.layer import MegaMoELayer

logger = logging.getLogger(__name__)

CLASS_NAME = "TrtllmMegamoeBackend"
"""Name of the backend class in the host's reports; unique among its implementations."""

_backends: weakref.WeakSet[BackendLogic] = weakref.WeakSet()
_workspaces = WorkspacePool()


def accept_mixed_weights() -> None:
    """Let every layer of this process run on the weights it has, although a reload failed (R24)."""
    for backend in _backends:
        if backend.megamoe_weights is not None:
            backend.megamoe_weights.accept()


class BackendLogic:
    """What a backend does in every era. Mixed in before the host's base class, whose state it reads as attributes.

    Collective: `create_weights` and `run_moe`, in the same order on all ranks. Graph-safe: `run_moe`, as far as the
    engine is.
    """

    # set by the base class's construction and by the wrapper's synchronisation
    mapping: Any
    routing_method: Any
    layer_idx: int | None
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_slots: int
    initial_global_assignments: Any
    layer_load_balancer: Any
    weight_loading_mode: Any
    quant_config: Any
    _get_quant_method: Callable[[], Any]
    # ours
    megamoe_api: HostApi
    megamoe_settings: HostSettings
    megamoe_layer: MegaMoELayer | None
    megamoe_weights: ModuleWeights | None
    quant_scales: tuple[torch.Tensor, ...]

    def _prepare(self, model_config: Any, apply_router_weight_on_input: bool) -> None:
        """After the base class's construction: judge what needs no peer, remember what `create_weights` needs (R7)."""
        if apply_router_weight_on_input:
            raise MegaMoeConfigError(f"{CLASS_NAME}: apply_router_weight_on_input is not supported")
        obstacle = why_not_pure_dep(self.mapping)
        if obstacle is not None:
            raise MegaMoeConfigError(f"rank {self.mapping.rank}: {obstacle}")
        self._cap = launch_cap(
            getattr(model_config, "moe_max_num_tokens", None), getattr(model_config, "max_num_tokens", None)
        )
        self._pretrained_config = getattr(model_config, "pretrained_config", None)
        require_no_hidden_activation(self._pretrained_config)
        self._handle = 0
        self._launch_tokens: int | None = None
        self._is_prepared = False
        self.megamoe_layer = None
        self.megamoe_weights = None
        _backends.add(self)

    @property
    def where(self) -> str:
        """How messages name this layer."""
        return f"rank {self.mapping.rank}: layer {self.layer_idx}"

    # ---- weights: defined here, because eras disagree on which of these their base classes implement

    def create_weights(self) -> None:
        """Construct the layer, once the wrapper has synchronised its state. Collective, idempotent.

        The host builds models in a mode that makes each new tensor a placeholder without memory; a workspace that peers
        map is not one of those.
        """
        self._require_nvfp4()
        if self.megamoe_weights is None:
            with _disable_current_modes():
                self.quant_method = self._get_quant_method()
                self.quant_method.create_weights(self)
        self._weights_created = True

    def _created_method(self) -> Any:
        """The quantisation method; loaders may reach a module whose creation the host deferred."""
        if self.megamoe_weights is None:
            self.create_weights()
        return self.quant_method

    def _require_nvfp4(self) -> None:
        """The host may exclude modules from quantisation after it has chosen their backends."""
        algo = getattr(self.quant_config, "quant_algo", None)
        if algo is None or str(getattr(algo, "value", algo)).upper() != "NVFP4":
            raise MegaMoeConfigError(
                f"{self.where}: its experts are {algo or 'not quantised'} by the model's own exclusions, this backend "
                "runs NVFP4 experts only; name another backend for this model"
            )

    def load_weights(self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False) -> None:
        """See `QuantMethodLogic.load_weights`; the host gives a list of one mapping."""
        self._created_method().load_weights(self, weights, self.weight_loading_mode, allow_partial_loading)

    def process_weights_after_loading(self) -> None:
        """See `QuantMethodLogic`."""
        self._created_method().process_weights_after_loading(self)

    def transform_weights(self) -> None:
        """See `QuantMethodLogic`."""
        self._created_method().transform_weights(self)

    def cache_derived_state(self) -> None:
        """See `QuantMethodLogic`."""
        self._created_method().cache_derived_state(self)

    def post_load_weights(self) -> None:
        """See `QuantMethodLogic`."""
        self._created_method().post_load_weights(self)

    def pre_reload_weights(self) -> None:
        """See `QuantMethodLogic`."""
        self._created_method().pre_reload_weights(self)

    def build_layer(self) -> MegaMoELayer:
        """Construct the layer from what the host has synchronised by now. Collective."""
        balancing = balancing_of(self.layer_load_balancer)
        if balancing is Balancing.DYNAMIC:
            require_migration(self.megamoe_api)
        settings = self.megamoe_settings
        comm = ep_communicator(self.mapping, settings.timeout_s)
        config = self._layer_config()
        self._workspace = _workspaces.acquire(config, comm)
        layer = MegaMoELayer(
            config,
            comm,
            layer=self.layer_idx,
            workspace=self._workspace,
            dynamic_eplb=balancing is Balancing.DYNAMIC,
        )
        self.megamoe_layer = layer
        self._handle = register_layer(layer)
        logger.info("%s: %s runs here, engine %s", self.where, CLASS_NAME, layer.engine_name)
        return layer

    def _layer_config(self) -> MegaMoeConfig:
        settings = self.megamoe_settings
        constants = constants_of(self)
        architectures = getattr(self._pretrained_config, "architectures", None) or [None]
        placement = settings.score_placement or ScorePlacement.for_architecture(architectures[0])
        return MegaMoeConfig.create(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_slots,
            top_k=self._top_k(),
            max_tokens_per_rank=self._cap,
            combine_format=settings.combine_format,
            activations=settings.activations,
            score_placement=placement,
            swiglu_limit=constants.limit,
            swiglu_alpha=constants.alpha,
            swiglu_beta=constants.beta,
            engine=settings.engine,
            timeout_s=settings.timeout_s,
        )

    def _top_k(self) -> int:
        for name in ("experts_per_token", "top_k"):
            found = getattr(self.routing_method, name, None)
            if isinstance(found, int):
                return found
        found = getattr(self._pretrained_config, "num_experts_per_tok", None)
        if isinstance(found, int):
            return found
        raise MegaMoeConfigError(
            f"{self.where}: the number of experts per token is in neither the routing method "
            f"{type(self.routing_method).__name__} nor the model's configuration; it has no default"
        )

    # ---- forward

    def validate_configurable_moe(self, moe: Any) -> None:
        """The wrapper asks once whether it fits.

        Raises:
            MegaMoeConfigError: It would communicate itself, or its chunk bound is not positive.
        """
        if moe.comm is not None:
            raise MegaMoeConfigError(f"{self.where}: the wrapper brings its own communication; the launch does it all")
        if moe.moe_max_num_tokens < 1:
            raise MegaMoeConfigError(f"{self.where}: moe_max_num_tokens is {moe.moe_max_num_tokens}, must be positive")

    def quantize_input(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Hand the rows on as they are: the launch quantises them itself, on every GPU, by docs/numerics.md."""
        if not isinstance(x, torch.Tensor):
            raise MegaMoeConfigError(f"{self.where}: x is a {type(x).__name__}, expected a bfloat16 tensor")
        return x, None

    def set_adaptive_launch_tokens(self, num_tokens: int | None) -> None:
        """Tokens of the fullest rank in the next launch; consumed by it (R2).

        Raises:
            MegaMoeCapacityError: More than the cap; nothing was launched.
        """
        if num_tokens is not None and num_tokens > self._cap:
            raise MegaMoeCapacityError(
                f"{self.where}: {num_tokens} tokens on the fullest rank exceed the cap of {self._cap} tokens per rank "
                "(the smaller of moe_config.max_num_tokens and max_num_tokens); nothing was launched"
            )
        self._launch_tokens = num_tokens

    def run_moe(self, ctx: Any, *, workspace: Any = None) -> torch.Tensor:
        """One launch on this rank's rows, zero rows included; the result is already summed over all ranks.

        Raises:
            MegaMoeStateError: Weights are not loaded, or a reload is open or has failed.
            MegaMoeConfigError: LoRA, an unfinalised result or another output dtype was asked for.
        """
        hint, self._launch_tokens = self._launch_tokens, None
        if ctx.lora_params is not None or not ctx.do_finalize:
            raise MegaMoeConfigError(f"{self.where}: lora_params and do_finalize=False are not supported")
        if ctx.output_dtype not in (None, torch.bfloat16):
            raise MegaMoeConfigError(f"{self.where}: output dtype {ctx.output_dtype}, this backend returns bfloat16")
        ids, scales = ctx.token_selected_experts, ctx.token_final_scales
        return self._launch(ctx.x, ids, scales, hint or 0)

    def forward_impl(self, x: torch.Tensor, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Era C's direct entry, without the wrapper: one chunk, routed here."""
        ids, scales = self.routing_method.apply(router_logits, kwargs.get("input_ids"))
        counts = kwargs.get("all_rank_num_tokens")
        launch_tokens = max(counts) if counts else 0
        return self._launch(x, ids.to(torch.int32), scales.to(torch.float32), launch_tokens)

    def _launch(self, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, launch_tokens: int) -> torch.Tensor:
        """The first launch of a layer launches every bucket once without tokens, so that none compiles in a capture."""
        if self.megamoe_weights is None or self.megamoe_layer is None:
            raise MegaMoeStateError(f"{self.where}: forward before create_weights")
        self.megamoe_weights.require_usable()
        if not self._is_prepared:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise MegaMoeStateError(
                    f"{self.where}: the first launch of this layer is inside a graph capture; run the host's general "
                    "warm-up (one eager forward) on all ranks before capturing"
                )
            self.megamoe_layer.prepare()
            self._is_prepared = True
        return moe_forward(x, ids, scales, launch_tokens, self._handle)

    def shutdown(self) -> None:
        """Give the layer's share of its workspace back. Idempotent; every rank calls it."""
        if self.megamoe_layer is not None:
            self.megamoe_layer.close()
            _workspaces.release(self._workspace)
            self.megamoe_layer = None
            self.megamoe_weights = None


def make_backend_class(api: HostApi, settings: HostSettings) -> type:
    """The backend class of this host. Called once per process."""
    contract, quantization = api.module("impl_contract"), api.module("quantization")
    quant_members: dict[str, Any] = {"quantizes_nvfp4_activations": settings.activations != "bf16"}
    if hasattr(quantization, "EplbSupportStatus"):
        quant_members["eplb_support_status"] = quantization.EplbSupportStatus.SUPPORTED
    quant_method = type("MegaMoeQuantMethod", (QuantMethodLogic, quantization.FusedMoEMethodBase), quant_members)

    def can_implement(cls: type, p: Any, d: Any) -> Any:
        verdict = judge_host(p, d, settings)
        if verdict.is_eligible:
            return contract.MoEEligibility.ok()
        reason = getattr(contract.MoERejectReason, HOST_REASONS[verdict.rejections[0][0]])
        return contract.MoEEligibility.no(reason, verdict.describe())

    members: dict[str, Any] = {
        "__doc__": "MEGAMOE_CUTEDSL by trtllm-megamoe.",
        "__module__": __name__,
        "megamoe_api": api,
        "activation_support": declared_support(api),
        "megamoe_settings": settings,
        "scheduler_kind": api.get("interface", "MoESchedulerKind").FUSED_COMM,
        "capabilities": _capabilities(contract.MoEStaticCapability),
        "can_implement": classmethod(can_implement),
        "_get_quant_method": lambda self: quant_method(),
        "_supports_load_balancer": lambda self: True,
    }
    if api.era is Era.D:
        base, members["__init__"] = api.get("impl_base", "MoEImplBase"), _init_over_impl_base(api)
        members["descriptor"] = _descriptor(api, members)
    else:
        base, members["__init__"] = api.get("interface", "MoE"), _init_over_moe(api)
    return type(CLASS_NAME, (BackendLogic, base), members)


def _capabilities(capability: type) -> Any:
    wanted = {"supports_eplb": True}
    known = {f.name for f in dataclasses.fields(capability)}
    return capability(**{name: value for name, value in wanted.items() if name in known})


def _descriptor(api: HostApi, members: dict[str, Any]) -> Any:
    identity = api.module("impl_identity")
    return identity.MoEImplDescriptor(
        identity=identity.MoEImplId(
            provider="trtllm_megamoe", technique="cutedsl", kernel_name="mega_moe", quant="nvfp4"
        ),
        scheduler_kind=members["scheduler_kind"],
        capabilities=members["capabilities"],
        doc=members["__doc__"],
    )


def _init_over_moe(api: HostApi) -> Any:
    base = api.get("interface", "MoE")
    names = _parameter_names(base.__init__)

    def __init__(self: Any, *, model_config: Any, apply_router_weight_on_input: bool = False, **kwargs: Any) -> None:
        kwargs["init_load_balancer"] = False  # the wrapper owns it
        base.__init__(self, model_config=model_config, **_understood(kwargs, names))
        self._prepare(model_config, apply_router_weight_on_input)

    return __init__


def _init_over_impl_base(api: HostApi) -> Any:
    base = api.get("impl_base", "MoEImplBase")
    apply_state = api.get("impl_base", "apply_moe_impl_construction_state")
    names = _parameter_names(apply_state)

    def __init__(self: Any, *, model_config: Any, apply_router_weight_on_input: bool = False, **kwargs: Any) -> None:
        kwargs.pop("init_load_balancer", None)
        base.__init__(self, eplb=None)
        apply_state(self, model_config=model_config, **_understood(kwargs, names))
        self._prepare(model_config, apply_router_weight_on_input)

    return __init__


def _parameter_names(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _understood(kwargs: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Arguments that the host's construction takes; one it does not take must carry nothing, or it would be lost.

    Raises:
        MegaMoeUnavailableError: An argument with a value has no place; guessing what it means would be wrong results.
    """
    lost = [name for name, value in kwargs.items() if name not in names and not _says_nothing(name, value)]
    if lost:
        listed = ", ".join(f"{name} ({type(kwargs[name]).__name__})" for name in lost)
        raise MegaMoeUnavailableError(
            f"the host builds {CLASS_NAME} with arguments this plug-in does not know: {listed}; "
            "run: python -m trtllm_megamoe doctor --host"
        )
    return {name: value for name, value in kwargs.items() if name in names}


def _says_nothing(name: str, value: Any) -> bool:
    """Unset, or a way of saying what is the case anyway: the launch communicates itself, SwiGLU by its name."""
    if value is None or value is False or name == "without_comm":
        return True
    return name == "activation" and isinstance(value, str) and value.lower() in ("swiglu", "silu")
