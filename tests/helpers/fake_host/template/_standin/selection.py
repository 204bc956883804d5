# SPDX-License-Identifier: Apache-2.0
"""How a backend is chosen and built: re-implemented from the prose of the contract (sections 2.1, 2.2, 3.1)."""

from __future__ import annotations

import re

from tensorrt_llm._standin.lazy import M
from tensorrt_llm._standin.paths import ERA

# ---- carriers


def canonical_quant(quant_algo):
    return None if quant_algo is None else str(quant_algo.value).lower()


def canonical_activation(activation_type):
    return "Swiglu" if activation_type is None else activation_type.name


def canonical_routing(routing):
    return None if routing is None else type(routing).__name__


def MoEProblem__activation_type(self):
    from tensorrt_llm._torch.utils import ActivationType

    return ActivationType[self.activation]


def MoEProblem__quant_algo(self):
    from tensorrt_llm.quantization.mode import QuantAlgo

    return None if self.quant is None else QuantAlgo(self.quant.upper())


def MoEProblem__is_fully_specified(self):
    return None not in (self.hidden_size, self.intermediate_size, self.num_experts, self.top_k)


def MoEEnvironment__has_dep(self, name):
    return name in self.available_deps


def MoEEnvironment__fingerprint(self):
    return f"sm{self.sm}|{','.join(self.available_deps)}|{self.env_flags}"


def MoEEligibility____post_init__(self):
    if self.eligible == (self.reject_reason is not None):
        raise ValueError("a rejection needs a reason and an acceptance has none")


def MoEEligibility____bool__(self):
    return self.eligible


def MoEEligibility__ok(cls):
    return cls(True)


def MoEEligibility__no(cls, reason, detail):
    if not isinstance(reason, M.impl_contract.MoERejectReason):
        raise TypeError(f"reason must be a MoERejectReason, got {reason!r}")
    return cls(False, reason, detail)


def MoERejection__to_dict(self):
    return {"legacy_backend": self.legacy_backend, "reason": self.reason.value, "detail": self.detail}


def MoEResolutionReport__degraded(self):
    return bool(self.requested) and bool(self.rejected) and self.winner is not None


def MoEEplbBinding__eplb_enabled(self):
    return self.layer_load_balancer is not None


# ---- identity


def MoEImplId____post_init__(self):
    for name in ("provider", "technique", "kernel_name", "quant"):
        if not re.match("^[a-z0-9]+(_[a-z0-9]+)*$", getattr(self, name)):
            raise ValueError(f"{name} {getattr(self, name)!r} is not a token")


def MoEImplId__canonical(self):
    return f"{self.provider}.{self.technique}.{self.kernel_name}.{self.quant}"


def MoEImplId____str__(self):
    return self.canonical()


def MoEImplQuery____post_init__(self):
    pass


def MoEImplQuery__matches(self, identity):
    names = ("provider", "technique", "kernel_name", "quant")
    return all(getattr(self, n) in (None, getattr(identity, n)) for n in names)


def MoEImplDescriptor__impl_id(self):
    return self.identity.canonical()


def MoEImplRegistry____init__(self):
    self._classes = {}


def MoEImplRegistry____len__(self):
    return len(self._classes)


def MoEImplRegistry__known_tokens(self):
    names = ("provider", "technique", "kernel_name", "quant")
    return {getattr(identity, name): name for identity in self._classes for name in names}


def MoEImplRegistry___check_tokens_disjoint(self, identity):
    known = self.known_tokens()
    for name in ("provider", "technique", "kernel_name", "quant"):
        token = getattr(identity, name)
        if known.get(token, name) != name:
            raise ValueError(f"token {token!r} of {name} is already used as {known[token]}")


def MoEImplRegistry__register(self, cls):
    identity = cls.descriptor.identity
    self._check_tokens_disjoint(identity)
    if identity in self._classes:
        raise ValueError(f"{identity} is registered twice")
    self._classes[identity] = cls
    return cls


def MoEImplRegistry__identities(self):
    return tuple(self._classes)


def MoEImplRegistry__lookup(self, identity):
    return self._classes.get(identity)


def MoEImplRegistry__parse_query(self, text):
    known, fields = self.known_tokens(), {}
    for token in text.split("."):
        if token not in known:
            raise ValueError(f"unknown implementation token {token!r}")
        fields[known[token]] = token
    return M.impl_identity.MoEImplQuery(**fields)


def MoEImplRegistry__find(self, query):
    return [(identity, cls) for identity, cls in self._classes.items() if query.matches(identity)]


