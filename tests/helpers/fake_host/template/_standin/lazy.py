# SPDX-License-Identifier: Apache-2.0
"""`M.create_moe` imports that MoE module of this era when it is needed."""

from __future__ import annotations

import importlib

from tensorrt_llm._standin.paths import BASE


class _Modules:
    def __getattr__(self, name):
        return importlib.import_module(f"{BASE}.{name}")


M = _Modules()
