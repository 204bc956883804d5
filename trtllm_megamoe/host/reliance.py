# SPDX-License-Identifier: Apache-2.0
"""What the plug-in relies on inside tensorrt_llm, as one table, and how a real installation differs from it.

Read by `compat` (which refuses a host that lacks any of it), by `doctor --host` and by the tests. Pure: it looks at
objects that the caller has imported. Anything the table does not name may change without harm.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

BACKEND = "MEGAMOE_CUTEDSL"
"""The literal of `moe_config.backend` that selects this plug-in."""

UPSTREAM_CLASS = "MegaMoECuteDsl"
"""The host's own class behind that literal, under the name (or alias) that every era keeps."""

Use = Literal["called", "overridden", "members", "global"]


@dataclass(frozen=True, slots=True)
class Relied:
    """One thing the plug-in needs.

    `module` is relative to the host's MoE package, or absolute when it starts with `tensorrt_llm`. By `use`, `names`
    are: parameters we pass (`called`), parameters the host may pass to our override (`overridden`), members we read
    (`members`), or module globals that the module's own functions must read at call time, because we replace them
    (`global`).
    """

    module: str
    name: str
    use: Use
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Deviation:
    """One difference between the installed host and the table."""

    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


_LAYER = ("routing_method", "num_experts", "hidden_size", "intermediate_size", "dtype", "reduce_results",
          "model_config", "aux_stream_dict", "weight_loading_mode", "layer_idx")  # fmt: skip

COMMON = (
    Relied("impl_contract", "MoEEligibility.ok", "called"),
    Relied("impl_contract", "MoEEligibility.no", "called", ("reason", "detail")),
    Relied("impl_contract", "MoERejectReason", "members", (
        "QUANT_UNSUPPORTED", "DTYPE_UNSUPPORTED", "SM_UNSUPPORTED", "DEP_MISSING", "SHAPE_UNALIGNED",
        "SLOTS_NOT_DIVISIBLE_BY_EP", "TOPOLOGY_UNSUPPORTED", "LORA_UNSUPPORTED", "ACTIVATION_UNSUPPORTED",
        "ROUTING_UNSUPPORTED", "EPLB_UNSUPPORTED",
    )),
    Relied("impl_contract", "MoEProblem", "members", (
        "quant", "dtype_act", "hidden_size", "intermediate_size", "num_experts", "top_k", "activation",
        "swiglu_gptoss_style",
    )),
    Relied("impl_contract", "MoEDeployment", "members", (
        "ep_size", "tp_size", "use_dp", "num_slots", "env", "parallel_size", "cluster_size", "moe_lora_enabled",
    )),
    Relied("impl_contract", "MoEEnvironment", "members", ("sm",)),
    Relied("impl_contract", "MoERunContext", "members", (
        "token_selected_experts", "token_final_scales", "x", "output_dtype", "do_finalize", "lora_params",
    )),
    Relied("interface", "MoESchedulerKind", "members", ("FUSED_COMM",)),
    Relied("interface", "MoEWeightLoadingMode", "members", ("VANILLA",)),
    Relied("quantization", "FusedMoEMethodBase", "members", ("load_weights", "transform_weights")),
    Relied("moe_resolution", "IMPL_PRIORITY", "members"),
    Relied("moe_resolution", "BACKEND_FAMILY", "members"),
    Relied("moe_resolution", "resolve_moe_impl", "called", ("model_config", "layer_idx", "allow_degradation")),
    Relied("create_moe", "resolve_moe_cls", "called", ("model_config",)),
    Relied("create_moe", UPSTREAM_CLASS, "global", (UPSTREAM_CLASS,)),
    Relied("create_moe", "create_moe", "global", ("resolve_moe_cls",)),
)  # fmt: skip

WORKER_ENTRY = (
    Relied("tensorrt_llm.executor.worker", "worker_main", "members"),
    Relied("tensorrt_llm.executor.proxy", "worker_main", "global", ("worker_main",)),
)
"""Checked apart: these modules may still be importing while the MoE modules are complete."""

OVER_MOE = (
    Relied("interface", "MoE.__init__", "called", (*_LAYER, "init_load_balancer")),
    Relied("interface", "MoE.can_implement", "overridden", ("p", "d")),
    Relied("interface", "MoE.quantize_input", "overridden", ("x",)),
    Relied("interface", "MoE.run_moe", "overridden", ("ctx", "workspace")),
    Relied("interface", "MoE.create_weights", "overridden"),
    Relied("interface", "MoE.load_weights", "overridden", ("weights", "allow_partial_loading")),
    Relied("interface", "MoE.validate_configurable_moe", "overridden", ("moe",)),
)