def register_moe_impl(cls):
    return M.impl_identity.MOE_IMPL_REGISTRY.register(cls)


# ---- resolution


def infer_swiglu_gptoss_style(*, bias=False, activation_type=None):
    return bool(bias) or (activation_type is not None and activation_type.name == "SwigluBias")


def _problem_fields(names, values):
    return {name: value for name, value in values.items() if name in names}


def build_moe_problem(
    model_config,
    *,
    override_quant_config=None,
    dtype=None,
    num_experts=None,
    hidden_size=None,
    intermediate_size=None,
    top_k=None,
    swiglu_gptoss_style=None,
    bias=None,
    activation=None,
    routing=None,
):
    Problem = M.impl_contract.MoEProblem
    quant_config = override_quant_config or model_config.quant_config
    kind = getattr(activation, "kind", activation)
    constants = M.activation.activation_constant_names(activation) if hasattr(activation, "constants") else ()
    values = {
        "quant": canonical_quant(quant_config.quant_algo),
        "dtype_act": dtype or model_config.torch_dtype,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": top_k if top_k is not None else getattr(routing, "top_k", None),
        "swiglu_gptoss_style": swiglu_gptoss_style,
        "bias": bias,
        "activation": canonical_activation(kind),
        "activation_constants": frozenset(constants),
        "routing": canonical_routing(routing),
    }
    return Problem(**_problem_fields(Problem.__dataclass_fields__, values))


def build_moe_deployment(model_config, *, num_experts=None, environment=None):
    from tensorrt_llm._torch.environment import collect_moe_environment

    mapping = model_config.mapping
    balancer = model_config.moe_load_balancer
    return M.impl_contract.MoEDeployment(
        ep_size=mapping.moe_ep_size,
        tp_size=mapping.moe_tp_size,
        use_dp=mapping.enable_attention_dp,
        num_slots=balancer.num_slots if balancer is not None and balancer.num_slots else num_experts,
        env=environment or collect_moe_environment(),
        parallel_size=mapping.tp_size,
        cluster_size=mapping.moe_cluster_size,
        eplb_enabled=balancer is not None,
        moe_lora_enabled=model_config.lora_config is not None,
    )


def _candidates_for(backend):
    resolution = M.moe_resolution
    if backend == "WIDEEP" or backend not in resolution.BACKEND_FAMILY:
        raise ValueError(f"Unsupported moe backend: {backend}")
    family = resolution.BACKEND_FAMILY[backend]
    candidates = [cls for cls in resolution.IMPL_PRIORITY if cls in family]
    if resolution.FALLBACK_IMPL not in family and backend not in resolution.NO_FALLBACK_BACKENDS:
        candidates.append(resolution.FALLBACK_IMPL)
    return candidates


def _candidates_for_impl_id(query):
    found = [cls for _, cls in M.impl_identity.MOE_IMPL_REGISTRY.find(query)]
    if not found:
        raise ValueError(f"no implementation matches {query}")
    if any(cls not in M.moe_resolution.IMPL_PRIORITY for cls in found):
        raise RuntimeError(f"{[cls.__name__ for cls in found]} is registered but absent from IMPL_PRIORITY")
    return [cls for cls in M.moe_resolution.IMPL_PRIORITY if cls in found]


def _carries_activation(candidate, problem):
    """The declaration must execute the kind and have a place for each constant; without one anything goes."""
    contract, support = M.impl_contract, getattr(candidate, "activation_support", None)
    if support is None:
        return contract.MoEEligibility.ok()
    fields = {"alpha": "alpha_beta", "beta": "alpha_beta", "clamp": "limit"}
    unsupported = [c for c in problem.activation_constants if getattr(support, fields[c]).name == "UNSUPPORTED"]
    if problem.activation_type in support.kinds and not unsupported:
        return contract.MoEEligibility.ok()
    return contract.MoEEligibility.no(
        contract.MoERejectReason.ACTIVATION_UNSUPPORTED, f"{candidate.__name__} does not execute {problem.activation}"
    )


def _legacy_backend_name(impl_cls):
    if ERA == "D2":
        return impl_cls.__name__
    for name, family in M.moe_resolution.BACKEND_FAMILY.items():
        if impl_cls in family:
            return name
    return impl_cls.__name__


