# SPDX-License-Identifier: Apache-2.0
"""The store of compiled kernels: keys, one build per key over processes, healing, read-only stores, size bounds."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.object_cache import (
    FORK,
    PROCESSES,
    WATCHDOG_S,
    assert_holds,
    builder_of,
    fill,
    flip_a_byte,
    kept_names,
    make_key,
    never,
    run_in_processes,
)
from trtllm_megamoe.cache import keys, store
from trtllm_megamoe.cache.entry import Entry
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeStateError, MegaMoeTimeoutError

# -- keys


@pytest.mark.parametrize(
    "change",
    [
        {"sources": "other"},
        {"dsl_version": "4.8.2"},
        {"arch": "sm_100a"},
        {"geometry": {"hidden_size": 7168, "combine_format": "fp8", "swiglu_limit": 10.0}},
        {"tactic": {"token_widths": (16, 24), "name": "k0"}},
        {"host": "linux-aarch64"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_key_with_any_other_fact_is_another_entry(change: dict[str, Any]) -> None:
    assert make_key(**change).digest != make_key().digest


def test_key_digest_is_the_same_in_every_process_and_order() -> None:
    assert make_key().digest == make_key(name="k0").digest
    assert keys.digest_of({"a": 1, "b": {2: (1, 2), 10: None}}) == keys.digest_of(
        {"b": {"10": None, "2": [1, 2]}, "a": 1}
    )
    # Pinned: a change would orphan every store and archive in the field. sha256 of {"a":[1,2.5,null]}.
    assert keys.digest_of({"a": (1, 2.5, None)}) == "d975df8927b51788b7b73ca3d967eca7"


def test_key_name_is_no_part_of_the_identity() -> None:
    assert replace(make_key(), name="a better name").digest == make_key().digest


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes"])
def test_key_with_a_fact_without_json_form_is_refused(value: object) -> None:
    with pytest.raises(MegaMoeConfigError, match="JSON facts only"):
        _ = make_key(geometry={"x": value}).digest


# -- one build per key


def test_cache_with_eight_processes_builds_each_key_once(tmp_path: Path) -> None:
    log = tmp_path / "builds"
    wanted = [make_key(f"k{i}") for i in range(3)]
    gate = FORK.Event()

    def body(rank: int) -> None:
        cache = ObjectCache(tmp_path / "cache")
        gate.wait(WATCHDOG_S)
        for key in random.Random(rank).sample(wanted, len(wanted)):
            assert_holds(cache.get_or_build(key, builder_of(key, log, pause_s=0.05)), key)

    opener = threading.Timer(0.3, gate.set)
    opener.start()
    run_in_processes([lambda rank=rank: body(rank) for rank in range(PROCESSES)])  # type: ignore[misc]
    assert sorted(log.read_text().split()) == ["k0", "k1", "k2"]
    assert list((tmp_path / "cache" / "building").iterdir()) == []


def test_cache_with_eight_threads_builds_once(tmp_path: Path) -> None:
    log, key, cache = tmp_path / "builds", make_key(), ObjectCache(tmp_path / "cache")
    seen: list[Entry] = []
    threads = [
        threading.Thread(target=lambda: seen.append(cache.get_or_build(key, builder_of(key, log, 0.05))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
    assert len(seen) == 8
    assert log.read_text() == "k0\n"


def test_cache_get_without_an_entry_is_none_and_writes_nothing(tmp_path: Path) -> None:
    assert ObjectCache(tmp_path / "cache").get(make_key()) is None
    assert list(tmp_path.iterdir()) == []


def test_cache_hit_in_a_new_process_object_does_not_build(tmp_path: Path) -> None:
    key = make_key()
    ObjectCache(tmp_path).get_or_build(key, builder_of(key))
    assert_holds(ObjectCache(tmp_path).get_or_build(key, never), key)
    assert_holds(ObjectCache(tmp_path).get(key), key)


def test_cache_waiting_for_a_hung_builder_times_out_and_names_it(tmp_path: Path) -> None:
    key, started, stop = make_key(), threading.Event(), threading.Event()

    def hang(directory: Path) -> None:
        started.set()
        stop.wait(WATCHDOG_S)
        builder_of(key)(directory)

    holder = threading.Thread(target=lambda: ObjectCache(tmp_path).get_or_build(key, hang))
    holder.start()
    assert started.wait(WATCHDOG_S)
    try:
        with pytest.raises(MegaMoeTimeoutError, match=rf"0\.2 s for process {os.getpid()} on .*builds k0"):
            ObjectCache(tmp_path, wait_s=0.2).get_or_build(key, never)
    finally:
        stop.set()
        holder.join(WATCHDOG_S)
    assert_holds(ObjectCache(tmp_path).get(key), key)


# -- healing


def test_cache_after_a_builder_was_killed_mid_write_heals(tmp_path: Path) -> None:
    key = make_key()
    victim = FORK.Process(target=lambda: ObjectCache(tmp_path).get_or_build(key, builder_of(key, pause_s=WATCHDOG_S)))
    victim.start()
    deadline = time.monotonic() + WATCHDOG_S
    while not list(tmp_path.glob("building/*/k0.so")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(WATCHDOG_S)
    assert list(tmp_path.glob("building/*"))  # half an object, in sight of nobody
    assert ObjectCache(tmp_path).get(key) is None
    assert_holds(ObjectCache(tmp_path).get_or_build(key, builder_of(key)), key)
    assert list(tmp_path.glob("building/*")) == []


def _truncate(directory: Path) -> None:
    os.truncate(directory / "k0.so", 9000)


def _delete_a_file(directory: Path) -> None:
    (directory / "k0.json").unlink()


def _delete_the_manifest(directory: Path) -> None:
    (directory / "entry.json").unlink()


def _empty_the_manifest(directory: Path) -> None:
    (directory / "entry.json").write_text("")


def _add_a_file(directory: Path) -> None:
    (directory / "extra.so").write_bytes(b"x")


def _change_the_facts(directory: Path) -> None:
    manifest = json.loads((directory / "entry.json").read_text())
    manifest["facts"]["arch"] = "sm_100a"
    (directory / "entry.json").write_text(json.dumps(manifest))


def _change_the_schema(directory: Path) -> None:
    text = (directory / "entry.json").read_text()
    (directory / "entry.json").write_text(text.replace("megamoe-object/1", "megamoe-object/0"))


def _list_as_manifest(directory: Path) -> None:
    (directory / "entry.json").write_text("[]")


CORRUPTIONS = [
    _truncate, flip_a_byte, _delete_a_file, _delete_the_manifest, _empty_the_manifest, _add_a_file, _change_the_facts,
    _change_the_schema, _list_as_manifest,
]  # fmt: skip


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__.strip("_"))
def test_cache_with_a_broken_entry_reports_it_and_builds_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, corrupt: Callable[[Path], None]
) -> None:
    key = make_key()
    corrupt(ObjectCache(tmp_path).get_or_build(key, builder_of(key)).directory)
    assert ObjectCache(tmp_path).get(key) is None
    assert "is broken and will be built anew" in caplog.text
    assert_holds(ObjectCache(tmp_path).get_or_build(key, builder_of(key)), key)
    assert_holds(ObjectCache(tmp_path).get_or_build(key, never), key)


def test_cache_builder_that_fails_leaves_nothing_and_the_next_call_tries_again(tmp_path: Path) -> None:
    key, cache = make_key(), ObjectCache(tmp_path)

    def fail(directory: Path) -> None:
        (directory / "half.so").write_bytes(b"half")
        raise RuntimeError("ptxas said no")

    with pytest.raises(RuntimeError, match="ptxas said no"):
        cache.get_or_build(key, fail)
    assert list(tmp_path.glob("building/*")) == list(tmp_path.glob("objects/*")) == []
    assert_holds(cache.get_or_build(key, builder_of(key)), key)


@pytest.mark.parametrize("names", [[], ["entry.json"], [".hidden"]], ids=str)
def test_cache_builder_that_leaves_no_usable_object_is_an_error(tmp_path: Path, names: list[str]) -> None:
    def build(directory: Path) -> None:
        for name in names:
            (directory / name).write_text("x")

    with pytest.raises(MegaMoeStateError, match="builder of k0 left no usable object"):
        ObjectCache(tmp_path).get_or_build(make_key(), build)
    assert list(tmp_path.glob("objects/*")) == []


# -- a store that cannot be written


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory whose parents other users may enter, which tmp_path's may not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def run_without_rights(body: Callable[[], None]) -> None:
    """Run as a user whom permission bits bind: root is asked by none."""

    def unprivileged() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        body()

    run_in_processes([unprivileged])


def test_cache_in_a_read_only_directory_serves_hits_and_builds_privately_with_a_warning(open_directory: Path) -> None:
    root = open_directory / "cache"
    there, missing = make_key("there"), make_key("missing")
    ObjectCache(root).get_or_build(there, builder_of(there))
    for path in [root, *root.rglob("*")]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    scratch = open_directory / "tmp"
    scratch.mkdir()
    scratch.chmod(0o777)

    def body() -> None:
        tempfile.tempdir = str(scratch)  # a forked process of a test cleans nothing up
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("trtllm_megamoe").addHandler(handler)
        cache = ObjectCache(root)
        assert_holds(cache.get_or_build(there, never), there)
        assert records == []
        private = cache.get_or_build(missing, builder_of(missing))
        assert_holds(private, missing)
        assert root not in private.directory.parents
        assert len(records) == 1 and "cannot be written" in records[0] and "TRTLLM_MEGAMOE_CACHE_DIR" in records[0]
        assert_holds(cache.get_or_build(missing, never), missing)
        assert_holds(cache.get(missing), missing)
        del cache  # the engine's may be gone before the object is loaded; other layers come with their own
        assert_holds(ObjectCache(root).get_or_build(missing, never), missing)

    run_without_rights(body)
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before
    for path in [root, *root.rglob("*")]:  # the fixture deletes it
        path.chmod(0o755)


def test_cache_below_a_file_builds_privately_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    key, cache = make_key(), ObjectCache(tmp_path / "file" / "cache")
    assert_holds(cache.get_or_build(key, builder_of(key)), key)
    assert "cannot be written" in caplog.text
    assert_holds(cache.get_or_build(key, never), key)


def test_cache_on_a_full_disk_keeps_the_object_for_this_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    key, cache = make_key(), ObjectCache(tmp_path)
    monkeypatch.setattr(store.os, "rename", full)
    assert_holds(cache.get_or_build(key, builder_of(key)), key)
    assert "No space left on device" in caplog.text
    assert_holds(cache.get_or_build(key, never), key)
    assert list(tmp_path.glob("building/*")) == list(tmp_path.glob("objects/*")) == []


def test_private_objects_go_with_the_process_and_not_with_its_children(tmp_path: Path) -> None:
    """A forked child that ends in the ordinary way must not take its parent's objects along."""
    (tmp_path / "file").write_text("")
    code = f"""
import os
from pathlib import Path
from tests.helpers.object_cache import builder_of, make_key
from trtllm_megamoe.cache.store import ObjectCache

found = ObjectCache(Path({str(tmp_path)!r}) / "file" / "cache").get_or_build(make_key(), builder_of(make_key()))
child = os.fork()
if child == 0:
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
assert found.path(".so").is_file()
print(found.directory)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WATCHDOG_S, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert not directory.exists() and not directory.parent.exists()


# -- bounds


def test_cache_prune_removes_the_least_recently_used_until_the_bound_holds(tmp_path: Path) -> None:
    cache, wanted = fill(tmp_path, 5)
    sizes = {found.name: found.num_bytes for _, found in cache.entries() if isinstance(found, Entry)}
    assert_holds(cache.get(wanted[0]), wanted[0])  # the oldest is used just now
    removed = cache.prune(sum(sizes.values()) - sizes["k1"] - 1)
    assert removed == [wanted[1].digest, wanted[2].digest]
    assert kept_names(cache) == {"k0", "k3", "k4"}
    assert cache.prune(1 << 40) == []
    assert set(cache.prune(0)) == {wanted[3].digest, wanted[4].digest}  # k0's reader may not have loaded it yet
    assert kept_names(cache) == {"k0"}
    assert cache.prune(0, recent_s=0.0) == [wanted[0].digest]
    assert kept_names(cache) == set()


def test_cache_prune_removes_broken_entries_and_leftovers_only(tmp_path: Path) -> None:
    cache, wanted = fill(tmp_path, 2)
    _delete_the_manifest(tmp_path / "objects" / wanted[0].digest)
    leftover = tmp_path / "building" / f"{wanted[1].digest}.1.host.0"
    leftover.mkdir()
    assert cache.prune(1 << 40) == [wanted[0].digest]
    assert not leftover.exists()
    assert kept_names(cache) == {"k1"}


def test_cache_prune_leaves_a_running_build_alone(tmp_path: Path) -> None:
    key = make_key()

    def build(directory: Path) -> None:
        builder_of(key)(directory)
        ObjectCache(tmp_path).prune(0)
        assert directory.is_dir()

    assert_holds(ObjectCache(tmp_path).get_or_build(key, build), key)


def test_cache_above_its_bound_prunes_after_a_build(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    key = make_key("new")
    ObjectCache(tmp_path, max_bytes=50_000).get_or_build(key, builder_of(key))
    assert kept_names(ObjectCache(tmp_path)) == {"k3", "new"}


def test_cache_with_processes_that_prune_and_build_at_once_always_returns_sound_entries(tmp_path: Path) -> None:
    wanted = [make_key(f"k{i}") for i in range(4)]

    def build(seed: int) -> None:
        rng, cache = random.Random(seed), ObjectCache(tmp_path, max_bytes=30_000)
        for _ in range(25):
            key = rng.choice(wanted)
            assert cache.get_or_build(key, builder_of(key)).name == key.name
            cache.prune(30_000, recent_s=0.0)  # harsher than any real use: entries go while others read them

    run_in_processes([lambda seed=seed: build(seed) for seed in range(6)])  # type: ignore[misc]
    for key in wanted:
        assert_holds(ObjectCache(tmp_path).get_or_build(key, builder_of(key)), key)
    assert list(tmp_path.glob("building/*")) == []


# -- where it lies


def test_default_root_is_the_variable_or_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRTLLM_MEGAMOE_CACHE_DIR", str(tmp_path / "chosen"))
    assert ObjectCache().root == tmp_path / "chosen"
    monkeypatch.delenv("TRTLLM_MEGAMOE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ObjectCache().root == tmp_path / "xdg" / "trtllm-megamoe"
