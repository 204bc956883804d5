# SPDX-License-Identifier: Apache-2.0
"""Move compiled kernels between machines: a tar with a manifest, verified as a whole before anything is stored.

A builder without a GPU exports, a fleet imports. An object is code that will run in the importing process: import only
what you would install.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from trtllm_megamoe.cache import entry as entries
from trtllm_megamoe.cache.entry import BrokenEntryError, Entry
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeTimeoutError

SCHEMA = "megamoe-cache-archive/1"
MANIFEST = "manifest.json"

_MEMBER = re.compile(rf"objects/([0-9a-f]{{1,64}})/({entries.PLAIN_NAME.pattern})")


def export_archive(cache: ObjectCache, target: Path) -> list[Entry]:
    """Write every sound entry of `cache` to `target`; equal entries give equal bytes.

    Raises:
        MegaMoeConfigError: The store holds nothing, or the file cannot be written.
    """
    sound = [found for _, found in cache.entries() if isinstance(found, Entry)]
    if not sound:
        raise MegaMoeConfigError(f"nothing to export: {cache.root} holds no compiled kernel")
    manifest = {"schema": SCHEMA, "entries": {found.digest: _manifest_sha256(found.directory) for found in sound}}
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with tarfile.open(partial, mode="w") as tar:
            _add(tar, MANIFEST, json.dumps(manifest, indent=1).encode())
            for found in sound:
                for name in (entries.MANIFEST, *found.files):
                    _add(tar, f"objects/{found.digest}/{name}", (found.directory / name).read_bytes())
        os.replace(partial, target)
    except OSError as err:
        raise MegaMoeConfigError(f"cannot export to {target}: {err}") from None
    finally:
        partial.unlink(missing_ok=True)
    return sound


def import_archive(cache: ObjectCache, source: Path) -> tuple[list[Entry], list[Entry]]:
    """Verify all of `source`, then store what the cache lacks.

    Returns:
        The entries that were added, and those that were there already.

    Raises:
        MegaMoeConfigError: The file is no archive of ours or any byte of it is not as its manifests say (nothing was
            stored), or the store cannot be written.
    """
    try:
        with cache.staging() as staging:
            staged = _unpack(source, staging)
            added = [found for found in staged if cache.adopt(found)]
    except (tarfile.TarError, BrokenEntryError) as err:
        raise MegaMoeConfigError(
            f"{source} is no sound archive of compiled kernels: {err}; nothing was stored"
        ) from None
    except MegaMoeTimeoutError:  # is an OSError too
        raise
    except OSError as err:
        raise MegaMoeConfigError(f"cannot import {source} into {cache.root}: {err}") from None
    return added, [found for found in staged if found not in added]


def _unpack(source: Path, staging: Path) -> list[Entry]:
    """Copy every member to `staging` and verify it against both manifests."""
    with tarfile.open(source, mode="r:") as tar:
        expected = _read_manifest(tar)
        for member, digest, name in _members(tar):
            content = tar.extractfile(member)
            if content is None or digest not in expected:
                raise BrokenEntryError(f"unexpected member {member.name!r}")
            (staging / digest).mkdir(exist_ok=True)
            (staging / digest / name).write_bytes(content.read())
    staged = []
    for digest, sha256 in expected.items():
        try:
            found = entries.read(staging / digest, digest)
        except FileNotFoundError:
            raise BrokenEntryError(f"entry {digest} is missing") from None
        if _manifest_sha256(found.directory) != sha256:
            raise BrokenEntryError(f"entry {digest} is another one than the archive's manifest names")
        staged.append(found)
    return staged


def _read_manifest(tar: tarfile.TarFile) -> dict[str, str]:
    first = tar.next()
    content = tar.extractfile(first) if first is not None and first.name == MANIFEST and first.isreg() else None
    if content is None:
        raise BrokenEntryError(f"it does not begin with {MANIFEST}")
    try:
        manifest = json.loads(content.read())
        schema, expected = manifest["schema"], {str(d): str(s) for d, s in manifest["entries"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise BrokenEntryError(f"{MANIFEST} is not readable ({type(err).__name__}: {err})") from None
    if schema != SCHEMA:
        raise BrokenEntryError(f"schema is {schema!r}, this version reads {SCHEMA!r}")
    return expected


def _members(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """All members but the manifest, as (member, digest, file); refuses links, devices and foreign paths."""
    while (member := tar.next()) is not None:
        match = _MEMBER.fullmatch(member.name)
        if match is None or not member.isreg():
            raise BrokenEntryError(f"unexpected member {member.name!r}")
        yield member, match[1], match[2]


def _manifest_sha256(directory: Path) -> str:
    return hashlib.sha256((directory / entries.MANIFEST).read_bytes()).hexdigest()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
