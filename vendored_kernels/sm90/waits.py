# SPDX-License-Identifier: Apache-2.0
"""The bounded waits of every kernel (`common/waits.py`), where the Hopper kernel's modules look for them."""

from ..common.units import CONTROL_BYTES
from ..common.waits import (
    ABORT,
    ABORT_AT,
    COUNT_BITS,
    CTAS,
    ERROR,
    GIVEN_UP,
    LAUNCH,
    PEERS,
    RANK,
    SITE_FC1,
    SITE_FC2,
    SITE_POOL,
    SITE_STAGED,
    TIMEOUT,
    TOKENS,
    record_departure,
    wait_at_least,
)

__all__ = [
    "ABORT",
    "ABORT_AT",
    "CONTROL_BYTES",
    "COUNT_BITS",
    "CTAS",
    "ERROR",
    "GIVEN_UP",
    "LAUNCH",
    "PEERS",
    "RANK",
    "SITE_FC1",
    "SITE_FC2",
    "SITE_POOL",
    "SITE_STAGED",
    "TIMEOUT",
    "TOKENS",
    "record_departure",
    "wait_at_least",
]
