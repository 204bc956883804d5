# SPDX-License-Identifier: Apache-2.0
"""`run`: one MoE layer of a checkpoint over several ranks, compared with the oracle.

Reads options, chooses where the ranks live (threads, an MPI job of our own, the MPI job we are in) and reports; the
work is in :mod:`trtllm_megamoe.cli.job`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from safetensors.torch import save_file

import trtllm_megamoe
from trtllm_megamoe.cli.failure import debug_option, set_rank
from trtllm_megamoe.cli.job import (
    Check,
    Forwarded,
    LayerInput,
    RunCase,
    check_case,
    forward_case,
    prepare,
)
from trtllm_megamoe.cli.text import table
from trtllm_megamoe.cli.worker import JOB_S, run_under_mpirun
from trtllm_megamoe.comm import mpi, run_threads
from trtllm_megamoe.comm.launch import detect
from trtllm_megamoe.engines.registry import choose_engine
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeVerificationError
from trtllm_megamoe.formats import ScorePlacement
from trtllm_megamoe.weights.audit import MissingInputScale

EXISTING_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _check_target(path: Path | None) -> None:
    """Refuse a file that cannot be written before any work is done."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise MegaMoeConfigError(f"cannot write {path}: its directory must exist and it must not be a directory itself")


@click.command("run", short_help="Run one layer of a checkpoint and compare it with the oracle.")
@click.option("--checkpoint", required=True, type=EXISTING_DIRECTORY, help="Its directory.")
@click.option("--layer", required=True, type=click.IntRange(min=0), help="Model layer.")
@click.option(
    "--input",
    "input_path",
    required=True,
    type=EXISTING_FILE,
    help="safetensors with x (T, H), topk_ids (T, K), topk_weights (T, K), plain or prefixed layers.N.",
)
@click.option(
    "--output",
    "output_path",
    required=True,
    type=click.Path(path_type=Path),
    help="safetensors to write: out (T, H) float32.",
)
@click.option("--ep-size", default=8, show_default=True, type=click.IntRange(min=1), help="Expert-parallel ranks.")
@click.option("--engine", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option(
    "--transport",
    type=click.Choice(["threads", "mpi"]),
    help="mpi starts mpirun itself unless already under one.  [default: threads, or mpi under mpirun]",
)
@click.option("--combine-format", default="bf16", show_default=True, help="Wire: bf16, fp8 or fp4.")
@click.option("--activations", default="auto", show_default=True, type=click.Choice(["auto", "nvfp4", "bf16"]))
@click.option(
    "--on-missing-input-scale",
    "policy",
    type=click.Choice([member.value for member in MissingInputScale]),
    default=MissingInputScale.REFUSE.value,
    show_default=True,
    help="nvfp4 activations without input scales: refuse, or measure them on this input.",
)
@click.option(
    "--score-placement",
    type=click.Choice([placement.value for placement in ScorePlacement]),
    help="Where routing weights multiply.  [default: by architecture]",
)
@click.option("--swiglu-limit", type=float, help="Clamp of gate and up; inf for none.  [default: the checkpoint's]")
@click.option("--max-tokens-per-rank", type=click.IntRange(min=1), help="Cap.  [default: the largest share]")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the report as JSON.")
@debug_option
def command(
    checkpoint: Path,
    layer: int,
    input_path: Path,
    output_path: Path,
    ep_size: int,
    engine: str,
    transport: str | None,
    combine_format: str,
    activations: str,
    policy: str,
    score_placement: str | None,
    swiglu_limit: float | None,
    max_tokens_per_rank: int | None,
    json_path: Path | None,
) -> None:
    """Run one MoE layer of an NVFP4 checkpoint and compare it with the oracle.

    Exits 0 when the result is within tolerance, 1 when it is not, 2 on bad input, 3 when the run could not finish.
    """
    launch = detect()
    set_rank(launch.rank)
    _check_target(output_path)
    _check_target(json_path)
    options = {
        "engine": engine,
        "combine_format": combine_format,
        "activations": activations,
        "score_placement": score_placement,
        "swiglu_limit": swiglu_limit,
        "max_tokens_per_rank": max_tokens_per_rank,
    }
    case, given = prepare(checkpoint, layer, input_path, ep_size, options, MissingInputScale(policy))
    transport = transport or ("mpi" if launch.is_launched else "threads")
    if transport == "mpi" and launch.is_launched:
        if launch.size != ep_size:
            raise MegaMoeConfigError(f"this MPI job has {launch.size} ranks, --ep-size is {ep_size}; they must agree")
        forwarded = forward_case(case, given, mpi(), show_progress=True)
    elif launch.size > 1:
        raise MegaMoeConfigError(f"--transport threads under a launcher of {launch.size} ranks; use mpi or no launcher")
    elif transport == "mpi":
        forwarded = run_under_mpirun([case])[0]
    else:
        device = "cuda" if choose_engine(case.config.engine, ep_size).name == "cuda" else None
        body = partial(forward_case, case, given, show_progress=True)
        forwarded = run_threads(ep_size, body, JOB_S, device)[0]
    if forwarded is not None:
        _finish(case, given, forwarded, output_path, json_path)


def _finish(case: RunCase, given: LayerInput, forwarded: Forwarded, output_path: Path, json_path: Path | None) -> None:
    """Write, compare, report; a wrong answer is written and reported too, then raised."""
    save_file({"out": forwarded.out.float()}, output_path)
    check = check_case(case, given, forwarded)
    if json_path is not None:
        json_path.write_text(json.dumps(_report(case, given, forwarded, check, output_path), indent=2) + "\n")
    click.echo(_describe(case, given, forwarded, check, output_path))
    if not check.passed:
        raise MegaMoeVerificationError(
            f"rel-L2 {check.rel_l2:.3e} against the oracle is not below {check.tolerance_rel_l2:g}, or "
            f"non-finite values differ; the result is in {output_path}"
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} % of {whole}" if whole else "none"


def _describe(case: RunCase, given: LayerInput, forwarded: Forwarded, check: Check, output_path: Path) -> str:
    config = case.config
    verdict = "within" if check.passed else "NOT within"
    rows = [
        ("layer", f"{case.layer} of {case.checkpoint}: H {config.hidden_size}, I {config.intermediate_size}, "
                  f"E {config.num_experts}, K {config.top_k}"),
        ("ranks", f"{case.ep_size} ({forwarded.transport}), {forwarded.engine} engine, {given.num_tokens} tokens, "
                  f"at most {config.max_tokens_per_rank} a rank"),
        ("numerics", f"{forwarded.activation_mode.value} activations, {config.combine_format.value} wire, "
                     f"scores {config.score_placement.value}, clamp {config.swiglu_limit or 'none'}"),
        ("saturated", _describe_saturation(forwarded)),
        *_describe_scales(forwarded),
        ("time", f"load {forwarded.load_s:.3f} s, forward {forwarded.forward_s:.3f} s (slowest rank)"),
        ("check", f"rel-L2 {check.rel_l2:.3e}, cosine {check.cosine:.8f} against the oracle: "
                  f"{verdict} {check.tolerance_rel_l2:g}"),
        ("output", str(output_path)),
    ]  # fmt: skip
    return table((), rows)


def _describe_saturation(forwarded: Forwarded) -> str:
    """Shares of activation blocks that their static scale cannot express (R27)."""
    seen = forwarded.saturation
    if seen is None:
        return f"not counted by the {forwarded.engine} engine"
    return (
        f"{_percent(seen.input_saturated, seen.input_blocks)} input blocks, "
        f"{_percent(seen.fc1_out_saturated, seen.fc1_out_blocks)} fc1 output blocks"
    )


def _describe_scales(forwarded: Forwarded) -> list[tuple[str, str]]:
    """A row on calibrated activation scales, where there are any."""
    scales = forwarded.calibrated
    if scales is None:
        return []
    fc2 = scales.down_input_global
    text = f"on this input: fc1 scale {scales.input_global:.4g}, fc2 scales {min(fc2):.4g} to {max(fc2):.4g}"
    return [("calibrated", text)]


def _report(case: RunCase, given: LayerInput, forwarded: Forwarded, check: Check, output_path: Path) -> dict[str, Any]:
    """The JSON report, schema `megamoe-run/1`."""
    return {
        "schema": "megamoe-run/1",
        "version": trtllm_megamoe.__version__,
        "case": case.model_dump(mode="json"),
        "num_tokens": given.num_tokens,
        "engine": forwarded.engine,
        "transport": forwarded.transport,
        "activation_mode": forwarded.activation_mode.value,
        "saturation": None if forwarded.saturation is None else asdict(forwarded.saturation),
        "calibrated": None if forwarded.calibrated is None else asdict(forwarded.calibrated),
        "load_s": forwarded.load_s,
        "forward_s": forwarded.forward_s,
        "check": asdict(check),
        "output": str(output_path),
    }