OVER_IMPL_BASE = (
    Relied("impl_base", "MoEImplBase.__init__", "called", ("eplb",)),
    Relied("impl_base", "apply_moe_impl_construction_state", "called", ("module", *_LAYER)),
    Relied("impl_base", "MoEImplBase.can_implement", "overridden", ("p", "d")),
    Relied("impl_base", "MoEImplBase.quantize_input", "overridden", ("x",)),
    Relied("impl_base", "MoEImplBase.run_moe", "overridden", ("ctx", "workspace")),
    Relied("impl_base", "MoEImplBase.create_weights", "overridden"),
    Relied("impl_base", "MoEImplBase.load_weights", "overridden", ("weights", "allow_partial_loading")),
    Relied("impl_base", "MoEImplBase.validate_configurable_moe", "overridden", ("moe",)),
    Relied("impl_identity", "MoEImplId", "members", ("provider", "technique", "kernel_name", "quant")),
    Relied("impl_identity", "MoEImplDescriptor", "members", ("identity", "scheduler_kind", "capabilities", "doc")),
    Relied("impl_identity", "register_moe_impl", "called", ("cls",)),
)

ACTIVATION_CARRIER = (
    Relied("activation", "MoEActivationSupport", "called", ("kinds", "alpha_beta", "limit")),
    Relied("activation", "ActivationParamShape", "members", ("UNIFORM_SCALAR",)),
    Relied("activation", "MaterializedActivation", "members", ("alpha", "beta", "clamp")),
    Relied("activation", "install_activation_params", "called", ("module",)),
    Relied("tensorrt_llm._torch.utils", "ActivationType", "members", ("Swiglu", "SwigluBias")),
)
"""Checked where the host has that module."""

MIGRATION = (
    Relied("moe_load_balancer", "SingleLayerMoeLoadBalancer", "members", (
        "is_dynamic_routing", "is_static_routing", "get_load_expert_ids", "add_register_weight_fn",
        "set_initial_weight_assignments",
    )),
    Relied("moe_load_balancer", "SingleLayerMoeLoadBalancer.add_register_weight_fn", "called", ("fn", "args")),
    Relied("moe_load_balancer", "HostMoeTensorSharer", "members", ("finalize_layer_weights",)),
)  # fmt: skip
"""Needed by layers whose experts move at run time only; a host that differs here still serves the others."""

_REGISTER = "register_all_parameter_slot_and_to_fix_weight_fns"
MIGRATION_OVER_MOE = (Relied("interface", f"MoE.{_REGISTER}", "called", ("weight_and_tensor_dict",)),)
MIGRATION_OVER_IMPL_BASE = (Relied("impl_base", f"MoEImplBase.{_REGISTER}", "called", ("weight_and_tensor_dict",)),)

Import = Callable[[str], types.ModuleType]


def find_deviations(relied: Iterable[Relied], import_module: Import) -> Iterator[Deviation]:
    """Everything of the table that the host does not offer.

    Args:
        relied: rows to check.
        import_module: imports a row's `module`; an ImportError is a deviation.
    """
    for row in relied:
        where = f"{row.module}.{row.name}"
        try:
            module = import_module(row.module)
        except ImportError as err:
            yield Deviation(row.module, "a module of that name", f"{type(err).__name__}: {err}")
            continue
        try:
            found = _static(module, row.name)
        except AttributeError:
            yield Deviation(where, "to exist", "nothing of that name")
            continue
        missing = _missing(row, module, found)
        if missing:
            yield Deviation(where, _expectation(row.use, missing), _description(found))


def _expectation(use: Use, names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return {
        "called": f"to accept {listed}",
        "overridden": f"to need no arguments beyond ours, but it needs {listed}",
        "members": f"members {listed}",
        "global": f"some function of the module to read {listed} at call time",
    }[use]


def _static(module: types.ModuleType, dotted: str) -> Any:
    found: Any = module
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def _missing(row: Relied, module: types.ModuleType, found: Any) -> list[str]:
    if row.use == "members":
        have = _member_names(found)
        return [name for name in row.names if name not in have]
    if row.use == "global":
        return [name for name in row.names if not _reads_global(module, name)]
    parameters = inspect.signature(inspect.unwrap(found)).parameters
    if row.use == "called":
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return []
        return [name for name in row.names if name not in parameters]
    ours = {"self", "cls", *row.names}
    return [
        name
        for name, p in parameters.items()
        if p.default is p.empty and name not in ours and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]


def _member_names(found: Any) -> set[str]:
    names = set(dir(found))
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        names |= {f.name for f in dataclasses.fields(found)}
    if isinstance(found, type) and issubclass(found, enum.Enum):
        names |= set(found.__members__)
    return names


def _reads_global(module: types.ModuleType, name: str) -> bool:
    return any(name in code.co_names for code in _codes(module))


def _codes(module: types.ModuleType) -> Iterator[types.CodeType]:
    """Code of every function and method that the module defines, inner functions included."""
    pending: list[types.CodeType] = []
    for value in vars(module).values():
        owners = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else (value,)
        for owner in owners:
            function = inspect.unwrap(getattr(owner, "__func__", owner)) if callable(owner) else owner
            code = getattr(function, "__code__", None)
            if isinstance(code, types.CodeType) and getattr(function, "__module__", None) == module.__name__:
                pending.append(code)
    while pending:
        code = pending.pop()
        yield code
        pending.extend(const for const in code.co_consts if isinstance(const, types.CodeType))


def _description(found: Any) -> str:
    try:
        return str(inspect.signature(found))
    except (TypeError, ValueError):
        return f"members {', '.join(sorted(n for n in _member_names(found) if not n.startswith('_'))[:30])}"
