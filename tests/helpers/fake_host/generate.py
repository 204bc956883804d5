# SPDX-License-Identifier: Apache-2.0
"""Writes a stand-in `tensorrt_llm` package whose MoE heads are those of trtllm_api_contract.json.

Class hierarchy, decorators, fields, signatures and defaults come from the JSON; what a method DOES is re-implemented
from the prose of the contract in `template/_standin/{selection,execution}.py`, to which the generated heads delegate.
A head without a behaviour raises NotImplementedError. All around the MoE modules (arguments, executor, model) is in
`template/`.

`python -m tests.helpers.fake_host.generate ERA DIRECTORY` writes one for looking at.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONTRACT = HERE.parents[1] / "data" / "trtllm_api_contract.json"
TEMPLATE = HERE / "template"

OLD_LAYOUT = "tensorrt_llm._torch.modules.fused_moe"
NEW_LAYOUT = "tensorrt_llm._torch.moe.fused_moe"
ERAS = {"A": OLD_LAYOUT, "B": OLD_LAYOUT, "C": OLD_LAYOUT, "D1": NEW_LAYOUT, "D2": NEW_LAYOUT}
"""A and B only exist to be refused: A has no resolver at all, B has upstream's kernel but no resolver."""

OTHER_BACKENDS = (
    "CuteDslB12xFusedMoE",
    "DeepgemmCudaCppW4a8Mxfp4Mxfp8Impl",
    "CuteDslFusedMoE",
    "TRTLLMGenFusedMoE",
    "DeepgemmCudaCppFp8BlockScalesImpl",
    "DenseGEMMFusedMoE",
    "MarlinFusedMoE",
    "TritonFusedMoE",
    "CutlassFusedMoE",
)

_PRELUDE = '''"""Generated for tests: heads of {keys}; era {era}. Not NVIDIA's code."""
from __future__ import annotations
import abc, contextlib, re
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import *
from typing import final
import torch
from torch import nn
T = TypeVar("T")
from tensorrt_llm._standin import behaviour as B
'''


@dataclass(frozen=True)
class Module:
    """One generated module: which JSON files give its heads, and what it imports first."""

    name: str
    keys: tuple[str, ...]
    imports: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    tail: str = ""


_CONTRACT_NAMES = (
    "MoEStaticCapability, MoEInputRequirement, MoEProblem, MoEDeployment, MoEEnvironment, MoEEligibility, "
    "MoERejectReason, MoERejection, MoEResolutionReport, MoERunContext, MoECommPlan, MoEEplbBinding"
)
_COMMON = (
    "from tensorrt_llm._torch.model_config import ModelConfig",
    "from tensorrt_llm._torch.utils import ActivationType",
)


