# SPDX-License-Identifier: Apache-2.0
"""The TensorRT-LLM plug-in: `import trtllm_megamoe.host` before `LLM(...)` makes `backend: MEGAMOE_CUTEDSL` run on us.

Importing it imports neither tensorrt_llm nor torch: it only arranges that registration happens as soon as the host's
own modules are loaded, in this process and in the workers it starts. This package is the only importer of
tensorrt_llm. See docs/serving.md.
"""

from __future__ import annotations

from trtllm_megamoe.host import hook as _hook

__all__ = ["accept_mixed_weights"]


def accept_mixed_weights() -> None:
    """Let all layers of this process run on the weights they have after a reload that failed half-way (R24)."""
    from trtllm_megamoe.host import adapter

    adapter.accept_mixed_weights()


_hook.install()
