# SPDX-License-Identifier: Apache-2.0
"""The store of compiled kernels: persistent, one build per key over all processes, self-healing, bounded in size.

A directory with three parts: `objects/<digest>/` (finished entries), `locks/<digest>.lock` (who builds), `building/`
(work in progress). An entry appears by one rename, so a reader sees all of it or nothing; only the holder of a digest's
lock builds or replaces that digest, so whatever lies in `building/` under a free lock is what a killed process left.

The kernel glue calls `get_or_build` with a builder; nothing here knows what an object is, and nothing is compiled here.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from trtllm_megamoe import envs
from trtllm_megamoe.cache import entry as entries
from trtllm_megamoe.cache.entry import BrokenEntryError, Entry
from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.private import PRIVATE
from trtllm_megamoe.errors import MegaMoeStateError, MegaMoeTimeoutError

logger = logging.getLogger(__name__)

Builder = Callable[[Path], None]
"""Fills the empty directory it is given with the object's files."""

MAX_BYTES = 1 << 30
"""Size bound of the store: thousands of kernels of some hundred KB; older sources' objects leave by themselves."""

BUILD_WAIT_S = 600.0
"""Longest wait for another process that builds the same kernel."""

RECENT_S = 60.0
"""An entry used this recently is never pruned: its reader may not have loaded the file yet."""

_STAGING = "staging"


def default_root() -> Path:
    """`TRTLLM_MEGAMOE_CACHE_DIR`, or the user's cache directory."""
    chosen = envs.CACHE_DIR.get()
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("trtllm-megamoe", False))


