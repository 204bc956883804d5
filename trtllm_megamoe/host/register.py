# SPDX-License-Identifier: Apache-2.0
"""Puts the backend class behind `MEGAMOE_CUTEDSL` in this process, and our worker entry into the host's executor.

Replaces module attributes that the host reads at call time, each checked by the reliance table first; replaces no
function that models hold by value. Idempotent. Called by the import hook and by the worker entry.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
from dataclasses import dataclass
from typing import Any

import trtllm_megamoe
from trtllm_megamoe import envs
from trtllm_megamoe.buckets import RUNGS
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.host import worker
from trtllm_megamoe.host.adapter import CLASS_NAME, make_backend_class
from trtllm_megamoe.host.compat import Era, HostApi, detect, require_worker_entry
from trtllm_megamoe.host.ranks import ep_communicator, handshake, why_not_pure_dep
from trtllm_megamoe.host.reliance import BACKEND, UPSTREAM_CLASS
from trtllm_megamoe.host.settings import HostSettings, adopt_aliases
from trtllm_megamoe.kernels.selection import table_path
from trtllm_megamoe.tuning.table import SCHEMA as TABLE_SCHEMA
from trtllm_megamoe.tuning.table import table_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """What was done in this process; `replaced` lists places and what stands there now."""

    api: HostApi
    settings: HostSettings
    backend: type
    replaced: tuple[tuple[str, str], ...]


_registration: Registration | None = None


def register() -> Registration:
    """Register in this process; the second call returns what the first did.

    Raises:
        MegaMoeUnavailableError: The host differs from what the plug-in relies on; nothing was replaced.
        MegaMoeConfigError: A variable of the plug-in has an illegal value; nothing was replaced.
    """
    global _registration
    if _registration is None:
        _configure_logging()
        adopt_aliases()
        settings = HostSettings.from_environment()
        api = detect()  # importing the host's modules here makes the import hook register meanwhile
    if _registration is None:
        _registration = _replace(api, settings, make_backend_class(api, settings))
        logger.info(
            "MEGAMOE_CUTEDSL is %s: trtllm-megamoe %s, tensorrt_llm %s (era %s), cutlass-dsl %s",
            CLASS_NAME, trtllm_megamoe.__version__, api.version, api.era.value, _dsl_version(),
        )  # fmt: skip
    return _registration


def install_worker_entry() -> None:
    """Make the executor of this process start our worker entry. Idempotent.

    Raises:
        MegaMoeUnavailableError: The executor names its workers' function in another way.
    """
    adopt_aliases()
    proxy = importlib.import_module("tensorrt_llm.executor.proxy")
    if proxy.worker_main is not worker.worker_main:
        require_worker_entry()
        proxy.worker_main = worker.worker_main  # type: ignore[attr-defined]


def _replace(api: HostApi, settings: HostSettings, backend: type) -> Registration:
    create, resolution = api.module("create_moe"), api.module("moe_resolution")
    upstream = getattr(create, UPSTREAM_CLASS)
    if api.era is Era.D:
        api.get("impl_identity", "register_moe_impl")(backend)
    priority = tuple(backend if cls is upstream else cls for cls in resolution.IMPL_PRIORITY)
    if backend not in priority:
        priority = (backend, *priority)
    resolution.IMPL_PRIORITY = priority  # type: ignore[attr-defined]
    resolution.BACKEND_FAMILY[BACKEND] = frozenset({backend})
    replaced = [
        (f"{resolution.__name__}.IMPL_PRIORITY", f"{CLASS_NAME} in the place of {upstream.__name__}"),
        (f"{resolution.__name__}.BACKEND_FAMILY[{BACKEND!r}]", CLASS_NAME),
    ]
    for name, value in list(vars(create).items()):  # under every alias that the create branch may read
        if value is upstream:
            setattr(create, name, backend)
            replaced.append((f"{create.__name__}.{name}", CLASS_NAME))
    original = create.resolve_moe_cls
    create.resolve_moe_cls = _explained(original, api, settings, backend)  # type: ignore[attr-defined]
    replaced.append((f"{create.__name__}.resolve_moe_cls", "the same, then the ranks' handshake and a message"))
    return Registration(api, settings, backend, tuple(replaced))


def _explained(original: Any, api: HostApi, settings: HostSettings, backend: type) -> Any:
    """The host's resolver for one layer, followed by proof that all ranks chose alike and a word on a refusal."""

    @functools.wraps(original)
    def resolve_moe_cls(model_config: Any, **kwargs: Any) -> Any:
        if str(getattr(model_config, "moe_backend", "")).upper() != BACKEND:
            return original(model_config, **kwargs)
        where = f"layer {kwargs.get('layer_idx')}"
        error: ValueError | None = None
        chosen: Any = None
        try:
            chosen = original(model_config, **kwargs)
        except ValueError as err:
            error = err
        why = "" if chosen is backend else _refusal(api, model_config, kwargs, error)
        _agree(model_config.mapping, settings, api, where, chosen is backend, getattr(chosen, "__name__", "none"), why)
        if error is not None:
            raise MegaMoeConfigError(f"{where}: {BACKEND} was asked for and refused: {why}") from error
        if chosen is not backend:
            text = f"{where}: {BACKEND} was asked for and refused: {why}; {chosen.__name__} runs instead"
            if settings.strict:
                raise MegaMoeConfigError(f"{text}, which TRTLLM_MEGAMOE_STRICT=1 forbids")
            logger.warning("%s", text)
        return chosen

    return resolve_moe_cls


def _refusal(api: HostApi, model_config: Any, kwargs: dict[str, Any], error: ValueError | None) -> str:
    """Our reason, from the host's report; its own error text where it makes no report."""
    try:
        report = api.get("moe_resolution", "resolve_moe_impl")(model_config, **{**kwargs, "allow_degradation": True})
    except ValueError as err:
        return str(error or err)
    ours = (BACKEND, CLASS_NAME)  # reports name a family or a class
    details = [rejection.detail for rejection in report.rejected if rejection.legacy_backend in ours]
    return "; ".join(details) or str(error or "the host prefers another backend")


def _agree(
    mapping: Any, settings: HostSettings, api: HostApi, where: str, is_ours: bool, chosen: str, why: str
) -> None:
    if why_not_pure_dep(mapping) is not None and not is_ours:
        return  # refused on every rank by the same topology, and there is no group to ask
    facts = {
        "trtllm_megamoe": trtllm_megamoe.__version__,
        "tensorrt_llm": f"{api.version}, era {api.era.value}",
        "combine formats": tuple(fmt.wire_name for fmt in CombineFormat),
        "bucket rungs": RUNGS,
        "format of tactic tables": TABLE_SCHEMA,
        "tactic table": table_digest(table_path()),
        **settings.rank_facts(),
        f"backend of {where}": f"{chosen}{f' ({why})' if why else ''}",
    }
    handshake(facts, ep_communicator(mapping, settings.timeout_s), settings.timeout_s)


def _configure_logging() -> None:
    """Let the plug-in speak where the user set TRTLLM_MEGAMOE_LOG; otherwise logging is the host's business alone."""
    if envs.LOG.name not in os.environ:
        return
    root = logging.getLogger(trtllm_megamoe.__name__)
    root.setLevel(envs.log_level())
    if not root.hasHandlers():
        root.addHandler(logging.StreamHandler())


def _dsl_version() -> str:
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
