# SPDX-License-Identifier: Apache-2.0
"""One persistent mixture-of-experts kernel per layer and rank, for NVFP4 checkpoints.

Importing this package imports neither torch.cuda state, nor cutlass, nor tensorrt_llm; names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "MegaMoELayer": "trtllm_megamoe.layer",
    "build_workspace": "trtllm_megamoe.layer",
    "MegaMoeConfig": "trtllm_megamoe.config",
    "CombineFormat": "trtllm_megamoe.formats",
    "ActivationMode": "trtllm_megamoe.formats",
    "ScorePlacement": "trtllm_megamoe.formats",
    "Checkpoint": "trtllm_megamoe.weights.checkpoint",
    "MegaMoeError": "trtllm_megamoe.errors",
}

__all__ = [
    "ActivationMode",
    "Checkpoint",
    "CombineFormat",
    "MegaMoELayer",
    "MegaMoeConfig",
    "MegaMoeError",
    "ScorePlacement",
    "__version__",
    "build_workspace",
]

if TYPE_CHECKING:
    from trtllm_megamoe.config import MegaMoeConfig
    from trtllm_megamoe.errors import MegaMoeError
    from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
    from trtllm_megamoe.layer import MegaMoELayer, build_workspace
    from trtllm_megamoe.weights.checkpoint import Checkpoint


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
