# SPDX-License-Identifier: Apache-2.0
"""The layer's activation as the host hands it over, in either of its forms, as the three numbers that a launch takes.

Newer hosts have a carrier (module `activation`): a backend declares what it executes, and the host turns the constants
into that form. Older ones pass loose values, uniform or one per expert. No import of tensorrt_llm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_megamoe.contract import SUPPORTED_ACTIVATIONS
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.host.compat import HostApi

_UNIFORM_RTOL = 1e-5


@dataclass(frozen=True, slots=True)
class Constants:
    """SwiGLU's constants: clamp, factor inside the sigmoid, offset of the linear half (docs/numerics.md)."""

    limit: float | None
    alpha: float
    beta: float


def declared_support(api: HostApi) -> Any:
    """What a backend of this host declares to execute, or None where the host has no such declaration."""
    if not api.has_activation_carrier:
        return None
    carrier = api.module("activation")
    kinds = api.get("tensorrt_llm._torch.utils", "ActivationType")
    uniform = carrier.ActivationParamShape.UNIFORM_SCALAR
    return carrier.MoEActivationSupport(
        kinds=frozenset(getattr(kinds, name) for name in SUPPORTED_ACTIVATIONS), alpha_beta=uniform, limit=uniform
    )


def constants_of(module: Any) -> Constants:
    """The constants that the host's construction left on a backend module.

    Raises:
        MegaMoeConfigError: They differ between experts; the launch takes one of each for all.
    """
    carried = getattr(module, "activation_params", None)
    if carried is not None:
        limit, alpha, beta = carried.clamp, carried.alpha, carried.beta
    else:
        limit = getattr(module, "swiglu_limit_scalar", None)
        limit = limit if limit is not None else getattr(module, "swiglu_limit", None)
        alpha, beta = getattr(module, "swiglu_alpha", None), getattr(module, "swiglu_beta", None)
    found_alpha, found_beta = uniform_value("swiglu_alpha", alpha), uniform_value("swiglu_beta", beta)
    return Constants(
        limit=uniform_value("swiglu_limit", limit),
        alpha=1.0 if found_alpha is None else found_alpha,
        beta=0.0 if found_beta is None else found_beta,
    )


def require_no_hidden_activation(pretrained_config: Any) -> None:
    """Refuse a model that asks for SiTU in its configuration alone, where the host still calls the layer SwiGLU.

    Raises:
        MegaMoeConfigError: It does.
    """
    for config in (pretrained_config, getattr(pretrained_config, "text_config", None)):
        if getattr(config, "activation_situ_beta", None) is not None:
            raise MegaMoeConfigError(
                f"the model's activation is SiTU (activation_situ_beta), must be {' or '.join(SUPPORTED_ACTIVATIONS)}; "
                "serve it with another backend"
            )


def uniform_value(name: str, value: Any) -> float | None:
    """One number out of what the host gives: None, a number, or a tensor whose elements agree.

    Raises:
        MegaMoeConfigError: The elements differ; the launch takes one constant for all experts.
    """
    if value is None:
        return None
    values = torch.as_tensor(value).detach().float().flatten().cpu()
    if values.numel() == 0 or not torch.allclose(values, values[0].expand_as(values), rtol=_UNIFORM_RTOL, atol=0.0):
        raise MegaMoeConfigError(
            f"{name} differs between experts ({values.min():g} to {values.max():g}); it must be uniform"
        )
    return float(values[0])