class ObjectCache:
    """See the module docstring. Usable by many threads and processes at once.

    Args:
        root: The store's directory, created when something is written; None takes :func:`default_root`.
        max_bytes: Size bound, kept after every build.
        wait_s: Longest wait for another process that builds the same key.
    """

    def __init__(self, root: Path | None = None, *, max_bytes: int = MAX_BYTES, wait_s: float = BUILD_WAIT_S) -> None:
        self.root = root if root is not None else default_root()
        self._max_bytes = max_bytes
        self._wait_s = wait_s

    def get(self, key: ObjectKey) -> Entry | None:
        """The valid entry of a key, or None. A broken one is reported and left for `get_or_build` to replace."""
        digest = key.digest
        found = self._lookup(digest)
        return found if found is not None else PRIVATE.get(self.root, digest)

    def get_or_build(self, key: ObjectKey, build: Builder) -> Entry:
        """The entry of a key, built if need be: by one process, while all others that want it wait.

        Where the store cannot be written (read-only, full, no locks) the object is built for this process alone and a
        warning says so. An error of `build` reaches the caller, and the next caller tries again.

        Raises:
            MegaMoeTimeoutError: Another process has held the key's lock for `wait_s`; names it.
            MegaMoeStateError: The builder left something that is no entry.
        """
        found = self.get(key)
        if found is not None:
            return found
        lock = self._open_lock(key)
        if lock is None:
            return self._build_private(key, build)
        try:
            found = self._lookup(key.digest)
            return found if found is not None else self._build(key, build)
        finally:
            lock.release()

    def adopt(self, staged: Entry) -> bool:
        """Move a finished, verified directory into the store; False when a valid entry is there already.

        Raises:
            OSError: The store cannot be written.
            MegaMoeTimeoutError: Another process holds the key's lock.
        """
        lock = self._acquire(staged.digest, staged.name)
        try:
            if self._lookup(staged.digest) is not None:
                return False
            self._publish(staged)
            return True
        finally:
            lock.release()

    def entries(self, *, verify: bool = True) -> Iterator[tuple[str, Entry | BrokenEntryError]]:
        """Every entry by digest, in no particular order; a broken one comes as the error that says why."""
        with suppress(FileNotFoundError, NotADirectoryError):
            for directory in sorted((self.root / "objects").iterdir()):
                try:
                    yield directory.name, entries.read(directory, directory.name, verify=verify)
                except FileNotFoundError:
                    continue  # pruned while we looked
                except BrokenEntryError as err:
                    yield directory.name, err

    def prune(self, max_bytes: int, *, recent_s: float = RECENT_S) -> list[str]:
        """Remove broken entries, leftovers of killed builds, and the least recently used until `max_bytes` are kept.

        Entries used within `recent_s` seconds stay, so the bound can be exceeded for that long.

        Returns:
            Digests of the removed entries.
        """
        removed: list[str] = []
        sound: list[Entry] = []
        for digest, found in self.entries(verify=False):
            if isinstance(found, Entry):
                sound.append(found)
            else:
                logger.warning("removing broken kernel object %s: %s", digest, found)
                self._discard(digest)
                removed.append(digest)
        total = sum(found.num_bytes for found in sound)
        for found in sorted(sound, key=lambda candidate: candidate.used_at):
            if total <= max_bytes or time.time() - found.used_at < recent_s:
                break  # the rest was used even later
            self._discard(found.digest)
            removed.append(found.digest)
            total -= found.num_bytes
        self._sweep_leftovers()
        return removed

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty directory on the store's file system, removed afterwards; one at a time. Raises OSError."""
        lock = self._acquire(_STAGING, "an import")
        try:
            self._sweep(_STAGING)
            yield self._new_work(_STAGING)
        finally:
            self._sweep(_STAGING)
            lock.release()

    # -- reading

    def _lookup(self, digest: str) -> Entry | None:
        directory = self.root / "objects" / digest
        try:
            found = entries.read(directory, digest)
        except OSError:  # not there, or not for us to read
            return None
        except BrokenEntryError as err:
            if directory.is_dir():  # else it was pruned while we read it
                logger.warning("kernel object %s is broken and will be built anew: %s", directory, err)
            return None
        with suppress(OSError):  # a read-only store keeps no record of use
            os.utime(directory / entries.MANIFEST)
        return found

    # -- building

    def _build(self, key: ObjectKey, build: Builder) -> Entry:
        """Build and publish; the caller holds the key's lock."""
        self._sweep(key.digest)
        try:
            work = self._new_work(key.digest)
        except OSError as err:
            self._warn_private(key, str(err))
            return self._build_private(key, build)
        try:
            built = _run(key, build, work)
            try:
                published = self._publish(built)
            except OSError as err:
                self._warn_private(key, str(err))
                return PRIVATE.keep(self.root, built)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        try:
            self.prune(self._max_bytes)
        except OSError as err:  # the new object is in place, so nobody has to fail for this
            logger.warning("kernel cache %s cannot be pruned: %s", self.root, err)
        return published

    def _publish(self, built: Entry) -> Entry:
        """Rename a finished directory into place; the caller holds its lock and knows that no valid entry is there."""
        target = self.root / "objects" / built.digest
        target.parent.mkdir(parents=True, exist_ok=True)
        self._discard(built.digest)
        os.rename(built.directory, target)
        return replace(built, directory=target)

    def _build_private(self, key: ObjectKey, build: Builder) -> Entry:
        return PRIVATE.get_or_build(self.root, key.digest, lambda work: _run(key, build, work))

    def _warn_private(self, key: ObjectKey, reason: str) -> None:
        logger.warning(
            "kernel cache %s cannot be written (%s); %s is built for this process alone, and again at every start. "
            "Set %s to a writable directory, or import an archive there",
            self.root, reason, key.name, envs.CACHE_DIR.name,
        )  # fmt: skip

    # -- locks

    def _open_lock(self, key: ObjectKey) -> FileLock | None:
        """The key's lock, held; None where the store cannot be locked, after a warning."""
        try:
            return self._acquire(key.digest, key.name)
        except MegaMoeTimeoutError:  # is an OSError too
            raise
        except (OSError, NotImplementedError) as err:
            self._warn_private(key, str(err))
            return None

    def _acquire(self, digest: str, name: str) -> FileLock:
        (self.root / "locks").mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.root / "locks" / f"{digest}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for %s, which builds %s", self._holder(digest), name)
            try:
                lock.acquire(timeout=self._wait_s)
            except Timeout:
                raise MegaMoeTimeoutError(
                    f"waited {self._wait_s:g} s for {self._holder(digest)}, which builds {name} and holds "
                    f"{lock.lock_file}; end that process if it hangs, or set {envs.CACHE_DIR.name} to another directory"
                ) from None
        return lock

    def _holder(self, digest: str) -> str:
        """Who works on a digest, from the names of its working directories."""
        owners = [path.name.split(".", 2)[1:] for path in self._work_of(digest)]
        names = [f"process {pid} on {rest.rpartition('.')[0]}" for pid, rest in owners]
        return " or ".join(names) or "another process"

    # -- work directories: <digest>.<pid>.<host>.<random>

    def _work_path(self, digest: str) -> Path:
        return self.root / "building" / f"{digest}.{os.getpid()}.{socket.gethostname()}.{uuid.uuid4().hex[:8]}"

    def _new_work(self, digest: str) -> Path:
        work = self._work_path(digest)
        work.mkdir(parents=True)
        return work

    def _work_of(self, digest: str) -> list[Path]:
        return sorted((self.root / "building").glob(f"{digest}.*"))

    def _discard(self, digest: str) -> None:
        """Take an entry out of sight with one rename, then delete it."""
        trash = self._work_path(digest)
        with suppress(FileNotFoundError):  # not there, or another process was faster
            trash.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.root / "objects" / digest, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _sweep(self, digest: str) -> None:
        """Delete the working directories of a digest, which only killed processes leave; the caller holds its lock."""
        for leftover in self._work_of(digest):
            shutil.rmtree(leftover, ignore_errors=True)

    def _sweep_leftovers(self) -> None:
        for digest in {path.name.split(".")[0] for path in self._work_of("*")}:
            lock = FileLock(self.root / "locks" / f"{digest}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue  # somebody works on it
            try:
                self._sweep(digest)
            finally:
                lock.release()


def _run(key: ObjectKey, build: Builder, work: Path) -> Entry:
    logger.info("building %s", key.name)
    started = time.perf_counter()
    build(work)
    seconds = time.perf_counter() - started
    try:
        built = entries.seal(work, key.name, key.facts, seconds)
    except BrokenEntryError as err:
        raise MegaMoeStateError(f"the builder of {key.name} left no usable object in {work}: {err}") from None
    logger.info("built %s in %.1f s (%d bytes)", key.name, seconds, built.num_bytes)
    return built
