# SPDX-License-Identifier: Apache-2.0
"""CUDA-graph readiness: find what stalls or breaks capture, before it is captured and after.

`static` scans source files, `dynamic` runs a step and watches it, `blocks` are graph-safe pieces of a decode step.
Names load on first use, so that the static scan needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "scan": "trtllm_megamoe.graph.static.scan",
    "scan_source": "trtllm_megamoe.graph.static.scan",
    "scan_function": "trtllm_megamoe.graph.static.scan",
    "RULES": "trtllm_megamoe.graph.static.rules",
    "find_syncs": "trtllm_megamoe.graph.dynamic.syncs",
    "check_capture": "trtllm_megamoe.graph.dynamic.capture",
    "StepUnderTest": "trtllm_megamoe.graph.dynamic.step",
    "Region": "trtllm_megamoe.graph.region",
}

__all__ = ["RULES", "Region", "StepUnderTest", "check_capture", "find_syncs", "scan", "scan_function", "scan_source"]

if TYPE_CHECKING:
    from trtllm_megamoe.graph.dynamic.capture import check_capture
    from trtllm_megamoe.graph.dynamic.step import StepUnderTest
    from trtllm_megamoe.graph.dynamic.syncs import find_syncs
    from trtllm_megamoe.graph.region import Region
    from trtllm_megamoe.graph.static.rules import RULES
    from trtllm_megamoe.graph.static.scan import scan, scan_function, scan_source


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
