# SPDX-License-Identifier: Apache-2.0
"""The whole life in processes: YAML -> arguments -> worker processes -> resolve -> construct -> load -> warm-up ->
uneven and empty chunks over MPI ranks on the CPU engine -> partial reload -> shutdown. And the ways it must fail.

Every job is bounded by WATCHDOG_S, which kills and fails; ranks bound their own waits much earlier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.helpers.fake_host.generate import Deviation, Plan, write_host
from tests.helpers.fake_host.mutations import MUTATIONS
from tests.helpers.golden import DATA, GoldenLayer, golden_layer
from tests.helpers.host_layer import REL_L2, oracle_of
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.host.__main__ import HOOK_LINE, module_directory
from trtllm_megamoe.reference.metrics import rel_l2

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 400.0  # a busy machine starts eight Python processes slowly
pytestmark = pytest.mark.timeout(WATCHDOG_S + 100)

MAX_TOKENS, CHUNK = 6, 4


@dataclass(frozen=True)
class Job:
    """What a run left behind: per rank its outputs and report, or its error."""

    out: Path
    exit_code: int
    stderr: str

    def errors(self, ranks: int) -> list[str]:
        paths = [self.out / f"error{rank}.txt" for rank in range(ranks)]
        return [path.read_text() if path.exists() else "" for path in paths]

    def outputs(self, rank: int) -> dict[str, torch.Tensor]:
        assert self.errors(rank + 1)[rank] == "", (self.out / f"trace{rank}.txt").read_text()
        return load_file(self.out / f"rank{rank}.safetensors")


def serve(
    tmp_path: Path,
    era: str,
    ranks: int,
    *,
    checkpoint: str = "modelopt_nvfp4_qwen3_moe",
    layers: Sequence[int] = (0,),
    steps: Sequence[Sequence[int]] = (),
    reload: bool = False,
    deviations: Sequence[Deviation] = (),
    options: dict[str, object] | None = None,
    env: dict[str, str] | None = None,
    with_directory: bool = True,
) -> Job:
    """Run `trtllm-serve` of the stand-in with the plug-in's directory (or without), as docs/serving.md says."""
    host = write_host(tmp_path / "host", era, deviations)
    out = tmp_path / "out"
    out.mkdir()
    yaml_options = {
        "tensor_parallel_size": ranks,
        "moe_expert_parallel_size": ranks,
        "enable_attention_dp": True,
        "max_num_tokens": MAX_TOKENS,
        "moe_config": {"backend": "MEGAMOE_CUTEDSL", "max_num_tokens": CHUNK},
        **(options or {}),
    }
    (out / "options.yaml").write_text(yaml.safe_dump(yaml_options))
    golden = str(DATA / checkpoint / "golden.safetensors")
    scenario = {"layers": list(layers), "golden": golden, "steps": list(steps), "padding": 2, "reload": reload}
    (out / "scenario.json").write_text(json.dumps(scenario))
    variables = {name: value for name, value in os.environ.items() if "MEGAMOE" not in name}
    variables |= {"PYTHONPATH": os.pathsep.join((str(host), str(ROOT))), "OMP_NUM_THREADS": "1"}
    variables |= {"TRTLLM_MEGAMOE_ENGINE": "cpu", "TRTLLM_MEGAMOE_TIMEOUT_S": "120", **(env or {})}
    command = [sys.executable, "-m", "tensorrt_llm.commands.serve", str(DATA / checkpoint)]
    command += ["--extra_llm_api_options", str(out / "options.yaml")]
    command += ["--custom_module_dirs", str(module_directory())] if with_directory else []
    command += ["--scenario", str(out / "scenario.json"), "--out", str(out), "--timeout_s", str(WATCHDOG_S - 30)]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=WATCHDOG_S)
    return Job(out, done.returncode, done.stderr)


def expected_rows(golden: GoldenLayer, counts: Sequence[int], **options: object) -> torch.Tensor:
    index = torch.arange(sum(counts)) % golden.x.shape[0]
    picked = GoldenLayer(
        golden.tensors, golden.x[index], golden.topk_ids[index], golden.topk_weights[index], golden.out_w4a16[index]
    )
    return oracle_of(picked, slice(0, sum(counts)), **options)