def _modules(era: str) -> list[Module]:
    is_new = ERAS[era] == NEW_LAYOUT
    contract = f"from .impl_contract import {_CONTRACT_NAMES}"
    mega = "from .mega_moe import MegaMoECuteDsl"
    others = f"from .other_backends import {', '.join(OTHER_BACKENDS)}, VanillaMoE"
    has_carrier = era == "D2"
    activation = (
        (f"from .{'activation' if has_carrier else 'upstream_extras'} import MoEActivation, DEFAULT_MOE_ACTIVATION",)
        if is_new
        else ()
    )
    modules = [
        Module("impl_contract", ("impl_contract_a", "impl_contract_b")),
        Module("impl_blocks", ("impl_blocks",), (contract,)),
        Module(
            "interface",
            ("interface",),
            (
                *_COMMON,
                contract,
                "from .impl_blocks import MoEExecutionContractMixin, MoEWeightOwnerMixin, MoEEplbWeightLayoutMixin",
            ),
        ),
        Module("quantization", ("quantization",)),
    ]
    interface = "from .interface import MoE, MoEWeightLoadingMode, MoESchedulerKind"
    if is_new:
        modules.append(Module("impl_identity", ("impl_identity",), (contract, interface)))
        modules.append(
            Module(
                "impl_base",
                ("impl_base",),
                (
                    *_COMMON,
                    *activation,
                    contract,
                    interface,
                    "from .impl_blocks import MoEExecutionContractMixin, MoEWeightOwnerMixin, MoEEplbWeightLayoutMixin",
                    "from .impl_identity import MoEImplDescriptor",
                ),
            )
        )
    base = (
        (
            "from .impl_base import MoEImplBase, apply_moe_impl_construction_state",
            "from .impl_identity import MoEImplDescriptor, MoEImplId, MoEImplRegistry",
            "from .impl_identity import MOE_IMPL_REGISTRY, register_moe_impl",
        )
        if is_new
        else ()
    )
    modules.append(
        Module(
            "mega_moe.mega_moe_cute_dsl",
            ("mega_moe_cute_dsl",),
            tuple(
                line.replace("from .", "from ..")
                for line in (
                    *_COMMON,
                    *activation,
                    contract,
                    interface,
                    *base,
                    f"from .{'activation' if has_carrier else 'upstream_extras'} import MoEActivationSupport, "
                    "ActivationParamShape",
                )
            ),
            tail="MegaMoECuteDsl = TrtllmCutedslMegaMoeNvfp4Impl\n" if is_new else "",
        )
    )
    impl_base_name = "MoEImplBase" if is_new else "MoE"
    modules.append(
        Module(
            "moe_resolution",
            ("moe_resolution",),
            (
                *_COMMON,
                *activation,
                contract,
                interface,
                *base,
                others,
                mega,
                "" if is_new else "MoEImplBase = MoE; MoEActivation = None",
            ),
        )
    )
    create_imports = (
        *_COMMON,
        *activation,
        contract,
        interface,
        *base,
        others,
        mega,
        "from .moe_resolution import MoEImplClass, infer_swiglu_gptoss_style, resolve_moe_cls, resolve_moe_impl",
        'WIDEEP_DEPRECATION_MESSAGE = "WIDEEP is gone"',
        f"STANDIN_WRAPPED_BASE = {impl_base_name}",
        "def standin_mega_classes():\n    return (MegaMoECuteDsl,)",
        "def standin_resolve(*args, **kwargs):\n    return resolve_moe_cls(*args, **kwargs)",
    )
    if is_new:
        modules.append(Module("create_moe", ("create_moe_new",), create_imports))
    else:
        modules.append(Module("create_moe", ("create_moe_old",), create_imports, ("create_moe_backend", "create_moe")))
    modules.append(Module("moe_scheduler", ("moe_scheduler",), (contract, "from .upstream_extras import MoEScheduler")))
    modules.append(
        Module("configurable_moe", ("configurable_moe",), (*_COMMON, contract, interface, "ActType_TrtllmGen = None"))
    )
    return modules


@dataclass
class Plan:
    """What one generated package consists of; deviations edit it before it is written."""

    era: str
    files: dict[str, str] = field(default_factory=dict)

    @property
    def moe_base(self) -> str:
        return ERAS[self.era]

    def path_of(self, module: str) -> str:
        return module.replace(".", "/") + ".py"

    def edit(self, module: str, old: str, new: str) -> None:
        """Replace text in one generated or template module; the text must be there."""
        path = self.path_of(module)
        if old not in self.files[path]:
            raise KeyError(f"{old!r} is not in {path}")
        self.files[path] = self.files[path].replace(old, new)

    def drop(self, module: str) -> None:
        del self.files[self.path_of(module)]


Deviation = Callable[[Plan], None]


def load_contract() -> dict[str, dict[str, Any]]:
    """The JSON's files by key."""
    return {entry["key"]: entry for entry in json.loads(CONTRACT.read_text())["files"]}


def _newer_fields(class_name: str) -> list[tuple[str, str, str]]:
    """Fields that later texts were seen to have; types are not all known, so `object` stands in."""
    observed = json.loads(CONTRACT.read_text())["observed_at_use_sites"].get(f"{class_name} (newer fields)", [])
    defaults = {"bias": "None", "activation_constants": "frozenset()", "fused_finalize_enabled": "True"}
    names = [text.split(":")[0] for text in observed]
    return [(name, "object", defaults.get(name, "False")) for name in names]


