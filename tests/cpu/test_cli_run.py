# SPDX-License-Identifier: Apache-2.0
"""The `run` command: defaults, reports, exit codes, and one message for each kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import trtllm_megamoe
from tests.helpers.checkpoints import DEEPSEEK, QWEN
from tests.helpers.cli import Edit, copy_checkpoint, invoke
from trtllm_megamoe.cli import run as run_module
from trtllm_megamoe.cli.job import deal
from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment

WATCHDOG_S = 120.0
EXPERT_3_UP = "model.layers.0.mlp.experts.3.up_proj.weight_scale_2"


@pytest.fixture
def tokens() -> dict[str, torch.Tensor]:
    """Layer 0 of the small checkpoint, plain names, 11 tokens."""
    golden = load_file(QWEN / "golden.safetensors")
    return {name: golden[f"layers.0.{name}"][:11].contiguous() for name in ("x", "topk_ids", "topk_weights")}


class Runner:
    """`run` on the small checkpoint with some tensors as input."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.input = directory / "in.safetensors"
        self.output = directory / "out.safetensors"
        self.json = directory / "report.json"

    def arguments(self, *extra: object, checkpoint: Path = QWEN, layer: int = 0) -> list[object]:
        fixed = ["run", "--checkpoint", checkpoint, "--layer", layer, "--input", self.input, "--output", self.output]
        return [*fixed, "--ep-size", 2, *extra]

    def __call__(
        self, tensors: dict[str, torch.Tensor], *extra: object, checkpoint: Path = QWEN, layer: int = 0
    ) -> Result:
        save_file(tensors, self.input)
        return invoke(*self.arguments(*extra, checkpoint=checkpoint, layer=layer))

    def report(self) -> dict:
        return json.loads(self.json.read_text())

    def out(self) -> torch.Tensor:
        return load_file(self.output)["out"]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_run_good_input_reports_writes_and_exits_zero(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    result = run(tokens, "--json", run.json)
    assert result.exit_code == 0, result.output
    assert "rel-L2" in result.stdout and "cosine" in result.stdout and "saturated" in result.stdout
    assert run.out().dtype == torch.float32
    assert run.out().shape == tokens["x"].shape
    report = run.report()
    assert report["schema"] == "megamoe-run/1"
    assert report["check"]["passed"] and report["check"]["rel_l2"] < report["check"]["tolerance_rel_l2"] == 1e-3
    assert report["case"]["config"]["max_tokens_per_rank"] == 6  # the larger share of 11 tokens on 2 ranks
    assert report["case"]["config"]["score_placement"] == "after_fc2"
    assert report["activation_mode"] == "nvfp4"


def test_run_same_x_in_three_dtypes_gives_the_same_bits(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    exact = tokens["x"].to(torch.bfloat16).clamp(-8, 8)
    exact = torch.where(exact.abs() < 2**-6, 0, exact)  # also exact in float16
    outs = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(exact.to(dtype).to(torch.bfloat16), exact)
        result = run({**tokens, "x": exact.to(dtype), "topk_ids": tokens["topk_ids"].to(torch.int32)})
        assert result.exit_code == 0, result.output
        outs.append(run.out())
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_run_prefixed_names_are_preferred_to_plain_ones(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    assert run(tokens).exit_code == 0
    plain = run.out()
    prefixed = {f"layers.0.{name}": tensor.clone() for name, tensor in tokens.items()}
    assert run(prefixed | {"x": torch.zeros_like(tokens["x"])}).exit_code == 0
    assert torch.equal(run.out(), plain)


def test_run_no_tokens_writes_an_empty_result(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    result = run({name: tensor[:0] for name, tensor in tokens.items()})
    assert result.exit_code == 0, result.output
    assert run.out().shape == (0, tokens["x"].shape[1])


def test_run_nan_token_is_nan_in_its_own_row_only_and_passes(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    tokens["x"][4, 7] = float("nan")
    result = run(tokens, "--json", run.json)
    assert result.exit_code == 0, result.output
    assert run.out().isnan().any(dim=1).nonzero().flatten().tolist() == [4]
    assert run.report()["check"]["num_nonfinite"] > 0


def test_run_deepseek_v4_architecture_weighs_before_requant_and_clamps(
    run: Runner, tokens: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    copy = copy_checkpoint(QWEN, tmp_path / "v4", lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    config |= {"architectures": ["DeepseekV4ForCausalLM"], "swiglu_limit": 0.125}
    (copy / "config.json").write_text(json.dumps(config))
    result = run(tokens, "--json", run.json, checkpoint=copy)
    assert result.exit_code == 0, result.output
    chosen = run.report()["case"]["config"]
    assert chosen["score_placement"] == "before_requant"
    assert chosen["swiglu_limit"] == 0.125
    assert run(tokens, "--swiglu-limit", "inf", "--score-placement", "after_fc2", checkpoint=copy).exit_code == 0
    unclamped = run.out()
    assert run(tokens).exit_code == 0
    assert torch.equal(unclamped, run.out())


def test_run_wrong_answer_is_written_reported_and_exits_one(
    run: Runner, tokens: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run_module.run_threads

    def slightly_wrong(*arguments: object) -> list[object]:
        forwarded = honest(*arguments)[0]
        out = forwarded.out.clone()
        out[3] *= 1.25  # one token of eleven
        return [replace(forwarded, out=out)]

    monkeypatch.setattr(run_module, "run_threads", slightly_wrong)
    result = run(tokens, "--json", run.json)
    assert result.exit_code == 1
    assert "NOT within" in result.stdout
    assert result.stderr.startswith("error: rel-L2 ") and "Traceback" not in result.stderr
    assert run.report()["check"]["passed"] is False
    assert run.output.exists()


def drop(name: str) -> Edit:
    def edit(tokens: dict[str, torch.Tensor]) -> None:
        del tokens[name]

    return edit


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(tokens: dict[str, torch.Tensor]) -> None:
        tokens[name] = make(tokens[name]).contiguous()

    return edit


BAD_INPUTS: dict[str, tuple[Edit | None, list[str], str]] = {
    "above_cap": (None, ["--max-tokens-per-rank", "5"], "give one rank 6, above --max-tokens-per-rank 5"),
    "ep_size": (None, ["--ep-size", "3"], "num_experts 16 is not divisible by ep_size 3"),
    "wire": (None, ["--combine-format", "int8"], "combine format 'int8' is unknown; allowed: bf16"),
    "clamp": (None, ["--swiglu-limit", "0"], "swiglu_limit"),
    "x_dtype": (put("x", lambda t: t.double()), [], "x has dtype float64; allowed: float32, float16, bfloat16"),
    "x_integer": (put("x", lambda t: t.to(torch.int32)), [], "x has dtype int32"),
    "ids_dtype": (put("topk_ids", lambda t: t.to(torch.int16)), [], "topk_ids has dtype int16; allowed: int32, int64"),
    "ids_float": (put("topk_ids", lambda t: t.float()), [], "topk_ids has dtype float32"),
    "weights_dtype": (put("topk_weights", lambda t: t.double()), [], "topk_weights has dtype float64"),
    "x_dim": (put("x", lambda t: t[0]), [], "x must be (T, H)"),
    "x_width": (put("x", lambda t: t[:, :128]), [], "x has 128 columns, the checkpoint's hidden size is 256"),
    "rows": (put("topk_ids", lambda t: t[:5]), [], "with the same T and K"),
    "weights_shape": (put("topk_weights", lambda t: t[:, :2]), [], "with the same T and K"),
    "no_x": (drop("x"), [], "lacks 'x' (also under layers.0.)"),
    "no_ids": (drop("topk_ids"), [], "lacks 'topk_ids'"),
}


@pytest.mark.parametrize("fault", BAD_INPUTS)
@pytest.mark.parametrize("transport", ["threads", "mpi"])
def test_run_bad_input_is_one_message_and_exit_two_before_any_rank_starts(
    run: Runner, tokens: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, fault: str, transport: str
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(run_module, "run_threads", never)
    monkeypatch.setattr(run_module, "run_under_mpirun", never)
    edit, options, expected = BAD_INPUTS[fault]
    if edit is not None:
        edit(tokens)
    result = run(tokens, *options, "--transport", transport)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert result.stdout == "" and not run.output.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU on a machine that has none")
def test_run_cuda_engine_without_a_gpu_is_refused(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    result = run(tokens, "--engine", "cuda")
    assert result.exit_code == 2
    assert "engine 'cuda' was asked for, but" in result.stderr and "allowed here: cpu" in result.stderr


def test_run_other_top_k_is_refused(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    for name in ("topk_ids", "topk_weights"):
        tokens[name] = tokens[name][:, :3].contiguous()
    result = run(tokens)
    assert result.exit_code == 2
    assert "topk_ids has 3 columns, the checkpoint routes to top-4" in result.stderr


def test_run_missing_layer_names_those_that_exist(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    result = run(tokens, layer=9)
    assert result.exit_code == 2
    assert "layer 9" in result.stderr and "layers that have: 0-1" in result.stderr


@pytest.mark.parametrize("keep", [0, 5, 4000, -1])
def test_run_truncated_checkpoint_is_refused(
    run: Runner, tokens: dict[str, torch.Tensor], tmp_path: Path, keep: int
) -> None:
    copy = copy_checkpoint(QWEN, tmp_path / "cut", lambda tensors: None)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    result = run(tokens, checkpoint=copy)
    assert result.exit_code == 2, result.output
    assert "model.safetensors" in result.stderr and result.stderr.count("\n") == 1


def test_run_truncated_input_is_refused(run: Runner, tokens: dict[str, torch.Tensor]) -> None:
    save_file(tokens, run.input)
    run.input.write_bytes(run.input.read_bytes()[:-100])
    result = invoke(*run.arguments())
    assert result.exit_code == 2
    assert "cannot read input" in result.stderr


def test_run_missing_paths_are_usage_errors(run: Runner, tokens: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tokens, run.input)
    assert invoke(*run.arguments(checkpoint=tmp_path / "none")).exit_code == 2
    run.output = tmp_path / "none" / "out.safetensors"
    result = invoke(*run.arguments())
    assert result.exit_code == 2
    assert f"cannot write {run.output}" in result.stderr


def test_run_missing_weight_is_one_error_for_all_ranks(
    run: Runner, tokens: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Only rank 0 owns expert 3; rank 1 must stop with it, long before any wait expires."""
    copy = copy_checkpoint(QWEN, tmp_path / "hole", lambda tensors: tensors.pop(EXPERT_3_UP))
    for transport in ("threads", "mpi"):
        result = run(tokens, "--transport", transport, checkpoint=copy)
        assert result.exit_code == 2, result.output
        assert "weight_scale_2" in result.stderr and "expert" in result.stderr
        assert result.stderr.count("error:") == 1 and "Traceback" not in result.stderr
        assert not run.output.exists()


@pytest.mark.parametrize("place", ["before", "behind"])
def test_run_debug_adds_the_traceback_and_keeps_the_exit_code(
    run: Runner, tokens: dict[str, torch.Tensor], place: str
) -> None:
    save_file(tokens, run.input)
    arguments = run.arguments(layer=9)
    result = invoke("--debug", *arguments) if place == "before" else invoke(*arguments, "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "error: " in result.stderr


def test_run_fault_of_ours_exits_three_and_says_so(
    run: Runner, tokens: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(run_module, "run_threads", broken)
    result = run(tokens)
    assert result.exit_code == 3
    assert "internal error: KeyError" in result.stderr and "Traceback" not in result.stderr


def test_run_under_mpirun_uses_its_ranks_and_checks_their_number(tmp_path: Path) -> None:
    golden = DEEPSEEK / "golden.safetensors"

    def job(ep_size: int) -> subprocess.CompletedProcess[str]:
        paths = ["--checkpoint", str(DEEPSEEK), "--layer", "1", "--input", str(golden)]
        program = ["-m", "trtllm_megamoe", "run", *paths, "--output", str(tmp_path / "out.safetensors")]
        return subprocess.run(
            mpirun_command(2, [*program, "--ep-size", str(ep_size)]),
            env=mpirun_environment(2), capture_output=True, text=True, timeout=WATCHDOG_S, check=False,
        )  # fmt: skip

    good = job(2)
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("rel-L2") == 1
    assert "2 (mpi)" in good.stdout
    bad = job(4)
    assert bad.returncode == 2
    assert bad.stderr.count("error: this MPI job has 2 ranks, --ep-size is 4") == 1


def test_module_prints_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trtllm_megamoe", "--version"],
        capture_output=True, text=True, timeout=WATCHDOG_S, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == f"trtllm-megamoe, version {trtllm_megamoe.__version__}"


@settings(max_examples=60)
@given(num_tokens=st.integers(0, 300), ep_size=st.integers(1, 16))
def test_deal_shares_are_contiguous_complete_and_near_even(num_tokens: int, ep_size: int) -> None:
    shares = deal(num_tokens, ep_size)
    assert [index for share in shares for index in range(num_tokens)[share]] == list(range(num_tokens))
    lengths = [share.stop - share.start for share in shares]
    assert len(lengths) == ep_size
    assert max(lengths) - min(lengths) <= 1 and max(lengths) == -(-num_tokens // ep_size)
