# SPDX-License-Identifier: Apache-2.0
"""One entry of the store: a directory of files beside a manifest with their checksums. Written once, then only read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_megamoe.cache.keys import digest_of

SCHEMA = "megamoe-object/1"
MANIFEST = "entry.json"

PLAIN_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*")
"""File names an entry may hold: no separators, no leading dot."""


class BrokenEntryError(Exception):
    """An entry that must not be used; the text says why. Never leaves the cache package."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel on disk."""

    directory: Path
    digest: str
    name: str
    facts: Mapping[str, Any]
    files: tuple[str, ...]
    num_bytes: int
    build_s: float
    used_at: float

    def path(self, suffix: str) -> Path:
        """The entry's only file with this suffix, e.g. `.so`."""
        (name,) = [name for name in self.files if name.endswith(suffix)]
        return self.directory / name


def seal(directory: Path, name: str, facts: Mapping[str, Any], build_s: float) -> Entry:
    """Write the manifest over all files of `directory`; the entry is complete afterwards.

    Raises:
        BrokenEntryError: There is no file, or one with a name an entry cannot hold.
    """
    files = {}
    for path in sorted(directory.iterdir()):
        if not path.is_file() or path.is_symlink() or not PLAIN_NAME.fullmatch(path.name) or path.name == MANIFEST:
            raise BrokenEntryError(f"{path.name!r} cannot be part of an entry")
        files[path.name] = _fingerprint(path)
    if not files:
        raise BrokenEntryError("it holds no file")
    manifest = {"schema": SCHEMA, "name": name, "facts": dict(facts), "files": files, "build_s": round(build_s, 3)}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return read(directory)


def read(directory: Path, digest: str | None = None, *, verify: bool = True) -> Entry:
    """Read one entry.

    Args:
        directory: The entry's directory.
        digest: What the facts must hash to; None takes whatever they hash to.
        verify: Also compare every file's checksum, not only its length.

    Raises:
        FileNotFoundError: There is no such directory.
        BrokenEntryError: Anything is missing, extra, unreadable or not as the manifest says.
    """
    if not directory.is_dir():
        raise FileNotFoundError(directory)
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
        used_at = (directory / MANIFEST).stat().st_mtime
        manifest = json.loads(text)
        schema, name, facts = manifest["schema"], str(manifest["name"]), dict(manifest["facts"])
        files = {str(file): dict(fingerprint) for file, fingerprint in manifest["files"].items()}
        build_s = float(manifest["build_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise BrokenEntryError(f"{MANIFEST} is not readable ({type(err).__name__}: {err})") from None
    if schema != SCHEMA:
        raise BrokenEntryError(f"schema is {schema!r}, this version reads {SCHEMA!r}")
    if digest is not None and digest_of(facts) != digest:
        raise BrokenEntryError("the facts in it do not hash to its name")
    try:
        present = sorted(path.name for path in directory.iterdir())
    except OSError as err:
        raise BrokenEntryError(f"it cannot be listed ({err})") from None
    if present != sorted([*files, MANIFEST]):
        raise BrokenEntryError(f"it holds {present}, its manifest names {sorted(files)}")
    num_bytes = len(text.encode())
    for file, fingerprint in files.items():
        try:
            seen = _fingerprint(directory / file) if verify else {"num_bytes": (directory / file).stat().st_size}
        except OSError as err:
            raise BrokenEntryError(f"{file} is not readable ({err})") from None
        wrong = [what for what in seen if seen[what] != fingerprint.get(what)]
        if wrong:
            raise BrokenEntryError(f"{file} differs from its manifest in {' and '.join(wrong)}")
        num_bytes += int(fingerprint["num_bytes"])
    return Entry(directory, digest or digest_of(facts), name, facts, tuple(files), num_bytes, build_s, used_at)


def _fingerprint(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