def _behaviours() -> dict[str, ast.FunctionDef]:
    found = {}
    for name in ("selection", "execution"):
        tree = ast.parse((TEMPLATE / "_standin" / f"{name}.py").read_text())
        found.update({node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)})
    return found


def _call_arguments(head: str) -> str:
    """Arguments that hand everything of a head on: positional by position, keyword-only by name."""
    arguments = ast.parse(f"def f{head}: ...").body[0].args  # type: ignore[attr-defined]
    parts = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    parts += [f"{a.arg}={a.arg}" for a in arguments.kwonlyargs]
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    return ", ".join(parts)


def _emit_function(
    name: str, head: str, decorators: Sequence[str], behaviour: str | None, indent: str, qualified: str
) -> str:
    lines = [f"{indent}@{decorator}" for decorator in decorators]
    lines.append(f"{indent}def {name}{head}:")
    call = f"B.{behaviour}({_call_arguments(head)})" if behaviour else ""
    if not behaviour:
        lines.append(f"{indent}    raise NotImplementedError('the stand-in host does not implement {qualified}')")
    elif any("contextmanager" in decorator for decorator in decorators):
        lines.append(f"{indent}    with {call}: yield")
    else:
        lines.append(f"{indent}    return {call}")
    return "\n".join(lines) + "\n"


def _emit_class(name: str, entry: dict[str, Any], era: str, known: set[str]) -> str:
    bases, decorators = list(entry["bases"]), list(entry["decorators"])
    attributes = [(n, a, d) for n, (a, d) in entry["attributes"].items()]
    emitted_name = name
    if name == "TrtllmCutedslMegaMoeNvfp4Impl" and ERAS[era] == OLD_LAYOUT:
        # era C, read by name and base class only: the same surface over `MoE`, without the registry
        emitted_name, bases, decorators = "MegaMoECuteDsl", ["MoE"], []
        attributes = [("scheduler_kind", None, "MoESchedulerKind.FUSED_COMM")]
    if ERAS[era] == NEW_LAYOUT:
        attributes += _newer_fields(name)
    lines = [f"@{decorator}" for decorator in decorators]
    lines.append(f"class {emitted_name}({', '.join(bases)}):" if bases else f"class {emitted_name}:")
    for attribute, annotation, default in attributes:
        annotated = f"{attribute}: {annotation}" if annotation else attribute
        value = "" if default is None else f" = {default.replace('doc=...', 'doc=str()')}"
        lines.append(f"    {annotated}{value}")
    methods = entry["methods"]
    for method, (head, method_decorators) in methods.items():
        if method == "__init__" and emitted_name == "MegaMoECuteDsl":
            head = head.replace("activation: MoEActivation=DEFAULT_MOE_ACTIVATION, ", "")
        behaviour = f"{name}__{method}"
        lines.append(
            _emit_function(
                method, head, method_decorators, behaviour if behaviour in known else None, "    ", f"{name}.{method}"
            )
        )
    for behaviour in sorted(known):  # methods whose heads were not read
        if behaviour.startswith(f"{name}__") and behaviour.removeprefix(f"{name}__") not in methods:
            lines.append(f"    {behaviour.removeprefix(f'{name}__')} = B.{behaviour}")
    if len(lines) == len(decorators) + 1:
        lines.append("    pass")
    return "\n".join(lines) + "\n"


def _signature(era: str, function: str, head: str) -> str:
    if function == "apply_moe_impl_construction_state" and era == "D2":
        # the JSON's note on this file: a later version takes the carrier instead of the loose values
        for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
            head = head.replace(f"{name}: Optional[torch.Tensor]=None, ", "")
        head = head.replace("swiglu_limit_scalar: Optional[float]=None, ", "")
        return head.replace(
            "activation_type: ActivationType=ActivationType.Swiglu",
            "activation: MoEActivation=DEFAULT_MOE_ACTIVATION",
        )
    if function in ("create_moe_backend", "create_moe") and era == "D1":
        return head.replace(
            "activation: MoEActivation=DEFAULT_MOE_ACTIVATION",
            "activation_type: ActivationType=ActivationType.Swiglu, swiglu_limit: Optional[torch.Tensor]=None, "
            "swiglu_limit_scalar: Optional[float]=None",
        )
    return head


