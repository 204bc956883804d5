# SPDX-License-Identifier: Apache-2.0
"""`verify-checkpoint`: verdict, exit code and report on real exports and on a family of damaged copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import COMPRESSED_QUANT, DEEPSEEK, QWEN, spell, to_compressed, write_checkpoint
from trtllm_megamoe.cli.verify_checkpoint import verify_checkpoint_command
from trtllm_megamoe.weights.audit import Verdict, audit_layer
from trtllm_megamoe.weights.checkpoint import Checkpoint
from trtllm_megamoe.weights.spec import parse_name

EXPERTS = "model.layers.{}.mlp.experts."
Tensors = dict[str, torch.Tensor]


def run(directory: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    report = directory.parent / f"{directory.name}-report.json"
    report = Path("/dev/null") if directory in (QWEN, DEEPSEEK) else report
    result = CliRunner().invoke(verify_checkpoint_command, [str(directory), "--json", str(report), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    document = json.loads(report.read_text()) if report.exists() and report != Path("/dev/null") else {}
    return result.exit_code, result.output, document


def qwen_copy(tmp_path: Path, damage: Callable[[Tensors], None]) -> Path:
    """The Qwen3 export with damaged tensors."""
    directory = tmp_path / "copy"
    directory.mkdir()
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copy(QWEN / name, directory / name)
    tensors = load_file(QWEN / "model.safetensors")
    damage(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def test_checkpoint_verify_is_clean_on_qwen() -> None:
    code, output, _ = run(QWEN)
    assert code == 0 and "verdict: clean" in output and "(45 in all)" in output


def test_checkpoint_verify_of_deepseek_is_clean_by_layer_and_warns_about_the_absent_one() -> None:
    assert run(DEEPSEEK, "--layers", "1")[0] == 0
    code, output, _ = run(DEEPSEEK)
    assert code == 3 and "warning: layers 2 have routed experts by config.json, but none in the files" in output
    code, output, _ = run(DEEPSEEK, "--layers", "1,2")
    assert code == 2 and "layers that have: 1" in output


def test_checkpoint_verify_spread_scales_are_clean_and_reported(tmp_path: Path) -> None:
    def spread(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            parsed = parse_name(name)
            if parsed is None or parsed.key.component.is_bulk:
                continue
            factor = 1 + 3 * (parsed.key.expert % 4) / 3 if parsed.key.family.name != "GLOBAL" else 1.0  # type: ignore[union-attr]
            if parsed.key.parameter == "w3.weight_scale_2":
                factor = 10.0 if parsed.key.expert % 2 else 0.1
            tensors[name] = tensor * factor

    code, _, report = run(qwen_copy(tmp_path, spread))
    assert code == 0 and report["verdict"] == "clean"
    facts = report["layers"][0]["facts"]
    assert facts["gate_up_ratio_max"] == pytest.approx(10, rel=1e-5) and facts["unequal_gate_up"] == 16
    assert facts["fc2_input_scale_max"] == pytest.approx(4 * facts["fc2_input_scale_min"], rel=1e-5)


def pop(*parts: str) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        gone = [name for name in tensors if any(part in name for part in parts)]
        assert gone
        for name in gone:
            del tensors[name]

    return damage


def change(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        tensors[name] = make(tensors[name])

    return damage


def nan_block(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.view(torch.uint8).clone()
    data[0, 0] = 0x7F
    return data.view(torch.float8_e4m3fn)


L0, L1 = EXPERTS.format(0), EXPERTS.format(1)
DAMAGES: dict[str, tuple[Callable[[Tensors], None], int, str]] = {
    "missing weight": (pop(f"{L0}3.gate_proj.weight"), 2, "layer 0: missing: w1.weight of expert 3"),
    "missing block scales": (
        pop(f"{L1}5.down_proj.weight_scale", f"{L1}6.down_proj.weight_scale"), 2,
        "layer 1: missing: w2.weight_scale of experts 5-6",
    ),
    "missing global": (pop(f"{L1}0.up_proj.weight_scale_2"), 2, "layer 1: missing: w3.weight_scale_2 of expert 0"),
    "missing expert": (pop(f"{L0}15."), 2, "layer 0: missing: w1.weight of expert 15"),
    "missing input scale": (pop(f"{L0}9.up_proj.input_scale"), 2, "layer 0: missing: w3.input_scale of expert 9"),
    "weight-only": (pop(".input_scale"), 2, "no input scales (weight-only); load with activations='bf16'"),
    "wrong shape": (
        change(f"{L0}2.up_proj.weight", lambda t: t[:, :-1]), 2, "wrong shape: w3.weight of expert 2 (got (128, 127)",
    ),
    "wrong dtype": (
        change(f"{L0}2.up_proj.weight_scale", lambda t: t.float()), 2, "wrong dtype: w3.weight_scale of expert 2",
    ),
    "nan block scale": (
        change(f"{L1}2.up_proj.weight_scale", nan_block), 2, "layer 1: degenerate scale: w3.weight_scale of expert 2",
    ),
    "zero global": (
        change(f"{L1}2.down_proj.weight_scale_2", torch.zeros_like), 2,
        "degenerate scale: w2.weight_scale_2 of expert 2",
    ),
    "infinite input scale": (
        change(f"{L1}2.down_proj.input_scale", lambda t: t / 0), 2, "degenerate scale: w2.input_scale of expert 2 (inf",
    ),
    "extra expert": (
        lambda t: t.update({f"{L0}16.gate_proj.weight": t[f"{L0}0.gate_proj.weight"].clone()}), 2,
        "unexpected: w1.weight of expert 16 (the configuration has 16 experts)",
    ),
    "unknown tensor": (
        lambda t: t.update({f"{L0}1.gate_proj.zero_point": torch.zeros(1)}), 2,
        "first unknown tensor 'model.layers.0.mlp.experts.1.gate_proj.zero_point', first missing none",
    ),
    "absent layer": (pop(L1), 3, "warning: layers 1 have routed experts by config.json"),
    "dead expert": (
        change(f"{L0}4.gate_proj.weight_scale", lambda t: torch.zeros(t.shape, dtype=t.dtype)), 3,
        "warning: layer 0: w1.weight_scale: all block scales of expert 4 are zero",
    ),
    "saturated": (
        lambda t: t.update({n: torch.full(s.shape, 448.0).to(s.dtype) for n, s in t.items()
                            if n.startswith(L0) and n.endswith("gate_proj.weight_scale")}), 3,
        "of weight blocks sit at the top scale 448",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_checkpoint_verify_reports_each_damage(tmp_path: Path, name: str) -> None:
    damage, code, text = DAMAGES[name]
    got, output, report = run(qwen_copy(tmp_path, damage))
    assert got == code, output
    assert text in output
    assert report["exit_code"] == code and report["schema"] == "megamoe-verify/1"
    verdict = {2: "refused", 3: "usable with warnings"}[code]
    assert f"verdict: {verdict}" in output and report["verdict"] == verdict


@pytest.mark.parametrize("part", [".input_scale", f"{L0}9.up_proj.input_scale"])
def test_checkpoint_verify_absent_input_scales_are_a_warning_when_they_will_be_calibrated(
    tmp_path: Path, part: str
) -> None:
    directory = qwen_copy(tmp_path, pop(part))
    code, output, _ = run(directory, "--on-missing-input-scale", "calibrate")
    assert code == 3 and "'nvfp4' needs calibration" in output


def test_checkpoint_verify_finds_several_damages_at_once(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        for name in ("missing weight", "zero global", "wrong dtype"):
            DAMAGES[name][0](tensors)

    _, output, report = run(qwen_copy(tmp_path, damage))
    for name in ("missing weight", "zero global", "wrong dtype"):
        assert DAMAGES[name][2] in output
    assert [layer["verdict"] for layer in report["layers"]] == ["refused", "refused"]


@pytest.mark.parametrize("cut", [0, 500, 200_000])
def test_checkpoint_verify_truncated_file_is_refused_with_a_report(tmp_path: Path, cut: int) -> None:
    directory = qwen_copy(tmp_path, lambda tensors: None)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    code, output, report = run(directory)
    assert code == 2 and "truncated" in output and report["verdict"] == "refused" and report["layers"] == []


@pytest.mark.parametrize("text", ["x", "3-", "-1", "", "2-1"])
def test_checkpoint_verify_bad_layer_list_is_a_usage_error(text: str) -> None:
    result = CliRunner().invoke(verify_checkpoint_command, [str(QWEN), f"--layers={text}"])
    assert result.exit_code == 2 and "Invalid value for '--layers'" in result.output


def test_checkpoint_verify_reads_no_codes_and_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_megamoe.weights import safetensors_file

    read: list[str] = []
    original = safetensors_file.SafetensorsFile.read

    def spy(self: safetensors_file.SafetensorsFile, name: str, descriptor: int) -> torch.Tensor:
        read.append(name)
        return original(self, name, descriptor)

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "read", spy)
    progress: list[int] = []
    checkpoint = Checkpoint.open(QWEN)
    audit = audit_layer(checkpoint, 0, progress=progress.append)
    assert audit.verdict is Verdict.CLEAN
    assert not any(name.endswith(".weight") for name in read) and len(read) == len(set(read)) == 9 * 16
    assert len(progress) == len(read)


def test_checkpoint_verify_compressed_tensors_dialect_is_clean(tmp_path: Path) -> None:
    stored = load_file(QWEN / "model.safetensors")
    config = json.loads((QWEN / "config.json").read_text())
    tensors: Tensors = {}
    for layer in (0, 1):
        canonical = {}
        for name, tensor in stored.items():
            parsed = parse_name(name)
            if parsed is not None and parsed.layer == layer:
                canonical[parsed.key.name] = tensor
        tensors |= spell(to_compressed(canonical), EXPERTS.format(layer), hf=True)
    code, output, _ = run(write_checkpoint(tmp_path / "ct", tensors, config, quant=COMPRESSED_QUANT))
    assert code == 0 and "compressed-tensors nvfp4-pack-quantized" in output
