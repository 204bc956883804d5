# SPDX-License-Identifier: Apache-2.0
"""`cache`: look at, bound and ship the store of compiled kernels; the work is in :mod:`trtllm_megamoe.cache`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from trtllm_megamoe.cache.archive import export_archive, import_archive
from trtllm_megamoe.cache.entry import Entry
from trtllm_megamoe.cache.store import MAX_BYTES, ObjectCache
from trtllm_megamoe.cli.failure import debug_option
from trtllm_megamoe.cli.text import format_bytes, table
from trtllm_megamoe.errors import MegaMoeConfigError

ARCHIVE = click.Path(dir_okay=False, path_type=Path)


@click.group("cache", short_help="List, prune, export or import compiled kernels.")
@click.option(
    "--dir",
    "root",
    type=click.Path(file_okay=False, path_type=Path),
    help="The cache's directory.  [default: TRTLLM_MEGAMOE_CACHE_DIR, or the user's cache directory]",
)
@debug_option
@click.pass_context
def command(ctx: click.Context, root: Path | None) -> None:
    """Look at, bound and ship the compiled kernels on this machine."""
    ctx.obj = ObjectCache(root)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema megamoe-cache-list/1) instead of a table.")
@debug_option
@click.pass_obj
def list_command(cache: ObjectCache, as_json: bool) -> None:
    """Show every compiled kernel and whether its files are as they were written."""
    try:
        found = list(cache.entries())
    except OSError as err:
        raise MegaMoeConfigError(f"cannot read {cache.root}: {err}") from None
    sound = [entry for _, entry in found if isinstance(entry, Entry)]
    total_bytes = sum(entry.num_bytes for entry in sound)
    if as_json:
        objects = [
            {
                "digest": digest,
                "name": entry.name,
                "facts": entry.facts,
                "num_bytes": entry.num_bytes,
                "build_s": entry.build_s,
                "used_at": entry.used_at,
            }
            if isinstance(entry, Entry)
            else {"digest": digest, "broken": str(entry)}
            for digest, entry in found
        ]
        document = {"schema": "megamoe-cache-list/1", "root": str(cache.root), "objects": objects}
        click.echo(json.dumps(document | {"total_bytes": total_bytes}, indent=2))
        return
    click.echo(f"{cache.root}: {len(sound)} kernels, {format_bytes(total_bytes)}")
    if not found:
        return
    rows = [
        (digest[:12], entry.name, str(entry.facts.get("arch")), str(entry.facts.get("host")),
         format_bytes(entry.num_bytes), f"{entry.build_s:.1f} s", _age(entry.used_at))
        if isinstance(entry, Entry)
        else (digest[:12], f"broken: {entry}", "", "", "", "", "")
        for digest, entry in found
    ]  # fmt: skip
    headers = ("digest", "kernel", "GPU", "host", "bytes", "built in", "last used")
    click.echo("\n" + table(headers, rows, right=(4, 5, 6)))


@command.command("prune")
@click.option(
    "--max-bytes", default=MAX_BYTES, show_default=True, type=click.IntRange(min=0), help="Keep at most so many."
)
@debug_option
@click.pass_obj
def prune_command(cache: ObjectCache, max_bytes: int) -> None:
    """Remove broken kernels, what killed builds left, and the least recently used above a size.

    Kernels used within the last minute stay.
    """
    try:
        removed = cache.prune(max_bytes)
    except OSError as err:
        raise MegaMoeConfigError(f"cannot prune {cache.root}: {err}") from None
    click.echo(f"{cache.root}: removed {len(removed)} kernels")


@command.command("export")
@click.argument("file", type=ARCHIVE)
@debug_option
@click.pass_obj
def export_command(cache: ObjectCache, file: Path) -> None:
    """Write all compiled kernels to FILE, a tar with a manifest."""
    exported = export_archive(cache, file)
    click.echo(f"{file}: {len(exported)} kernels, {format_bytes(sum(entry.num_bytes for entry in exported))}")


@command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@debug_option
@click.pass_obj
def import_command(cache: ObjectCache, file: Path) -> None:
    """Add the compiled kernels in FILE, after verifying every byte of it.

    A compiled kernel is code that runs in your processes: import only files you trust.
    """
    added, present = import_archive(cache, file)
    click.echo(f"{cache.root}: added {len(added)} kernels, {len(present)} were there already")


def _age(used_at: float) -> str:
    hours = max(0.0, time.time() - used_at) / 3600
    return f"{hours:.1f} h ago" if hours < 48 else f"{hours / 24:.0f} d ago"
