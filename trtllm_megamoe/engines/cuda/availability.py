# SPDX-License-Identifier: Apache-2.0
"""Whether the CUDA engine can run here, as a reason string; imports nothing heavy and never initialises CUDA twice."""

from __future__ import annotations

import importlib.util

import torch

from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.kernels.family import family_here
from vendored_kernels.common.layer import MAX_EP_SIZE


def why_not(ep_size: int) -> str | None:
    """None where the CUDA engine can run a layer over `ep_size` ranks, else the reason."""
    if ep_size > MAX_EP_SIZE:
        return f"its kernels support at most {MAX_EP_SIZE} ranks, ep_size is {ep_size}"
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    try:
        family_here()
    except MegaMoeUnavailableError as err:
        return str(err)
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed (pip install apache-tvm-ffi)"
    return None
