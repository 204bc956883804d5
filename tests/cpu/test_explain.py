# SPDX-License-Identifier: Apache-2.0
"""`explain`: the plan is the region table's, the weights are the specification's, and it adds up."""

from __future__ import annotations

import json

import pytest

from tests.helpers.checkpoints import DEEPSEEK, QWEN
from tests.helpers.cli import invoke
from trtllm_megamoe.cli.text import format_bytes, table
from trtllm_megamoe.presets import PRESETS


def explain(*arguments: object) -> dict:
    result = invoke("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("wire", ["bf16", "fp8", "fp4"])
def test_explain_preset_plan_adds_up(name: str, wire: str) -> None:
    plan = explain(name, "--combine-format", wire, "--max-tokens-per-rank", 512)
    shape = PRESETS[name]
    assert plan["schema"] == "megamoe-explain/1"
    assert plan["buckets"] == sorted(set(plan["buckets"])) and plan["buckets"][-1] == 512
    for space in ("shared", "local"):
        regions = [region for region in plan["regions"] if region["space"] == space]
        end = 0
        for region in regions:
            assert region["offset_bytes"] >= end, region["name"]
            end = region["offset_bytes"] + region["num_bytes"]
        assert end <= plan["total_bytes"][space] < end + 256
    experts = [e for r in plan["ranks"] for e in range(r["first_expert"], r["first_expert"] + r["num_experts"])]
    assert experts == list(range(shape.num_experts))
    # three matrices of H x I a local expert at 4 bits a code and one scale byte per 16
    weights = 3 * shape.hidden_size * shape.intermediate_size * shape.num_experts // 8 * 9 // 16
    assert plan["weight_bytes"] == {"layer": weights, "all_layers": weights * shape.num_moe_layers}
    # every rank may send all its routes to one rank
    assert plan["max_pool_rows"] >= 8 * 512 * shape.top_k


def test_explain_bf16_wire_row_is_two_bytes_a_value_and_others_are_smaller() -> None:
    rows = {wire: explain("kimi-k2", "--combine-format", wire)["return_row_bytes"] for wire in ("bf16", "fp8", "fp4")}
    # 7168 values: 2 bytes each; 1 byte and a scale byte per 32; half a byte and 2 scale bytes per 16
    assert rows == {"bf16": 14336, "fp8": 7168 + 224, "fp4": 3584 + 896}


def test_explain_activations_choose_the_staged_row() -> None:
    nvfp4 = explain("deepseek-v3", "--activations", "nvfp4")["dispatch_row_bytes"]
    assert nvfp4 == 7168 // 2 + 7168 // 16
    for larger in ("bf16", "auto"):
        assert explain("deepseek-v3", "--activations", larger)["dispatch_row_bytes"] >= 2 * 7168


@pytest.mark.parametrize(("directory", "layers", "top_k"), [(QWEN, 2, 4), (DEEPSEEK, 1, 6)])
def test_explain_checkpoint_directory_takes_its_shape(directory: object, layers: int, top_k: int) -> None:
    plan = explain(directory, "--ep-size", 4)
    assert plan["model"]["num_moe_layers"] == layers
    assert plan["config"]["top_k"] == top_k
    assert plan["ep_size"] == len(plan["ranks"]) == 4


def test_explain_text_shows_every_region_and_step() -> None:
    plan = explain("deepseek-v4-pro")
    text = invoke("explain", "deepseek-v4-pro").stdout
    for region in plan["regions"]:
        assert f"  {region['name']} " in text
        assert format_bytes(region["num_bytes"]) in text
    for step in plan["steps"]:
        assert step["name"] in text
    assert "before_requant" in text and "clamp 10.0" in text


def test_explain_one_rank_names_it_once() -> None:
    assert invoke("explain", "qwen3-235b", "--ep-size", 1).stdout.count("rank 0 ") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["kimi"], "neither a checkpoint directory nor a preset (deepseek-v3"),
        (["deepseek-v3", "--ep-size", "7"], "num_experts 256 is not divisible by ep_size 7"),
        (["deepseek-v3", "--combine-format", "fp6"], "combine format 'fp6' is unknown"),
        (["deepseek-v3", "--max-tokens-per-rank", "4194304"], "capacity"),
    ],
)
def test_explain_bad_request_is_one_message_and_exit_two(arguments: list[str], expected: str) -> None:
    result = invoke("explain", *arguments)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * 2**20, "1.50 GiB"), (3 * 2**50, "3072.00 TiB")],
)
def test_format_bytes_uses_the_largest_fitting_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_table_aligns_and_flushes_right() -> None:
    assert table(("a", "bytes"), [("x", "1"), ("long", "22")], right=(1,)) == (
        "  a     bytes\n  ----  -----\n  x         1\n  long     22"
    )
