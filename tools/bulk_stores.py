# SPDX-License-Identifier: Apache-2.0
"""One PTX rule for all kernels: bulk stores have fully arrived before anything is released.

A bulk store (`cp.async.bulk` and `cp.reduce.async.bulk` from shared to global memory) is asynchronous: a release of the
thread that issued it does not cover it. `cp.async.bulk.wait_group.read` only says that the source may be overwritten.
Used by `check_kernels.py` and `check_blackwell.py`. The shipped kernels have no bulk store; the rule is there for the
first one. It follows the order of the text, not branches: a wait must stand between the store and the next release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STORE = re.compile(r"cp\.(reduce\.)?async\.bulk(\.tensor\.\dd)?\.global\.shared::cta")
_COMMIT = re.compile(r"cp\.async\.bulk\.commit_group;")
_WAIT = re.compile(r"^cp\.async\.bulk\.wait_group\s+0\s*;")  # not .read, not under a predicate
_RELEASE = re.compile(r"\b(red|st|atom|fence)\.(release|acq_rel|sc)\b")


def unwaited_bulk_stores(lines: Sequence[str]) -> list[str]:
    """Faults: a store that is not committed and fully waited for before the next release, or before the end.

    Args:
        lines: PTX, stripped.
    """
    faults: list[str] = []
    store: str | None = None  # the first that nothing has waited for
    committed = False
    for line in lines:
        if _STORE.search(line):
            store, committed = store or line, False
        elif _COMMIT.search(line):
            committed = True
        elif _WAIT.match(line) and committed:
            store = None
        elif store is not None and _RELEASE.search(line):
            faults.append(f"{line.split()[0]} without cp.async.bulk.wait_group 0 behind {store.split()[0]}")
            store = None
    if store is not None:
        faults.append(f"no cp.async.bulk.wait_group 0 behind {store.split()[0]}")
    return faults
