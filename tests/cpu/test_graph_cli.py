# SPDX-License-Identifier: Apache-2.0
"""`check-graph` as a user types it: exit codes, formats, messages; and the pytest plugin in a project of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trtllm_megamoe.cli.main import main
from trtllm_megamoe.graph import RULES, check_capture, find_syncs

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
FAULTY = "def step(x: 'Tensor'):\n    if x.any():\n        return x.new_zeros(4)\n    return x\n"
STEP_MODULE = """
import torch
from trtllm_megamoe.graph import StepUnderTest

def make_clean(device):
    x, total = torch.linspace(-1, 1, 8, device=device), torch.zeros(8, device=device)

    def run():
        total.add_(x)
        return total * 2

    return StepUnderTest(run, {"x": x}, [total], name="clean")

def make_faulty():
    x = torch.linspace(-1, 1, 8)

    def run():
        return x * x.amax().item()

    return StepUnderTest(run, {"x": x}, name="faulty")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "clean.py").write_text("def step(x: 'Tensor'):\n    return x + 1\n")
    (tmp_path / "graph_cli_steps.py").write_text(STEP_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check-graph", *arguments])


def test_check_graph_exit_codes_follow_level(project: Path) -> None:
    assert _run("clean.py").exit_code == 0
    result = _run("faulty.py")
    assert result.exit_code == 1
    assert "faulty.py:2:8: error GR201 [branch]" in result.output and "warning GR401" in result.output
    (project / "warns.py").write_text("def step(x: 'Tensor'):\n    return x.new_zeros(4)\n")
    assert _run("warns.py").exit_code == 1
    assert _run("warns.py", "--fail-on", "error").exit_code == 0
    assert _run("clean.py", "faulty.py", "--hot", "clean:step").exit_code == 0


def test_check_graph_formats_and_output_file(project: Path) -> None:
    document = json.loads(_run("faulty.py", "--format", "json").stdout)
    assert [f["rule"] for f in document["findings"]] == ["GR201", "GR401"]
    assert _run("faulty.py", "--format", "sarif", "--output", "report.sarif").exit_code == 1
    sarif = json.loads((project / "report.sarif").read_text())
    assert [r["ruleId"] for r in sarif["runs"][0]["results"]] == ["GR201", "GR401"]


def test_check_graph_run_lists_syncs_then_captures(project: Path) -> None:
    clean = _run("--run", "graph_cli_steps:make_clean", "--device", "cpu", "--format", "json")
    assert clean.exit_code == 0, clean.output
    checks = json.loads(clean.stdout)["checks"]
    assert [c["check"] for c in checks] == ["syncs", "capture"] and all(c["passed"] for c in checks)
    faulty = _run("--run", "graph_cli_steps:make_faulty", "--device", "cpu")
    assert faulty.exit_code == 1
    assert faulty.output.count("graph_cli_steps.py:18 in run: return x * x.amax().item()") == 2
    both = _run("clean.py", "--run", "graph_cli_steps:make_clean", "--device", "cpu", "--format", "json")
    assert set(json.loads(both.stdout)) == {"schema", "scan", "run"}
    limited = _run("--run", "graph_cli_steps:make_clean", "--device", "cpu", "--max-allocations", "0")
    assert limited.exit_code == 1 and "1 tensors allocated inside the region, allowed 0" in limited.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to check"),
        (("missing.py",), "no file, folder or module"),
        (("clean.py", "--hot", "clean"), "malformed"),
        (("clean.py", "--hot", "clean:other"), "no function 'other'"),
        (("--run", "graph_cli_steps"), "malformed"),
        (("--run", "graph_cli_steps:missing"), "cannot load step"),
        (("--run", "graph_cli_steps:make_clean", "--device", "nonsense"), "is unknown"),
        (("--run", "graph_cli_steps:make_clean", "--format", "sarif"), "SARIF describes source files only"),
        (("--run", "graph_cli_steps:make_clean", "--device", "cpu", "--rounds", "1"), "rounds must be at least 2"),
        (("--explain", "GR999"), "allowed: all, GR001"),
        (("clean.py", "--output", "no/such/folder/x"), "cannot write"),
    ],
)
def test_check_graph_bad_input_has_one_message_and_exit_code_2(
    project: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert "Traceback" not in result.output


def test_check_graph_explains_every_rule(project: Path) -> None:
    output = _run("--explain", "all").output
    assert all(f"{rule.id} {rule.name} (" in output and rule.instead in output for rule in RULES.values())


def test_static_scan_needs_no_torch(project: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trtllm_megamoe.graph import scan\n"
        "import trtllm_megamoe.graph.pytest_plugin\n"
        "print([f.rule for f in scan(['faulty.py']).findings])"
    )
    command, env = [sys.executable, "-c", code], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True)
    assert done.stdout.strip() == "['GR201', 'GR401']"


