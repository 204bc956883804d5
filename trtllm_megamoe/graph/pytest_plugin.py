# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: gate every commit on graph readiness.

- `pytest --graph-safe` adds one item that scans the ini option `graph_safe_paths` and fails on open findings
  (`graph_safe_hot` names the hot functions, `graph_safe_level` is `error` or `warning`).
- The fixture `graph_safe` scans, watches and captures steps inside a test and fails it with the whole report.
- The marker `@pytest.mark.graph_safe` fails a test whose body makes the host wait for the device.

Loaded through the entry point `pytest11`; imports torch only when something is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from trtllm_megamoe.errors import MegaMoeVerificationError
from trtllm_megamoe.graph.static.findings import Level, ScanReport
from trtllm_megamoe.graph.static.render import as_text
from trtllm_megamoe.graph.static.scan import scan, scan_function

if TYPE_CHECKING:
    from trtllm_megamoe.graph.dynamic.capture import CaptureReport
    from trtllm_megamoe.graph.dynamic.syncs import SyncReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag and the ini options."""
    group = parser.getgroup("graph-safe", "CUDA-graph readiness")
    group.addoption("--graph-safe", action="store_true", help="Scan graph_safe_paths for what breaks graph capture.")
    parser.addini("graph_safe_paths", "Files, folders or modules to scan with --graph-safe.", type="args", default=[])
    parser.addini(
        "graph_safe_hot", "Hot functions, module:function; default: all of the files.", type="args", default=[]
    )
    parser.addini("graph_safe_level", "Least level that fails: error or warning.", default="error")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "graph_safe: fail when the test's body makes the host wait for the device")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the static gate."""
    if config.getoption("--graph-safe"):
        paths = config.getini("graph_safe_paths")
        if not paths:
            raise pytest.UsageError("--graph-safe needs graph_safe_paths in the ini file: the files to scan")
        items.append(StaticGate.from_parent(session, name="graph-safe"))


def _gate(report: ScanReport, level: Level) -> None:
    if report.at_least(level):
        raise MegaMoeVerificationError(f"graph readiness: open findings\n{as_text(report)}")


class StaticGate(pytest.Item):
    """The static scan of the configured paths, as one test."""

    def runtest(self) -> None:
        """Scan and fail on open findings."""
        report = scan(self.config.getini("graph_safe_paths"), self.config.getini("graph_safe_hot"))
        _gate(report, Level(self.config.getini("graph_safe_level")))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The report itself, without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """How pytest names the item."""
        return self.path, None, "graph-safe: static scan"


class GraphSafe:
    """The three methods, each failing the test with its report."""

    def static(self, *targets: str, hot: Sequence[str] = (), level: Level = Level.ERROR) -> ScanReport:
        """Scan files, folders or modules."""
        report = scan(targets, hot)
        _gate(report, level)
        return report

    def function(self, function: Callable[..., Any], *targets: str, level: Level = Level.ERROR) -> ScanReport:
        """Scan one function object and what it calls in its file and in `targets`."""
        report = scan_function(function, targets)
        _gate(report, level)
        return report

    def syncs(self, step: Any, **options: Any) -> SyncReport:
        """Run one step and list its syncs (`find_syncs`)."""
        from trtllm_megamoe.graph.dynamic.syncs import find_syncs

        report = find_syncs(step, **options)
        report.require()
        return report

    def capture(self, step: Any, **options: Any) -> CaptureReport:
        """Capture, replay and compare (`check_capture`)."""
        from trtllm_megamoe.graph.dynamic.capture import check_capture

        report = check_capture(step, **options)
        report.require()
        return report


@pytest.fixture
def graph_safe() -> GraphSafe:
    """Graph-readiness checks that fail the test with their report."""
    return GraphSafe()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Watch the body of a marked test."""
    if pyfuncitem.get_closest_marker("graph_safe") is None:
        return (yield)
    from trtllm_megamoe.graph.dynamic.syncs import watching

    with watching(pyfuncitem.name) as report:
        result = yield
    report().require()
    return result
