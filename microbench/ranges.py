# SPDX-License-Identifier: Apache-2.0
"""Named ranges for a profiler's time line. Needs the nvtx package; without it a range is nothing.

Used by the runner. The ranges cost about a microsecond each and lie outside the timed windows.
"""

from __future__ import annotations

import contextlib
import importlib.util
from contextlib import AbstractContextManager

DOMAIN = "megamoe-bench"


def marked(name: str) -> AbstractContextManager[object]:
    """A range named `name` around a block."""
    if importlib.util.find_spec("nvtx") is None:
        return contextlib.nullcontext()
    import nvtx

    return nvtx.annotate(name, domain=DOMAIN)  # type: ignore[no-any-return]
