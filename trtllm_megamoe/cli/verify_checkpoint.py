# SPDX-License-Identifier: Apache-2.0
"""`verify-checkpoint`: read a checkpoint's routed experts and say whether they can be used, before a GPU is involved.

Exit 0 clean, 3 usable with warnings, 2 refused. Wording and options only; the judging is `weights/audit`'s.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from trtllm_megamoe.cli.failure import debug_option
from trtllm_megamoe.cli.text import table
from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.weights.audit import LayerAudit, MissingInputScale, Verdict, audit_bytes, audit_layer
from trtllm_megamoe.weights.checkpoint import Checkpoint
from trtllm_megamoe.weights.faults import id_ranges

_SHOWN_IGNORED = 5


class LayerList(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """`1`, `0-3`, `0-3,7`."""

    name = "LAYERS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Parse to ascending unique layer numbers."""
        if isinstance(value, list):
            return value
        layers: set[int] = set()
        try:
            for part in str(value).split(","):
                first, dash, last = part.strip().partition("-")
                layers.update(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            self.fail(f"{value!r} is not a list of layers such as 1 or 0-3,7", param, ctx)
        if not layers:
            self.fail(f"{value!r} names no layer", param, ctx)
        return sorted(layers)


@dataclass(slots=True)
class Report:
    """Everything `verify-checkpoint` says; `to_dict` is schema megamoe-verify/1."""

    path: str
    checkpoint: Checkpoint | None = None
    layers: list[LayerAudit] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Worst of all findings."""
        verdicts = {audit.verdict for audit in self.layers}
        if self.errors or Verdict.REFUSED in verdicts:
            return Verdict.REFUSED
        return Verdict.WARNINGS if self.warnings or Verdict.WARNINGS in verdicts else Verdict.CLEAN

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        document: dict[str, Any] = {
            "schema": "megamoe-verify/1",
            "checkpoint": self.path,
            "verdict": self.verdict.value,
            "exit_code": self.verdict.exit_code,
            "errors": self.errors,
            "warnings": self.warnings,
            "layers": [{**asdict(audit), "verdict": audit.verdict.value} for audit in self.layers],
        }
        if self.checkpoint is not None:
            document |= {
                "architecture": self.checkpoint.architecture,
                "quantization": self.checkpoint.scheme,
                "shape": asdict(self.checkpoint.facts.shape),
                "ignored": self.checkpoint.ignored,
            }
        return document


def verify(path: Path, layers: list[int] | None, policy: MissingInputScale) -> Report:
    """Audit a checkpoint directory; shows a progress bar on a terminal."""
    report = Report(str(path))
    try:
        report.checkpoint = checkpoint = Checkpoint.open(path)
    except MegaMoeWeightError as error:
        report.errors.append(str(error))
        return report
    present = set(checkpoint.contents)
    if layers is None:
        absent = sorted(set(checkpoint.expected_moe_layers) - present)
        if absent:
            report.warnings.append(
                f"layers {id_ranges(absent)} have routed experts by config.json, but none in the files"
            )
        layers = sorted(present)
        if not layers:
            report.errors.append("no layer has routed experts in the files")
    with tqdm(total=audit_bytes(checkpoint, layers), unit="B", unit_scale=True, desc="scales", disable=None) as bar:
        for layer in layers:
            bar.set_postfix_str(f"layer {layer}")
            report.layers.append(audit_layer(checkpoint, layer, policy, bar.update))
    return report


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print(report: Report) -> None:
    checkpoint = report.checkpoint
    if checkpoint is not None:
        shape = checkpoint.facts.shape
        click.echo(
            f"{report.path}: {checkpoint.architecture}, {checkpoint.scheme}, hidden {shape.hidden_size}, "
            f"intermediate {shape.intermediate_size}, {shape.num_experts} experts, top-{shape.top_k}"
        )
        ignored = checkpoint.ignored
        more = f", ... ({len(ignored)} in all)" if len(ignored) > _SHOWN_IGNORED else ""
        click.echo(f"ignored (not routed experts): {', '.join(ignored[:_SHOWN_IGNORED]) or 'none'}{more}\n")
    rows = []
    for audit in report.layers:
        facts = audit.facts
        low, high = facts.get("fc2_input_scale_min"), facts.get("fc2_input_scale_max")
        fc2 = _number(low) if low == high else f"{_number(low)} .. {_number(high)}"
        numbers = (facts.get("fc1_input_scale"), facts.get("gate_up_ratio_max"), facts.get("top_scale_share"))
        fc1, ratio, share = map(_number, numbers)
        rows.append((str(audit.layer), audit.verdict.value, str(facts.get("experts", "-")), fc1, fc2, ratio, share))
    if rows:
        headers = ("layer", "verdict", "experts", "fc1 input", "fc2 input", "gate/up ratio", "top-scale share")
        click.echo(table(headers, rows, right=(0, 2, 3, 5, 6)) + "\n")
    for text in report.errors:
        click.echo(f"refused: {text}")
    for audit in report.layers:
        for text in audit.errors:
            click.echo(f"refused: layer {audit.layer}: {text}")
    for text in report.warnings:
        click.echo(f"warning: {text}")
    for audit in report.layers:
        for text in audit.warnings:
            click.echo(f"warning: layer {audit.layer}: {text}")
    click.echo(f"verdict: {report.verdict.value}")


@click.command("verify-checkpoint", short_help="Whether a checkpoint's routed experts can be used, and why not.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--layers", type=LayerList(), default=None, help="Judge these layers only, e.g. 1 or 0-3,7.")
@click.option(
    "--on-missing-input-scale",
    "policy",
    type=click.Choice([member.value for member in MissingInputScale]),
    default=MissingInputScale.REFUSE.value,
    show_default=True,
    help="Absent input scales: refuse, or accept because they will be calibrated.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here.")
@debug_option
@click.pass_context
def verify_checkpoint_command(
    ctx: click.Context, directory: Path, layers: list[int] | None, policy: str, json_path: Path | None
) -> None:
    """Scan the routed experts of the checkpoint in DIRECTORY.

    Every tensor's name, shape and dtype and all scales are checked; codes are not read. Exit code 0: clean;
    3: usable, with warnings; 2: refused.
    """
    report = verify(directory, layers, MissingInputScale(policy))
    _print(report)
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    ctx.exit(report.verdict.exit_code)


command = verify_checkpoint_command
