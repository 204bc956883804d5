# SPDX-License-Identifier: Apache-2.0
"""The activation carriers of era D2: one class per kind, what a backend declares, and the conversion between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from tensorrt_llm._torch.utils import ActivationType


def _require_positive_clamp(clamp):
    if clamp is not None and not float(torch.as_tensor(clamp).min()) > 0:
        raise ValueError(f"activation clamp must be positive, got {clamp}")


@dataclass(frozen=True, eq=False)
class SwigluActivation:
    clamp: Any = None
    kind: ClassVar = ActivationType.Swiglu

    def __post_init__(self):
        _require_positive_clamp(self.clamp)

    def constants(self):
        return SimpleNamespace(alpha=None, beta=None, limit=self.clamp)


@dataclass(frozen=True, eq=False)
class SwigluBiasActivation:
    gate_sigmoid_scale: Any
    linear_offset: Any
    clamp: Any = None
    kind: ClassVar = ActivationType.SwigluBias

    def __post_init__(self):
        _require_positive_clamp(self.clamp)

    def constants(self):
        return SimpleNamespace(alpha=self.gate_sigmoid_scale, beta=self.linear_offset, limit=self.clamp)


@dataclass(frozen=True, eq=False)
class SimpleActivation:
    kind: ActivationType

    def constants(self):
        return SimpleNamespace(alpha=None, beta=None, limit=None)


MoEActivation = SwigluActivation | SwigluBiasActivation | SimpleActivation
DEFAULT_MOE_ACTIVATION = SwigluActivation()


class ActivationParamShape(Enum):
    PER_EXPERT_TENSOR = auto()
    UNIFORM_SCALAR = auto()
    UNSUPPORTED = auto()


@dataclass(frozen=True)
class MoEActivationSupport:
    kinds: frozenset
    alpha_beta: ActivationParamShape = ActivationParamShape.UNSUPPORTED
    limit: ActivationParamShape = ActivationParamShape.UNSUPPORTED
    limit_when_absent: float | None = None


@dataclass(frozen=True, eq=False)
class MaterializedActivation:
    activation_type: ActivationType
    alpha: Any = None
    beta: Any = None
    clamp: Any = None


def _uniform(value, shape, name, owner):
    if value is None:
        return None
    if shape is not ActivationParamShape.UNIFORM_SCALAR:
        raise ValueError(f"{owner} kernels take no activation {name}")
    flat = torch.as_tensor(value).flatten()
    if bool((flat != flat[0]).any()):
        raise ValueError(f"{owner} only supports a uniform activation {name}, got {flat.tolist()}")
    return float(flat[0])


def install_activation_params(module, *, device=None):
    """Writes `activation_params` and the three `act_*` slots; runs at construction and after the EPLB sync."""
    owner, support = type(module).__name__, getattr(type(module), "activation_support", None)
    if support is None:
        raise TypeError(f"{owner} must declare an activation_support class attribute")
    if module.activation.kind not in support.kinds:
        raise ValueError(f"{owner} does not implement activation {module.activation.kind.name}")
    constants = module.activation.constants()
    module.activation_params = MaterializedActivation(
        module.activation.kind,
        alpha=_uniform(constants.alpha, support.alpha_beta, "alpha", owner),
        beta=_uniform(constants.beta, support.alpha_beta, "beta", owner),
        clamp=_uniform(constants.limit, support.limit, "clamp", owner),
    )
    for name in ("alpha", "beta", "clamp"):
        setattr(module, f"act_{name}", getattr(module.activation_params, name))


def activation_constant_names(activation):
    constants = activation.constants()
    found = {"alpha": constants.alpha, "beta": constants.beta, "clamp": constants.limit}
    return frozenset(name for name, value in found.items() if value is not None)
