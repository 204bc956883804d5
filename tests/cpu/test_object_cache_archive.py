# SPDX-License-Identifier: Apache-2.0
"""Archives of compiled kernels and the `cache` command: shipping, tampering, listing, pruning."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.cli import invoke
from tests.helpers.object_cache import assert_holds, builder_of, fill, flip_a_byte, make_key, never
from trtllm_megamoe.cache.entry import BrokenEntryError
from trtllm_megamoe.cache.store import ObjectCache


def test_archive_export_and_import_ship_every_entry(tmp_path: Path) -> None:
    _, wanted = fill(tmp_path / "a", 3)
    archive = tmp_path / "kernels.tar"
    assert invoke("cache", "--dir", tmp_path / "a", "export", archive).exit_code == 0
    first = archive.read_bytes()
    assert invoke("cache", "--dir", tmp_path / "a", "export", archive).exit_code == 0
    assert archive.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "kernels.tar"]
    fleet = ObjectCache(tmp_path / "b")
    fleet.get_or_build(wanted[1], builder_of(wanted[1]))
    result = invoke("cache", "--dir", tmp_path / "b", "import", archive)
    assert result.exit_code == 0
    assert "added 2 kernels, 1 were there already" in result.output
    for key in wanted:
        assert_holds(fleet.get_or_build(key, never), key)
    assert "added 0 kernels, 3 were there already" in invoke("cache", "--dir", tmp_path / "b", "import", archive).output
    assert list((tmp_path / "b" / "building").iterdir()) == []


def test_archive_import_replaces_a_broken_entry(tmp_path: Path) -> None:
    cache, wanted = fill(tmp_path / "a", 1)
    invoke("cache", "--dir", tmp_path / "a", "export", tmp_path / "kernels.tar")
    flip_a_byte(tmp_path / "a" / "objects" / wanted[0].digest)
    assert "added 1 kernels" in invoke("cache", "--dir", tmp_path / "a", "import", tmp_path / "kernels.tar").output
    assert_holds(cache.get(wanted[0]), wanted[0])


Members = dict[str, bytes]


def _flip_in_archive(members: Members) -> None:
    name = next(name for name in members if name.endswith("k1.so"))
    members[name] = members[name][:-1] + bytes([members[name][-1] ^ 1])


def _drop_a_file(members: Members) -> None:
    del members[next(name for name in members if name.endswith("k1.json"))]


def _drop_an_entry(members: Members) -> None:
    digest = make_key("k1").digest
    for name in [name for name in members if digest in name]:
        del members[name]


def _reach_outside(members: Members) -> None:
    members["objects/../../evil.so"] = b"x"


def _add_a_stranger(members: Members) -> None:
    members["objects/0123/evil.so"] = b"x"


def _exchange_an_entry(members: Members) -> None:
    """Another object under the right name, sound in itself: only the archive's own manifest tells."""
    digest = make_key("k1").digest
    manifest = json.loads(members[f"objects/{digest}/entry.json"])
    manifest["build_s"] = 99.0
    members[f"objects/{digest}/entry.json"] = json.dumps(manifest).encode()


def _drop_the_manifest(members: Members) -> None:
    del members["manifest.json"]


def _future_schema(members: Members) -> None:
    members["manifest.json"] = members["manifest.json"].replace(b"archive/1", b"archive/2")


def _garble_the_manifest(members: Members) -> None:
    members["manifest.json"] = b"{"


@pytest.mark.parametrize(
    "tamper",
    [_flip_in_archive, _drop_a_file, _drop_an_entry, _reach_outside, _add_a_stranger, _exchange_an_entry,
     _drop_the_manifest, _future_schema, _garble_the_manifest],
    ids=lambda tamper: tamper.__name__.strip("_"),
)  # fmt: skip
def test_archive_import_with_one_wrong_byte_stores_nothing(tmp_path: Path, tamper: Callable[[Members], None]) -> None:
    fill(tmp_path / "a", 2)
    invoke("cache", "--dir", tmp_path / "a", "export", tmp_path / "good.tar")
    with tarfile.open(tmp_path / "good.tar") as tar:
        members = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    tamper(members)
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    result = invoke("cache", "--dir", tmp_path / "b", "import", tmp_path / "bad.tar")
    assert result.exit_code == 2
    assert "nothing was stored" in result.stderr
    assert list((tmp_path / "b").rglob("*.so")) == []


def test_archive_import_of_links_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        manifest = json.dumps({"schema": "megamoe-cache-archive/1", "entries": {"ab": "00"}}).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
        link = tarfile.TarInfo("objects/ab/k.so")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    result = invoke("cache", "--dir", tmp_path / "b", "import", tmp_path / "bad.tar")
    assert (result.exit_code, "unexpected member 'objects/ab/k.so'" in result.stderr) == (2, True)


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100], ids=["empty", "noise"])
def test_archive_import_of_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    result = invoke("cache", "--dir", tmp_path / "b", "import", tmp_path / "x.tar")
    assert (result.exit_code, "nothing was stored" in result.stderr) == (2, True)


def test_archive_export_of_nothing_or_to_nowhere_is_refused(tmp_path: Path) -> None:
    result = invoke("cache", "--dir", tmp_path / "b", "export", tmp_path / "x.tar")
    assert (result.exit_code, "holds no compiled kernel" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / "a", 1)
    result = invoke("cache", "--dir", tmp_path / "a", "export", tmp_path / "no" / "x.tar")
    assert (result.exit_code, "cannot export to" in result.stderr) == (2, True)


def test_cache_list_shows_sound_and_broken_entries(tmp_path: Path) -> None:
    assert "0 kernels" in invoke("cache", "--dir", tmp_path, "list").output
    cache, wanted = fill(tmp_path, 2)
    os.truncate(tmp_path / "objects" / wanted[1].digest / "k1.so", 5)
    text = invoke("cache", "--dir", tmp_path, "list").output
    assert (
        "1 kernels" in text and wanted[0].digest[:12] in text and "sm_90a" in text and "broken: k1.so differs" in text
    )
    document = json.loads(invoke("cache", "--dir", tmp_path, "list", "--json").output)
    assert document["schema"] == "megamoe-cache-list/1"
    by_digest = {entry["digest"]: entry for entry in document["objects"]}
    assert by_digest[wanted[0].digest]["facts"]["geometry"]["hidden_size"] == 7168
    assert "num_bytes" in by_digest[wanted[1].digest]["broken"]
    broken = dict(cache.entries())[wanted[1].digest]
    assert isinstance(broken, BrokenEntryError)


def test_cache_prune_command_says_what_it_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 3)
    monkeypatch.setenv("TRTLLM_MEGAMOE_CACHE_DIR", str(tmp_path))
    assert "removed 0 kernels" in invoke("cache", "prune").output
    assert "removed 3 kernels" in invoke("cache", "prune", "--max-bytes", 0).output
    assert list(tmp_path.glob("objects/*")) == []
