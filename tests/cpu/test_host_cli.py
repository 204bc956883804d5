# SPDX-License-Identifier: Apache-2.0
"""`doctor --host`, `explain --host`, `python -m trtllm_megamoe.host`, and the documents that quote them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cpu.test_host_compat import edit
from tests.helpers.fake_host.install import installed_host
from tests.helpers.fake_host.mutations import MUTATIONS
from trtllm_megamoe import envs
from trtllm_megamoe.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SERVING = ROOT / "docs" / "serving.md"


pytestmark = pytest.mark.usefixtures("cpu_host")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("era", ["C", "D2"])
def test_doctor_host_fitting_installation_exits_zero(era: str, tmp_path: Path) -> None:
    with installed_host(tmp_path, era) as base:
        text = invoke("doctor", "--host")
        report = json.loads(invoke("doctor", "--host", "--json").output)
    assert text.exit_code == 0 and "nothing differs" in text.output and base in text.output
    assert report["fits"] and report["differences"] == [] and report["era"] == era[0]


def test_doctor_host_lists_every_difference_and_exits_two(tmp_path: Path) -> None:
    renamed = edit("impl_contract", "    do_finalize: bool = True", "    finalize: bool = True")
    more = edit(
        "impl_base", "def run_moe(self, ctx: MoERunContext)", "def run_moe(self, ctx: MoERunContext, stream: int)"
    )
    with installed_host(tmp_path, "D2", renamed, more):
        result = invoke("doctor", "--host", "--json")
    differences = json.loads(result.output)["differences"]
    assert result.exit_code == 2
    assert [d["where"] for d in differences] == ["impl_contract.MoERunContext", "impl_base.MoEImplBase.run_moe"]
    assert "do_finalize" in differences[0]["expected"] and "stream" in differences[1]["expected"]


@pytest.mark.parametrize("name", MUTATIONS)
def test_doctor_host_says_what_serving_promises(name: str, tmp_path: Path) -> None:
    mutation, message = MUTATIONS[name]
    with installed_host(tmp_path, "D2", mutation):
        result = invoke("doctor", "--host", "--json")
        text = invoke("doctor", "--host").output
    assert result.exit_code == 2
    where, expected = message.split(": expected ")[0], message.split(": expected ")[-1].split(", found")[0]
    assert where in " ".join(text.split()) and expected in " ".join(text.split()), text
    assert message in " ".join(SERVING.read_text(encoding="utf-8").split())


def test_doctor_and_explain_host_without_a_host_say_so_and_exit_two() -> None:
    for command in ("doctor", "explain"):
        result = invoke(command, "--host")
        assert result.exit_code == 2 and "tensorrt_llm is not installed" in result.output, result.output


def test_explain_host_names_what_it_replaced(tmp_path: Path) -> None:
    with installed_host(tmp_path, "D2") as base:
        result = invoke("explain", "--host", "--json")
        report = json.loads(result.output)
        text = invoke("explain", "--host").output
    places = {entry["place"]: entry["now"] for entry in report["replaced"]}
    assert places[f"{base}.create_moe.MegaMoECuteDsl"] == "TrtllmMegamoeBackend"
    assert places["tensorrt_llm.executor.proxy.worker_main"] == "trtllm_megamoe.host.worker.worker_main"
    assert set(report["settings"]) == {v.name for v in envs.HOST_VARS}
    assert "--custom_module_dirs" in text


def test_module_directory_holds_nothing_that_could_shadow_a_module() -> None:
    """Its parent goes to the front of sys.path."""
    entry = importlib.import_module("trtllm_megamoe.host.__main__")
    directory = Path(CliRunner().invoke(entry.main, []).output.strip())
    names = {p.name for p in directory.parent.iterdir()} - {"__init__.py", "__pycache__"}
    assert names == {"trtllm_megamoe_plugin"} and (directory / "__init__.py").is_file()


def test_start_up_hook_is_installed_gated_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    entry = importlib.import_module("trtllm_megamoe.host.__main__")
    monkeypatch.setattr(entry, "hook_path", lambda: tmp_path / entry.HOOK_NAME)
    assert CliRunner().invoke(entry.main, ["--install-hook"]).exit_code == 0
    program = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('trtllm_megamoe.host' in sys.modules)"
    seen = []
    for value in ("0", "1"):
        env = {"TRTLLM_MEGAMOE_ENABLE": value, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
        seen.append(done.stdout.strip())
    assert seen == ["False", "True"]
    assert CliRunner().invoke(entry.main, ["--remove-hook"]).exit_code == 0
    assert not (tmp_path / entry.HOOK_NAME).exists()


def test_serving_document_has_the_codes_variables_and_legal_yaml(tmp_path: Path) -> None:
    import yaml

    text = SERVING.read_text(encoding="utf-8")
    assert envs.markdown_table() in text, "docs/serving.md: regenerate with trtllm_megamoe.envs.markdown_table()"
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 3
    with installed_host(tmp_path, "D2"):
        config = importlib.import_module("tensorrt_llm.llmapi.llm_args").MoeConfig
        for block in blocks:
            options = yaml.safe_load(block)
            assert config(**options["moe_config"]).backend in ("MEGAMOE_CUTEDSL", "CUTLASS")
            if options["moe_config"]["backend"] == "MEGAMOE_CUTEDSL":
                assert options["enable_attention_dp"] is True
                assert options["tensor_parallel_size"] == options["moe_expert_parallel_size"] == 8


def test_real_host_tests_run_against_the_stand_in_and_skip_with_a_reason_without_a_host(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    from tests.helpers.fake_host.generate import write_host

    host = write_host(tmp_path, "D2")
    results = []
    for path in (os.pathsep.join((str(host), str(ROOT))), str(ROOT)):
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "tests/host_real"]
        env = {**os.environ, "PYTHONPATH": path}
        results.append(subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240).stdout)
    assert "3 passed" in results[0] and "skipped" not in results[0], results[0]
    assert "3 skipped" in results[1] or "SKIPPED [3]" in results[1], results[1]
    assert "needs tensorrt_llm, which is not installed" in results[1]
