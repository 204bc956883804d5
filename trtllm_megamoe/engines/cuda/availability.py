# SPDX-License-Identifier: Apache-2.0
"""Whether the CUDA engine can run here, as a reason string; imports nothing heavy and never initialises CUDA twice."""

from __future__ import annotations

import importlib.util

import torch


def why_not(ep_size: int) -> str | None:
    """None where the CUDA engine can run a layer over `ep_size` ranks, else the reason."""
    if ep_size != 1:
        return f"it runs one rank so far, ep_size is {ep_size}"
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"the GPU has compute capability {major}.{minor}, the kernels need 9.0 (Hopper)"
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed (pip install apache-tvm-ffi)"
    return None
