# SPDX-License-Identifier: Apache-2.0
"""Every environment variable this package reads, in one table.

`doctor` prints the table and the README's table is tested against it. A variable that is not here is not read; a value
is read when it is needed, never at import.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from trtllm_megamoe.errors import MegaMoeConfigError


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: its name, the value used when it is unset, what it does, and a second name users may know."""

    name: str
    default: str
    description: str
    alias: str | None = None

    def get(self) -> str:
        """The user's value, or the default.

        Raises:
            MegaMoeConfigError: Both names are set and contradict each other.
        """
        value, other = os.environ.get(self.name), os.environ.get(self.alias) if self.alias else None
        if value is not None and other is not None and value != other:
            raise MegaMoeConfigError(
                f"{self.name}={value!r} and {self.alias}={other!r} contradict each other; unset one"
            )
        return value if value is not None else other if other is not None else self.default

    def choose(self, allowed: tuple[str, ...]) -> str:
        """The user's value, which must be one of a closed set.

        Raises:
            MegaMoeConfigError: It is not; the text lists the set.
        """
        value = self.get()
        if value not in allowed:
            raise MegaMoeConfigError(f"{self.name}={value!r} is not legal; allowed: {', '.join(allowed)}")
        return value


LOG = EnvVar(
    "TRTLLM_MEGAMOE_LOG",
    "WARNING",
    "log level of the command line and, where set, of the plug-in: DEBUG, INFO, WARNING or ERROR",
)
CACHE_DIR = EnvVar("TRTLLM_MEGAMOE_CACHE_DIR", "", "directory of compiled kernels; unset: the user's cache directory")
TACTICS = EnvVar(
    "TRTLLM_MEGAMOE_TACTICS",
    "",
    "tactic table that `tune` wrote; rank 0's counts, inside TensorRT-LLM all ranks' must be equal; unset: the "
    "heuristic's tactics",
)

# Those of the TensorRT-LLM plug-in. The prefix is what makes the host hand them on to its workers.
ENABLE = EnvVar("TRTLLM_MEGAMOE_ENABLE", "0", "1: the installed start-up hook loads the plug-in in every process")
STRICT = EnvVar("TRTLLM_MEGAMOE_STRICT", "0", "1: a layer that is refused is an error instead of running elsewhere")
ENGINE = EnvVar("TRTLLM_MEGAMOE_ENGINE", "cuda", "engine inside TensorRT-LLM: cuda, or cpu for checking results")
ACTIVATIONS = EnvVar("TRTLLM_MEGAMOE_ACTIVATIONS", "auto", "activation mode inside TensorRT-LLM: auto, nvfp4 or bf16")
COMBINE_FORMAT = EnvVar(
    "TRTLLM_MEGAMOE_COMBINE_FORMAT",
    "bf16",
    "wire format of returning rows inside TensorRT-LLM: bf16, 32e4m3xe8m0 (fp8) or 16e2m1xbf16 (fp4)",
    alias="MEGAMOE_COMBINE_FORMAT",
)
SCORE_PLACEMENT = EnvVar(
    "TRTLLM_MEGAMOE_SCORE_PLACEMENT",
    "auto",
    "where routing weights multiply inside TensorRT-LLM: auto (by architecture), after_fc2 or before_requant",
)
TIMEOUT_S = EnvVar("TRTLLM_MEGAMOE_TIMEOUT_S", "60", "longest wait for any peer inside TensorRT-LLM, seconds")

HOST_VARS = (ENABLE, STRICT, ENGINE, ACTIVATIONS, COMBINE_FORMAT, SCORE_PLACEMENT, TIMEOUT_S)

ENV_VARS: tuple[EnvVar, ...] = (LOG, CACHE_DIR, TACTICS, *HOST_VARS)


def markdown_table() -> str:
    """The table of all variables as documentation shows it; tests compare the documents with it."""
    rows = [
        f"| `{v.name}`{f' (or `{v.alias}`)' if v.alias else ''} | `{v.default or 'unset'}` | {v.description} |"
        for v in ENV_VARS
    ]
    return "\n".join(("| variable | default | meaning |", "|---|---|---|", *rows))


def log_level() -> int:
    """Numeric level that `TRTLLM_MEGAMOE_LOG` asks for.

    Raises:
        MegaMoeConfigError: The value is no level name.
    """
    levels = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR")}
    name = LOG.get().upper()
    if name not in levels:
        raise MegaMoeConfigError(f"{LOG.name}={LOG.get()!r} is no log level; allowed: {', '.join(levels)}")
    return int(levels[name])
