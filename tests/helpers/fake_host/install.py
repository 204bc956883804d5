# SPDX-License-Identifier: Apache-2.0
"""Makes a generated host importable inside this process for a while, and forgets it (and our adapter) afterwards."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.helpers.fake_host.generate import ERAS, Deviation, write_host

_FORGET = ("tensorrt_llm", "trtllm_megamoe.host")
_KEEP = "trtllm_megamoe.host.ops"
"""An operator is registered with torch once per process; this module knows nothing of a host."""


def _forget() -> None:
    for name in list(sys.modules):
        if name != _KEEP and (name in _FORGET or name.startswith(tuple(f"{f}." for f in _FORGET))):
            del sys.modules[name]
    package = sys.modules.get("trtllm_megamoe")
    if package is not None and hasattr(package, "host"):
        delattr(package, "host")
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith(_FORGET[1])]


@contextlib.contextmanager
def installed_host(directory: Path, era: str, *deviations: Deviation) -> Iterator[str]:
    """Yield the dotted name of the host's MoE package."""
    _forget()
    write_host(directory, era, deviations)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield ERAS[era]
    finally:
        sys.path.remove(str(directory))
        _forget()


def moe_module(base: str, name: str) -> ModuleType:
    return importlib.import_module(f"{base}.{name}")
