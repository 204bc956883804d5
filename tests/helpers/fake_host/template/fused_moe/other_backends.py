# SPDX-License-Identifier: Apache-2.0
"""The host's other backends: enough to be chosen or passed over. Cutlass takes everything, the rest nothing."""

from __future__ import annotations

from torch import nn

from .impl_contract import MoEEligibility, MoERejectReason, MoEStaticCapability
from .interface import MoESchedulerKind

try:
    from .impl_base import MoEImplBase as Base
except ImportError:
    from .interface import MoE as Base


def _refuse(cls, p, d):
    return MoEEligibility.no(MoERejectReason.SM_UNSUPPORTED, "not on this machine")


def _accept(cls, p, d):
    return MoEEligibility.ok()


def _init(self, **values):
    nn.Module.__init__(self)
    self.loaded = []


def _backend(name, verdict):
    members = {
        "can_implement": classmethod(verdict),
        "capabilities": MoEStaticCapability(),
        "scheduler_kind": MoESchedulerKind.EXTERNAL_COMM,
        "__init__": _init,
        "_get_quant_method": lambda self: None,
        "create_weights": lambda self: None,
        "load_weights": lambda self, weights, allow_partial_loading=False: self.loaded.append(weights),
        "process_weights_after_loading": lambda self: None,
        "transform_weights": lambda self: None,
        "cache_derived_state": lambda self: None,
        "pre_reload_weights": lambda self: None,
        "quantize_input": lambda self, x, **kwargs: (x, None),
        "run_moe": lambda self, ctx, **kwargs: ctx.x,
        "forward_impl": lambda self, x, router_logits, **kwargs: x,
    }
    return type(name, (Base,), members)


CuteDslB12xFusedMoE = _backend("CuteDslB12xFusedMoE", _refuse)
DeepgemmCudaCppW4a8Mxfp4Mxfp8Impl = _backend("DeepgemmCudaCppW4a8Mxfp4Mxfp8Impl", _refuse)
CuteDslFusedMoE = _backend("CuteDslFusedMoE", _refuse)
TRTLLMGenFusedMoE = _backend("TRTLLMGenFusedMoE", _refuse)
DeepgemmCudaCppFp8BlockScalesImpl = _backend("DeepgemmCudaCppFp8BlockScalesImpl", _refuse)
DenseGEMMFusedMoE = _backend("DenseGEMMFusedMoE", _refuse)
MarlinFusedMoE = _backend("MarlinFusedMoE", _refuse)
TritonFusedMoE = _backend("TritonFusedMoE", _refuse)
CutlassFusedMoE = _backend("CutlassFusedMoE", _accept)


class VanillaMoE(nn.Module):
    capabilities = MoEStaticCapability()
    can_implement = classmethod(_refuse)
