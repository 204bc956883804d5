# SPDX-License-Identifier: Apache-2.0
"""The interpreter against results of a real GPU, bit for bit: outputs, pool, fc1 output and returned rows.

tests/data/recorded holds what an H200 computed with objects compiled together with the kept PTX, and that GPU's
`ex2.approx` and `rcp.approx` for exactly the inputs that occur; nothing else of the interpreter is taken from hardware.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.recorded import CASES, RECORDED, Recording, comparable, differing, interpreted, ptx_digest
from tools.ptxsim import approx
from tools.ptxsim.kept import DATA, KEPT, parameters
from tools.ptxsim.layers import KernelFile

WITH_RESULTS = pytest.mark.skipif(not RECORDED.exists(), reason="no GPU has recorded results of these kernels yet")


def kept(name: str) -> KernelFile:
    return KernelFile.load(DATA / f"{name}.ptx")


@WITH_RESULTS
@pytest.mark.parametrize("name", CASES)
def test_interpreter_equals_the_recorded_gpu_results_bit_for_bit(name: str) -> None:
    recording = Recording.load(RECORDED)
    case = dataclasses.replace(CASES[name], stored=recording.inputs[name])
    facts, kernel = recording.facts["cases"][name], kept(case.kernel)
    kept_ptx = (DATA / f"{case.kernel}.ptx").read_text()
    assert facts["ptx"] == ptx_digest(kept_ptx), "the kept PTX is not that of the GPU's objects: record anew"
    assert facts["unstable"] == 0
    assert set(recording.tables) == {"ex2", "rcp"}
    with approx.using({**recording.tables}):
        got = interpreted(case, kernel)
    assert differing(got, recording.results[name]) == {}
    assert [table.missing for table in recording.tables.values()] == [0, 0]


def test_recording_round_trip_keeps_results_and_another_gpus_approximations(tmp_path: Path) -> None:
    """A pretended GPU whose ex2 and rcp are a few units off: equal with its values, unequal without, as it must be."""
    case, kernel = CASES["bf16-random"], kept("sm90_bf16")
    seen: dict[str, dict[int, int]] = {"ex2": {}, "rcp": {}}

    def other(name: str) -> approx.Function:
        def run(value: approx.F32) -> approx.F32:
            result = np.ascontiguousarray(approx.EXACT[name](value) * np.float32(1 + 2**-9), np.float32)
            lanes = np.ascontiguousarray(value, np.float32)
            seen[name].update(zip(lanes.view(np.uint32).tolist(), result.view(np.uint32).tolist(), strict=True))
            return result

        return run

    with approx.using({name: other(name) for name in seen}):
        results = interpreted(case, kernel)
    tables = {}
    for name, pairs in seen.items():
        table = np.array(sorted(pairs.items()), np.uint32)
        tables[name] = approx.Table(name, table[:, 0].copy(), table[:, 1].copy())
    drawn = {"bf16-random": case.drawn()}
    Recording({"cases": {}}, drawn, {"bf16-random": results}, tables).save(tmp_path / "recorded.safetensors")
    read = Recording.load(tmp_path / "recorded.safetensors")
    case = dataclasses.replace(case, seed=-1, stored=read.inputs["bf16-random"])  # not from a seed any more
    with approx.using({**read.tables}):
        assert differing(interpreted(case, kernel), read.results["bf16-random"]) == {}
    assert [table.missing for table in read.tables.values()] == [0, 0]
    wrong = differing(interpreted(case, kernel), read.results["bf16-random"])
    assert {name.rstrip("01") for name in wrong} >= {"fc1_out", "y"} and "pool0" not in wrong


def test_comparison_counts_every_unequal_byte_and_missing_buffers() -> None:
    a = {"y0": torch.tensor([1, 2, 3], dtype=torch.uint8), "pool0": torch.zeros(2, dtype=torch.uint8)}
    b = {"y0": torch.tensor([1, 9, 9], dtype=torch.uint8), "h0": torch.zeros(2, dtype=torch.uint8)}
    assert differing(a, a) == {}
    assert differing(a, b) == {"h0": -1, "pool0": -1, "y0": 2}


def test_rows_are_compared_by_route_wherever_they_lie_in_the_pool() -> None:
    """The same rows in another order of pool rows are the same result; a row of another route is not."""
    case = replace(CASES["bf16-random"], counts=(1,))
    spec = case.spec
    rows = torch.arange(4)
    pool = (rows[:, None] + torch.zeros(4, 2 * spec.hidden_size)).to(torch.uint8)
    hidden = (rows[:, None] + torch.zeros(4, 2 * spec.intermediate_size)).to(torch.uint8)
    meta = torch.tensor([[-1, -1], [0, 1], [0, 0], [-1, -1]], dtype=torch.int32)
    y = torch.zeros(1, spec.hidden_size, dtype=torch.bfloat16)

    def run(order: list[int]) -> dict[str, torch.Tensor]:
        space = {
            "pool": pool[order],
            "fc1_out": hidden[order],
            "pool_meta": meta[order].view(torch.uint8),
            "result_data": torch.zeros(2 * spec.data_row_bytes, dtype=torch.uint8),
        }
        return comparable(case, [y], lambda _, name: space[name].reshape(-1))

    assert differing(run([0, 1, 2, 3]), run([2, 0, 3, 1])) == {}
    right = run([0, 1, 2, 3])
    meta[1], meta[2] = meta[2].clone(), meta[1].clone()
    assert set(differing(run([0, 1, 2, 3]), right)) == {"pool0", "fc1_out0"}


@pytest.mark.parametrize("name", KEPT)
def test_kept_ptx_lies_beside_the_facts_that_name_its_object(name: str) -> None:
    kernel = kept(name)
    assert kernel.facts["key"].startswith("sm_90a-t8-")
    assert kernel.text.count(".entry kernel(") == 1
    assert kernel.facts["layer"] == KEPT[name].facts()["layer"]
    assert len(kernel.facts["arguments"]) == len(set(kernel.facts["arguments"]))


def test_kept_parameters_are_the_launch_arguments_with_their_tensor_maps() -> None:
    names = parameters(KEPT["sm90_nvfp4"])
    assert names[:7] == ["w1", "w2", "scales", "map0_pool", "map0_pool_rows", "map0_h", "map0_h_rows"]
    assert "pool_rows" not in names and "grid" not in names and names[-1] == "ctas_per_rank"
