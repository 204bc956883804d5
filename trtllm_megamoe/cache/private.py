# SPDX-License-Identifier: Apache-2.0
"""Objects of this process alone, for a store that cannot be written. They live until the process ends.

Every user of the same store in this process shares them, so that a model's layers build each kernel once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from trtllm_megamoe.cache import entry as entries
from trtllm_megamoe.cache.entry import Entry


class PrivateObjects:
    """Entries by (store, digest) in one temporary directory, made at first use and removed at exit."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Path, str], Entry] = {}
        self._root: Path | None = None
        self._lock = threading.RLock()

    def get(self, store: Path, digest: str) -> Entry | None:
        """The entry, or None."""
        return self._entries.get((store, digest))

    def get_or_build(self, store: Path, digest: str, build: Callable[[Path], Entry]) -> Entry:
        """The entry, made by one thread of this process; `build` fills and seals the directory it is given."""
        with self._lock:
            found = self.get(store, digest)
            if found is None:
                found = build(Path(tempfile.mkdtemp(dir=self._directory())))
                self._entries[store, digest] = found
            return found

    def keep(self, store: Path, built: Entry) -> Entry:
        """Copy a sealed entry here, whatever becomes of its directory."""
        with self._lock:
            target = Path(tempfile.mkdtemp(dir=self._directory()))
            shutil.copytree(built.directory, target, dirs_exist_ok=True)
            self._entries[store, built.digest] = entries.read(target, built.digest)
            return self._entries[store, built.digest]

    def _directory(self) -> Path:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="trtllm-megamoe-"))
            weakref.finalize(self, _remove, self._root, os.getpid())
        return self._root


def _remove(root: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits this call, not the directory
        shutil.rmtree(root, ignore_errors=True)


PRIVATE = PrivateObjects()
"""The process's own."""
