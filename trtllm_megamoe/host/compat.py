# SPDX-License-Identifier: Apache-2.0
"""Which era of tensorrt_llm is installed, found by its features and never by its version string.

Owns the knowledge of where the host keeps things; the rest of the plug-in asks :func:`detect` for an :class:`HostApi`.
Eras are those of docs/serving.md. Importing this module does not import tensorrt_llm.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import types
from dataclasses import dataclass
from typing import Any

from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.host.reliance import (
    ACTIVATION_CARRIER,
    COMMON,
    MIGRATION,
    MIGRATION_OVER_IMPL_BASE,
    MIGRATION_OVER_MOE,
    OVER_IMPL_BASE,
    OVER_MOE,
    WORKER_ENTRY,
    Deviation,
    Relied,
    find_deviations,
)

OLD_LAYOUT = "tensorrt_llm._torch.modules.fused_moe"
NEW_LAYOUT = "tensorrt_llm._torch.moe.fused_moe"
LAYOUTS = (NEW_LAYOUT, OLD_LAYOUT)

_WAYS_OUT = (
    "install a tensorrt_llm that docs/serving.md lists, or serve without this plug-in (drop --custom_module_dirs or "
    "the import, unset TRTLLM_MEGAMOE_ENABLE)"
)


class Era(enum.Enum):
    """How a host selects and builds MoE backends."""

    C = "C"
    """Resolver with a problem and a deployment; backends derive from `MoE`."""
    D = "D"
    """The same with an identity registry; backends derive from `MoEImplBase`."""


@dataclass(frozen=True, slots=True)
class HostApi:
    """The host's MoE modules, found and checked."""

    era: Era
    base: str
    version: str
    has_activation_carrier: bool
    """Whether activations come as a carrier that a backend's declaration is matched with."""

    def module(self, name: str) -> types.ModuleType:
        """A module of the MoE package, or an absolute one."""
        return importlib.import_module(name if name.startswith("tensorrt_llm") else f"{self.base}.{name}")

    def get(self, module: str, name: str) -> Any:
        """One object of a module."""
        return getattr(self.module(module), name)


def relied_on(api: HostApi) -> tuple[Relied, ...]:
    """The rows of the reliance table about a host's MoE modules."""
    over = OVER_IMPL_BASE if api.era is Era.D else OVER_MOE
    return (*COMMON, *over, *(ACTIVATION_CARRIER if api.has_activation_carrier else ()))


def everything_relied_on(api: HostApi) -> tuple[Relied, ...]:
    """All rows about a host, those of special cases included."""
    return (*relied_on(api), *WORKER_ENTRY, *migration_rows(api.era))


def host_version() -> str:
    """Version of the installed tensorrt_llm, for messages only."""
    try:
        return importlib.metadata.version("tensorrt-llm")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module("tensorrt_llm"), "__version__", "unknown"))


def is_installed() -> bool:
    """Whether a tensorrt_llm can be found; imports nothing."""
    return importlib.util.find_spec("tensorrt_llm") is not None


def locate() -> HostApi:
    """Find the MoE modules and name the era.

    Raises:
        MegaMoeUnavailableError: No tensorrt_llm, modules moved to an unknown place, or an era without the interfaces
            this plug-in builds on; the text says which and what to do.
    """
    if not is_installed():
        raise MegaMoeUnavailableError("tensorrt_llm is not installed; " + _WAYS_OUT)
    version = host_version()
    where = f"tensorrt_llm {version}"
    base = next((layout for layout in LAYOUTS if _exists(f"{layout}.create_moe")), None)
    if base is None:
        raise MegaMoeUnavailableError(
            f"{where}: no MoE modules at {' or '.join(LAYOUTS)}; they moved to a place that this plug-in does not "
            f"know; {_WAYS_OUT}"
        )
    if not _exists(f"{base}.moe_resolution"):
        older = "B" if _exists(f"{base}.mega_moe") else "A"
        raise MegaMoeUnavailableError(
            f"{where} is of era {older} (backends are chosen by get_moe_cls, there is no moe_resolution module), which "
            f"this plug-in does not support; {_WAYS_OUT}"
        )
    era = Era.D if _exists(f"{base}.impl_base") else Era.C
    return HostApi(era, base, version, has_activation_carrier=_exists(f"{base}.activation"))


def deviations(api: HostApi) -> list[Deviation]:
    """Every difference from the reliance table, for `doctor --host`."""
    return list(find_deviations(everything_relied_on(api), api.module))


def detect() -> HostApi:
    """Locate the host and check everything the plug-in relies on in its MoE modules.

    Raises:
        MegaMoeUnavailableError: As :func:`locate`, or the host differs; every difference is listed.
    """
    api = locate()
    _refuse(f"{api.version} (era {api.era.value})", list(find_deviations(relied_on(api), api.module)))
    return api


def require_migration(api: HostApi) -> None:
    """Check what only a layer whose experts move at run time needs (dynamic EPLB).

    Raises:
        MegaMoeUnavailableError: The host's load balancer differs; every difference is listed.
    """
    _refuse(
        f"{api.version} (experts that move at run time)", list(find_deviations(migration_rows(api.era), api.module))
    )


def migration_rows(era: Era) -> tuple[Relied, ...]:
    """The rows about the host's load balancer."""
    return (*MIGRATION, *(MIGRATION_OVER_IMPL_BASE if era is Era.D else MIGRATION_OVER_MOE))


def require_worker_entry() -> None:
    """Check the place where the parent process names what its workers run.

    Raises:
        MegaMoeUnavailableError: It is not where it was; every difference is listed.
    """
    _refuse(host_version(), list(find_deviations(WORKER_ENTRY, importlib.import_module)))


def _refuse(version: str, found: list[Deviation]) -> None:
    if found:
        raise MegaMoeUnavailableError(
            f"tensorrt_llm {version} is not what this plug-in was written for: "
            f"{'; '.join(map(str, found))}; {_WAYS_OUT}"
        )


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
