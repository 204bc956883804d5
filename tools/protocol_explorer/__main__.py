# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.protocol_explorer`: explore the protocol, and what can be taken from it.

The door for people: options, progress bars, tables, JSON; exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from tools.protocol_explorer import report as reports
from tools.protocol_explorer import study
from tools.protocol_explorer.families import CHECKED_FAMILIES, PROTOCOL_FAMILIES, QUICKLY_CHECKED, ring_cases
from tools.protocol_explorer.variants import all_variants

WALKS = {True: 100, False: 5000}
"""Random schedules of the quick and the full study."""


@contextlib.contextmanager
def _bar(label: str, length: int) -> Iterator[Callable[[int], None]]:
    with click.progressbar(length=length, label=f"{label:36}", file=sys.stderr) as bar:
        yield bar.update


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--quick/--full", default=True, help="A minute, or every family (twenty minutes on two cores).")
@click.option("--mutants", is_flag=True, help="Also take every wait, release, bank and rule away, one at a time.")
@click.option("--trace", metavar="NAME", help="Only show the shortest way to the fault of one mutant.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the report there as well.")
def main(quick: bool, mutants: bool, trace: str | None, jobs: int, json_file: Path | None) -> None:
    """Explore every interleaving of the layer's protocol on a model (docs/protocol.md)."""
    if trace is not None:
        show_trace(trace)
        return
    workers = study.Workers(jobs)
    try:
        report = run(workers, quick=quick, mutants=mutants)
    finally:
        workers.close()
    click.echo(reports.text(report))
    if json_file is not None:
        json_file.write_text(reports.as_json(report, " ".join(["python -m tools.protocol_explorer", *sys.argv[1:]])))
    click.echo("\neverything is as it must be" if report.ok else "\nNOT as it must be: see FAIL above")
    sys.exit(0 if report.ok else 1)


def run(workers: study.Workers, *, quick: bool, mutants: bool) -> study.Report:
    """All studies, with a progress bar for each."""
    report = study.Report()
    for family in PROTOCOL_FAMILIES:
        with _bar(family.name, study.family_size(family, quick=quick)) as tick:
            report.protocol.append(study.study_family(family, workers, quick=quick, tick=tick))
    with _bar("rings", len(ring_cases(quick=quick))) as tick:
        report.ring = study.study_ring(quick=quick, tick=tick)
    with _bar("random schedules", WALKS[quick]) as tick:
        report.walks = study.study_walks(workers, WALKS[quick], tick)
    if mutants:
        with _bar("mutants", len(all_variants())) as tick:
            report.variants = study.study_variants(workers, quick=quick, tick=tick)
        checked = QUICKLY_CHECKED if quick else CHECKED_FAMILIES
        with _bar("with and without reductions", sum(study.family_size(f, quick=quick) for f in checked)) as tick:
            report.reductions = study.study_reductions(workers, quick=quick, tick=tick)
    return report


def show_trace(name: str) -> None:
    """Print one mutant's shortest fault, move by move."""
    found = [variant for variant in all_variants() if name in variant.name]
    if len(found) != 1:
        names = "\n  ".join(variant.name for variant in found or all_variants())
        raise click.ClickException(f"{name!r} names {len(found)} mutants; choose one of:\n  {names}")
    row = study.study_variant(found[0], quick=False)
    for line in row.trace:
        click.echo(line)
    click.echo(f"{row.name}: {reports.verdict(row)}\n{row.example or row.safe}")


if __name__ == "__main__":
    main()