UNEVEN = [[2, 1, 0, 0, 6, 1, 1, 3], [0] * 8, [0, 0, 0, 5, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("era", "checkpoint", "layers"),
    [("C", "modelopt_nvfp4_qwen3_moe", (0, 1)), ("D2", "modelopt_nvfp4_deepseek_v3", (1,))],
)
def test_life_over_eight_ranks_equals_the_oracle(
    era: str, checkpoint: str, layers: Sequence[int], tmp_path: Path
) -> None:
    """The wire format is set under its short name in the parent only, which no worker inherits: aliases carry it."""
    job = serve(
        tmp_path, era, 8, checkpoint=checkpoint, layers=layers, steps=UNEVEN, reload=True,
        options={"draft_layer_quant": None},
        env={"MEGAMOE_COMBINE_FORMAT": "32e4m3xe8m0", "TRTLLM_MEGAMOE_LOG": "INFO"},
    )  # fmt: skip
    assert job.exit_code == 0, job.stderr
    per_rank = [job.outputs(rank) for rank in range(8)]
    for layer in layers:
        golden = golden_layer(checkpoint, layer)
        for index, counts in enumerate(UNEVEN):
            got = torch.cat([outputs[f"step{index}.{layer}"] for outputs in per_rank])
            assert [outputs[f"step{index}.{layer}"].shape[0] for outputs in per_rank] == counts
            if sum(counts):
                assert rel_l2(got, expected_rows(golden, counts, combine_format=CombineFormat.FP8)) < REL_L2
        for outputs in per_rank:  # the same weights again, in another order: the same bits
            assert torch.equal(outputs[f"reloaded.{layer}"], outputs[f"step0.{layer}"])
    for rank in range(8):
        report = json.loads((job.out / f"report{rank}.json").read_text())
        assert set(report["classes"].values()) == {"TrtllmMegamoeBackend"}
        assert report["draft"] == "CutlassFusedMoE"  # the bf16 draft layer beside the NVFP4 ones
    for rank in range(8):  # as docs/serving.md says
        assert f"rank {rank}: layer {layers[0]}: TrtllmMegamoeBackend runs here, engine cpu" in job.stderr
    assert "MEGAMOE_CUTEDSL was asked for and refused" in job.stderr and "CutlassFusedMoE runs instead" in job.stderr


def test_experts_that_migrate_between_ranks_equal_the_oracle(tmp_path: Path) -> None:
    """Dynamic EPLB from YAML on: every step moves every expert, also to the other rank, whose host memory has it."""
    steps = [[2, 1], [0, 6], [0, 0], [3, 3], [5, 0]]
    options = {
        "moe_config": {
            "backend": "MEGAMOE_CUTEDSL",
            "max_num_tokens": CHUNK,
            "load_balancer": {"num_slots": 24, "layer_updates_per_iter": 1},
        }
    }
    job = serve(tmp_path, "D2", 2, steps=steps, options=options)
    assert job.exit_code == 0, job.stderr
    golden, per_rank = golden_layer("modelopt_nvfp4_qwen3_moe", 0), [job.outputs(rank) for rank in range(2)]
    for index, counts in enumerate(steps):
        got = torch.cat([outputs[f"step{index}.0"] for outputs in per_rank])
        assert [outputs[f"step{index}.0"].shape[0] for outputs in per_rank] == counts
        if sum(counts):
            assert rel_l2(got, expected_rows(golden, counts)) < REL_L2


def test_start_up_hook_alone_brings_the_plug_in_into_a_rank(tmp_path: Path) -> None:
    """For ranks that somebody else starts: the parent knows nothing, the worker's environment has the switch."""

    def started_elsewhere(plan: Plan) -> None:
        marker = '        environment["PYTHONPATH"] = '
        plan.edit(
            "tensorrt_llm.llmapi.mpi_session", marker, f'        environment["TRTLLM_MEGAMOE_ENABLE"] = "1"\n{marker}'
        )
        # stands for site-packages, where --install-hook writes the same line
        plan.files["hooks/trtllm_megamoe_host.pth"] = HOOK_LINE
        plan.files["sitecustomize.py"] = (
            "import pathlib, site\nsite.addsitedir(str(pathlib.Path(__file__).with_name('hooks')))\n"
        )

    job = serve(tmp_path, "C", 1, steps=[[3]], deviations=[started_elsewhere], with_directory=False)
    outputs = job.outputs(0)
    report = json.loads((job.out / "report0.json").read_text())
    assert report["classes"] == {"0": "TrtllmMegamoeBackend"}
    assert rel_l2(outputs["step0.0"], expected_rows(golden_layer("modelopt_nvfp4_qwen3_moe", 0), [3])) < REL_L2


def on_rank_one(text: str) -> Deviation:
    """Run a line in the second worker before anything else."""

    def deviate(plan: Plan) -> None:
        plan.edit(
            "tensorrt_llm.executor.spawned",
            'if __name__ == "__main__":\n',
            'if __name__ == "__main__":\n    import os\n    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":\n'
            f"        {text}\n",
        )

    return deviate


def test_rank_that_resolves_differently_stops_all_ranks_with_one_text(tmp_path: Path) -> None:
    """Rank 1 was started with another mode and tactic table, and its machine looks different to the resolver."""
    different = on_rank_one(
        "os.environ['TRTLLM_MEGAMOE_ACTIVATIONS'] = 'bf16'; os.environ['TLLM_STANDIN_QUANT'] = 'x'; "
        "os.environ['TRTLLM_MEGAMOE_TACTICS'] = 'nowhere.json'"
    )

    def other_quantisation(plan: Plan) -> None:
        plan.edit("tensorrt_llm._standin.selection", "import re\n", "import os\nimport re\n")
        plan.edit(
            "tensorrt_llm._standin.selection",
            '        "quant": canonical_quant(quant_config.quant_algo),',
            '        "quant": os.environ.get("TLLM_STANDIN_QUANT") or canonical_quant(quant_config.quant_algo),',
        )

    job = serve(tmp_path, "D2", 2, steps=[[1, 1]], deviations=[different, other_quantisation])
    errors = job.errors(2)
    assert errors[0] == errors[1] and errors[0].startswith("MegaMoeRankDivergenceError: ranks disagree"), errors
    assert "activations: 'auto' on ranks [0], 'bf16' on ranks [1]" in errors[0]
    assert "CutlassFusedMoE (quantisation: experts are x" in errors[0]
    assert "tactic table: 'none' on ranks [0], 'unreadable (No such file or directory)' on ranks [1]" in errors[0]


def test_rank_without_the_plug_in_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    """Rank 1 runs the host's own entry: it never joins the handshake, and the others say so instead of hanging."""
    text = (
        "import tensorrt_llm.executor.worker as w, trtllm_megamoe.host.worker as ours; ours.worker_main = w.worker_main"
    )
    disable = on_rank_one(
        f"{text}; import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'PostImport' not in repr(f)]"
    )
    job = serve(tmp_path, "C", 2, steps=[[1, 1]], deviations=[disable], env={"TRTLLM_MEGAMOE_TIMEOUT_S": "5"})
    errors = job.errors(2)
    assert (
        errors[0].startswith("MegaMoeTimeoutError: rank 0: waited 5 s")
        and "the plug-in is not active there" in errors[0]
    )


def test_hosts_that_differ_end_the_job_before_a_model_is_built(tmp_path: Path) -> None:
    """Moved module, missing class, renamed argument: three jobs at a time, since most of each is importing."""

    def run(name: str) -> Job:
        directory = tmp_path / name.replace(" ", "_")
        directory.mkdir()
        return serve(directory, "D2", 1, steps=[[1]], deviations=[MUTATIONS[name][0]])

    with ThreadPoolExecutor(len(MUTATIONS)) as pool:
        jobs = dict(zip(MUTATIONS, pool.map(run, MUTATIONS), strict=True))
    for name, job in jobs.items():
        assert job.exit_code != 0 and MUTATIONS[name][1] in job.stderr, (name, job.stderr)
        assert "MegaMoeUnavailableError" in job.stderr and not list(job.out.glob("rank*.safetensors"))