def _emit_module(module: Module, era: str, contract: dict[str, dict[str, Any]], known: set[str]) -> str:
    parts = [_PRELUDE.format(keys=", ".join(module.keys), era=era), "\n".join(module.imports) + "\n"]
    late = []
    for key in module.keys:
        entry = contract[key]
        for name, class_entry in entry["classes"].items():
            parts.append(_emit_class(name, class_entry, era, known))
        for name, (head, decorators) in entry["functions"].items():
            if module.only and name not in module.only:
                continue
            behaviour = name if name in known else None
            parts.append(_emit_function(name, _signature(era, name, head), decorators, behaviour, "", name))
        for name, (annotation, default) in entry["module_attributes"].items():
            if name == "MoEImplClass":
                default = "type"
            late.append(f"{name}{': ' + annotation if annotation else ''} = {default}\n")
    return "\n".join(parts + late) + module.tail


def _emit_llm_args(contract: dict[str, dict[str, Any]]) -> str:
    entry = contract["llm_args"]["classes"]["MoeConfig"]
    text = (TEMPLATE / "llmapi" / "llm_args.py").read_text()
    fields = "\n".join(f"    {n}: {a} = {d}" for n, (a, d) in entry["attributes"].items())
    return text.replace("    GENERATED_FIELDS: None = None", fields)


def plan_host(era: str, deviations: Sequence[Deviation] = ()) -> Plan:
    """Everything that `write_host` would write, by path."""
    contract, known = load_contract(), set(_behaviours())
    plan = Plan(era)
    for path in sorted(TEMPLATE.rglob("*.py")):
        relative = path.relative_to(TEMPLATE).as_posix()
        if relative.startswith("fused_moe/"):
            target = f"{plan.moe_base.replace('.', '/')}/{relative.removeprefix('fused_moe/')}"
        else:
            target = f"tensorrt_llm/{relative}"
        plan.files[target] = path.read_text()
    plan.files["tensorrt_llm/llmapi/llm_args.py"] = _emit_llm_args(contract)
    plan.files["tensorrt_llm/_standin/paths.py"] = f'BASE = "{plan.moe_base}"\nERA = "{era}"\n'
    for module in _modules(era):
        plan.files[plan.path_of(f"{plan.moe_base}.{module.name}")] = _emit_module(module, era, contract, known)
    if era != "D2":
        plan.drop(f"{plan.moe_base}.activation")
    if era in ("A", "B"):
        for name in ("moe_resolution", "impl_contract", "create_moe"):
            plan.drop(f"{plan.moe_base}.{name}")
        plan.files[plan.path_of(f"{plan.moe_base}.create_moe")] = "def get_moe_cls(model_config): ...\n"
    if era == "A":
        plan.drop(f"{plan.moe_base}.mega_moe.mega_moe_cute_dsl")
        plan.drop(f"{plan.moe_base}.mega_moe.__init__")
    for deviation in deviations:
        deviation(plan)
    return plan


_PARSING = threading.Lock()
"""Python 3.11 loses count of its recursion depth when two threads parse at once (SystemError)."""


def write_host(directory: Path, era: str, deviations: Sequence[Deviation] = ()) -> Path:
    """Write the package `tensorrt_llm` below `directory`, which becomes the entry for sys.path."""
    if (directory / "tensorrt_llm").exists():
        shutil.rmtree(directory / "tensorrt_llm")
    with _PARSING:
        files = plan_host(era, deviations).files
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(directory).parents:
            if parent != Path("."):
                (directory / parent / "__init__.py").touch()
    return directory


if __name__ == "__main__":
    print(write_host(Path(sys.argv[2]), sys.argv[1]))
