# SPDX-License-Identifier: Apache-2.0
"""Acts the moment the host's modules are imported: registers the backend, names our worker entry to the executor.

Standard library only, because a start-up hook may import it in every Python process. Idempotent.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

PROXY = "tensorrt_llm.executor.proxy"
CREATE_MODULES = ("tensorrt_llm._torch.moe.fused_moe.create_moe", "tensorrt_llm._torch.modules.fused_moe.create_moe")
_HOST_ROOT = "tensorrt_llm."
_CREATE = ".create_moe"


def _reaction(name: str) -> Callable[[], None] | None:
    """What follows the import of a module; a `create_moe` at a place we do not know is refused by registration."""
    if name == PROXY:
        return _install_worker_entry
    if name in CREATE_MODULES or (name.startswith(_HOST_ROOT) and name.endswith(_CREATE)):
        return _register
    return None


def _register() -> None:
    importlib.import_module("trtllm_megamoe.host.register").register()


def _install_worker_entry() -> None:
    importlib.import_module("trtllm_megamoe.host.register").install_worker_entry()


class PostImportFinder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the other finders find, and adds a reaction to the module's execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        reaction = _reaction(fullname)
        if reaction is None:
            return None
        for finder in sys.meta_path:
            if finder is self or isinstance(finder, PostImportFinder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _react_after(spec, reaction)
                return spec
        return None


def _react_after(spec: importlib.machinery.ModuleSpec, reaction: Callable[[], None]) -> None:
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        execute(module)
        reaction()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def remove() -> None:
    """Stop reacting to imports; what was registered stays. For tools that only look at a host."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, PostImportFinder)]


def install() -> None:
    """Arrange the reactions, and react at once to what is loaded already. Idempotent.

    Raises:
        MegaMoeUnavailableError: The host is loaded and is not what the plug-in was written for.
        MegaMoeConfigError: A variable of the plug-in has an illegal value.
    """
    if not any(isinstance(finder, PostImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PostImportFinder())
    if any(name.startswith(_HOST_ROOT) and name.endswith(_CREATE) for name in tuple(sys.modules)):
        _register()
    if PROXY in sys.modules:
        _install_worker_entry()