# --- pytest plugin ----------------------------------------------------------------------------------------------------

INI = """
[pytest]
graph_safe_paths = {path}
graph_safe_hot = {hot}
graph_safe_level = {level}
"""


LOADED = (check_capture, find_syncs)  # imported here, so that inner runs do not import them again for themselves


def _pytest(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # an installed package would load the plugin a second time
        # by module, not by entry point: the package need not be installed
        return pytester.runpytest_inprocess(
            "-p", "no:graph_safe", "-p", "trtllm_megamoe.graph.pytest_plugin", *arguments
        )


@pytest.mark.parametrize(
    ("path", "hot", "level", "passes"),
    [
        ("clean.py", "", "warning", True),
        ("faulty.py", "", "error", False),
        ("faulty.py clean.py", "clean:step", "error", True),
        ("warns.py", "", "warning", False),
        ("warns.py", "", "error", True),
    ],
)
def test_plugin_flag_gates_the_configured_paths(
    pytester: pytest.Pytester, path: str, hot: str, level: str, passes: bool
) -> None:
    pytester.makepyfile(faulty=FAULTY, clean="def step(x: 'Tensor'): return x + 1")
    pytester.makepyfile(warns="def step(x: 'Tensor'): return x.new_zeros(4)", test_nothing="def test_one(): pass")
    pytester.makeini(INI.format(path=path, hot=hot, level=level))
    plain = _pytest(pytester)
    plain.assert_outcomes(passed=1)
    result = _pytest(pytester, "--graph-safe")
    result.assert_outcomes(passed=1 + passes, failed=1 - passes)
    if not passes:
        result.stdout.fnmatch_lines(["*graph readiness: open findings*"])


def test_plugin_flag_without_paths_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_nothing="def test_one(): pass")
    result = _pytest(pytester, "--graph-safe")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*needs graph_safe_paths*"])


def test_plugin_fixture_and_marker_fail_tests_that_synchronise(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        graph_cli_steps=STEP_MODULE,
        test_steps="""
            import pytest
            import torch
            from graph_cli_steps import make_clean, make_faulty

            X = torch.linspace(-1, 1, 8)

            @pytest.mark.graph_safe
            def test_marked_clean():
                assert (X + 1).shape == (8,)

            @pytest.mark.graph_safe
            def test_marked_faulty():
                assert (X + 1).sum() > 0

            def test_unmarked_may_read():
                assert (X + 1).sum() > 0

            def test_fixture_clean(graph_safe):
                assert graph_safe.syncs(make_clean("cpu")).passed
                assert graph_safe.capture(make_clean("cpu"), rounds=2).passed
                assert graph_safe.static("graph_cli_steps.py", hot=["graph_cli_steps:make_clean.run"]).files

            def test_fixture_faulty_syncs(graph_safe):
                graph_safe.syncs(make_faulty())

            def test_fixture_faulty_capture(graph_safe):
                graph_safe.capture(make_faulty())

            def test_fixture_faulty_static(graph_safe):
                graph_safe.function(make_faulty().run)
            """,
    )
    result = _pytest(pytester)
    result.assert_outcomes(passed=3, failed=4)
    for name in ("marked_faulty", "fixture_faulty_syncs", "fixture_faulty_capture", "fixture_faulty_static"):
        result.stdout.fnmatch_lines([f"*FAILED*test_{name}*"])
    result.stdout.fnmatch_lines(["*x.amax().item()*"])
