# SPDX-License-Identifier: Apache-2.0
"""Looks a behaviour up by name, private names included."""

from __future__ import annotations

from tensorrt_llm._standin import execution, selection


def __getattr__(name):
    for module in (selection, execution):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)
