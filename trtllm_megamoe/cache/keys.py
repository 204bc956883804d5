# SPDX-License-Identifier: Apache-2.0
"""What identifies one compiled kernel. Pure; the kernel glue fills it in, the store only uses the digest."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtllm_megamoe.errors import MegaMoeConfigError

DIGEST_CHARS = 32
"""Hex characters of a digest that name an entry: 128 bits."""


def host_platform() -> str:
    """System and processor that an object's host code runs on, e.g. `linux-x86_64`: an object is not only GPU code."""
    return f"{sys.platform}-{platform.machine()}".lower()


def digest_of(facts: Mapping[str, Any]) -> str:
    """Digest of JSON facts; the order of their keys does not matter.

    Raises:
        MegaMoeConfigError: A fact has no JSON form, which would make the key depend on the process.
    """
    try:
        plain = json.loads(json.dumps(facts, allow_nan=False))  # what a manifest read back holds: lists, text keys
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as err:
        raise MegaMoeConfigError(f"a cache key takes JSON facts only: {err}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectKey:
    """Everything that can change a compiled object; two keys with equal facts are one entry.

    Attributes:
        name: For people, in logs and lists; no part of the identity.
        sources: Digest of all kernel sources.
        dsl_version: Version of the DSL that compiles them.
        arch: GPU architecture, e.g. `sm_90a`.
        geometry: The layer's compiled-in facts, JSON values.
        tactic: The tile configuration, JSON values.
        host: See :func:`host_platform`.
    """

    name: str
    sources: str
    dsl_version: str
    arch: str
    geometry: Mapping[str, Any]
    tactic: Mapping[str, Any]
    host: str = field(default_factory=host_platform)

    @property
    def facts(self) -> dict[str, Any]:
        """The identity, JSON-ready."""
        return {
            "sources": self.sources,
            "dsl_version": self.dsl_version,
            "arch": self.arch,
            "geometry": dict(self.geometry),
            "tactic": dict(self.tactic),
            "host": self.host,
        }

    @property
    def digest(self) -> str:
        """Name of the entry."""
        return digest_of(self.facts)
