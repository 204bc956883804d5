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
    """One variable: its name, the value used when it is unset, and what it does."""

    name: str
    default: str
    description: str

    def get(self) -> str:
        """The user's value, or the default."""
        return os.environ.get(self.name, self.default)


LOG = EnvVar("TRTLLM_MEGAMOE_LOG", "WARNING", "log level of the command line: DEBUG, INFO, WARNING or ERROR")
CACHE_DIR = EnvVar("TRTLLM_MEGAMOE_CACHE_DIR", "", "directory of compiled kernels; unset: the user's cache directory")

ENV_VARS: tuple[EnvVar, ...] = (LOG, CACHE_DIR)


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