def resolve_moe_impl(
    model_config,
    *,
    problem=None,
    deployment=None,
    override_quant_config=None,
    dtype=None,
    num_experts=None,
    hidden_size=None,
    intermediate_size=None,
    swiglu_gptoss_style=None,
    bias=None,
    activation=None,
    routing=None,
    layer_idx=None,
    allow_degradation=True,
    impl_id=None,
):
    contract, resolution = M.impl_contract, M.moe_resolution
    if problem is None:
        problem = build_moe_problem(
            model_config,
            override_quant_config=override_quant_config,
            dtype=dtype,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            swiglu_gptoss_style=swiglu_gptoss_style,
            bias=bias,
            activation=activation,
            routing=routing,
        )
    if deployment is None:
        deployment = build_moe_deployment(model_config, num_experts=problem.num_experts)
    requested = model_config.moe_backend.upper()
    if impl_id is not None:
        candidates = _candidates_for_impl_id(M.impl_identity.MOE_IMPL_REGISTRY.parse_query(impl_id))
        allow_degradation = False
    else:
        candidates = _candidates_for(requested)
    rejected, eligible = [], []
    for candidate in candidates:
        if deployment.moe_lora_enabled and not candidate.capabilities.supports_moe_lora:
            verdict = contract.MoEEligibility.no(contract.MoERejectReason.LORA_UNSUPPORTED, "no MoE LoRA")
        else:
            verdict = candidate.can_implement(problem, deployment)
        verdict = verdict and _carries_activation(candidate, problem)
        if verdict:
            eligible.append(candidate)
        else:
            rejection = contract.MoERejection(_legacy_backend_name(candidate), verdict.reject_reason, verdict.detail)
            rejected.append(rejection)
    winner = eligible[0] if eligible else None
    asked_for = candidates if impl_id is not None else resolution.BACKEND_FAMILY[requested]
    selected_by = "failed" if winner is None else "pinned" if winner in asked_for else "heuristic"
    if selected_by != "pinned" and not allow_degradation:
        raise ValueError(f"layer {layer_idx}: {requested} is not eligible: {[r.detail for r in rejected]}")
    names = tuple(cls.__name__ for cls in eligible)
    return contract.MoEResolutionReport(
        problem, deployment, names[0] if names else None, selected_by, tuple(rejected), names, requested
    )


def impl_class_for(report):
    if report.winner is None:
        raise ValueError(f"no MoE implementation can serve this layer: {[r.detail for r in report.rejected]}")
    found = [cls for cls in M.moe_resolution.IMPL_PRIORITY if cls.__name__ == report.winner]
    if len(found) != 1:
        raise RuntimeError(f"{report.winner!r} names {len(found)} classes of IMPL_PRIORITY")
    return found[0]


def resolve_moe_cls(model_config, **kwargs):
    return impl_class_for(M.moe_resolution.resolve_moe_impl(model_config, **kwargs))


# ---- creation


def _construct_backend(moe_cls, keywords):
    create = M.create_moe
    if moe_cls.__name__ == "CutlassFusedMoE":
        return moe_cls(**keywords)
    if moe_cls in create.standin_mega_classes():
        for name in ("bias", "without_comm"):
            keywords.pop(name, None)
        return moe_cls(**keywords)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe_backend(moe_cls, *positional, **keywords):
    import inspect

    bound = inspect.signature(M.create_moe.create_moe_backend).bind(moe_cls, *positional, **keywords)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop("moe_cls")
    return _construct_backend(moe_cls, arguments)


def create_moe(routing_method, *positional, **keywords):
    import inspect

    create = M.create_moe
    bound = inspect.signature(create.create_moe).bind(routing_method, *positional, **keywords)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    model_config = arguments["model_config"]
    override = arguments.pop("override_quant_config")
    allow = arguments.pop("allow_backend_degradation", True)
    arguments.pop("communication_method", None)
    activation = arguments.get("activation", arguments.get("activation_type"))
    bias = arguments.pop("bias")
    moe_cls = create.standin_resolve(
        model_config,
        override_quant_config=override,
        dtype=arguments["dtype"],
        num_experts=arguments["num_experts"],
        hidden_size=arguments["hidden_size"],
        intermediate_size=arguments["intermediate_size"],
        swiglu_gptoss_style=create.infer_swiglu_gptoss_style(
            bias=bias, activation_type=getattr(activation, "kind", activation)
        ),
        bias=bias,
        activation=activation,
        routing=routing_method,
        layer_idx=arguments["layer_idx"],
        allow_degradation=allow,
    )
    if issubclass(moe_cls, create.STANDIN_WRAPPED_BASE):
        return M.configurable_moe.ConfigurableMoE(
            moe_cls=moe_cls, override_quant_config=override, bias=bias, **arguments
        )
    return create.create_moe_backend(moe_cls, bias=bias, **arguments)
