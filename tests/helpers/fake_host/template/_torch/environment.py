# SPDX-License-Identifier: Apache-2.0
"""The machine, collected once per process; tests set the SM number through the environment."""

from __future__ import annotations

import functools
import os

from tensorrt_llm._standin.lazy import M


@functools.lru_cache
def collect_moe_environment(force=False):
    return M.impl_contract.MoEEnvironment(sm=int(os.environ.get("TLLM_STANDIN_SM", "100")))
