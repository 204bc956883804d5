# SPDX-License-Identifier: Apache-2.0
"""State of the abstract interpretation: one Session a scan, one Frame a function call. Collects findings.

The modules that interpret (statements, expressions, calls) work on these; none of them keeps state of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from trtllm_megamoe.graph.static.findings import Finding
from trtllm_megamoe.graph.static.sources import Class, Function, Module, Project
from trtllm_megamoe.graph.static.values import UNKNOWN, Value, join

Execute = Callable[["Frame"], Value]
_DEPTH_LIMIT = 48


class Frame:
    """One activation of a function (or of a module's top level) in the abstract interpretation.

    `muted` counts reasons not to report (host-only setup, error paths, code that never runs under capture);
    `read_rule` and `format_rule` name the more specific rule that applies to reads inside an index or a log call.
    """

    def __init__(
        self, session: Session, module: Module, function: Function | None, env: dict[str, Value], muted: int
    ) -> None:
        self.session = session
        self.module = module
        self.function = function
        self.env = env
        self.muted = muted
        self.read_rule = "GR101"
        self.format_rule = "GR702"
        self.returns: list[Value] = []
        self.global_names: set[str] = set()

    def report(self, rule: str, node: ast.AST, message: str) -> None:
        """Record a finding at `node` unless this code is muted."""
        if not self.muted:
            self.session.record(self, rule, node, message)

    @contextmanager
    def mute(self, on: bool = True) -> Iterator[None]:
        """Report nothing inside."""
        self.muted += on
        try:
            yield
        finally:
            self.muted -= on

    @contextmanager
    def reading_as(self, read_rule: str | None = None, format_rule: str | None = None) -> Iterator[None]:
        """Name reads (or formatting) inside after a more specific rule."""
        saved = self.read_rule, self.format_rule
        self.read_rule, self.format_rule = read_rule or saved[0], format_rule or saved[1]
        try:
            yield
        finally:
            self.read_rule, self.format_rule = saved


class Session:
    """One scan: the project, the findings so far, and the calls already interpreted.

    Args:
        project: The parsed files.
        execute: Interprets a frame's function body and returns the value it returns.
        disabled: Rules that report nothing (used to prove that each rule is needed).
    """

    def __init__(self, project: Project, execute: Execute, disabled: frozenset[str] = frozenset()) -> None:
        self.project = project
        self.execute = execute
        self.disabled = disabled
        self.open: dict[Finding, Finding] = {}
        self.allowed: dict[Finding, Finding] = {}
        self.functions: dict[str, None] = {}
        self._memo: dict[object, Value] = {}
        self._chain: list[Function] = []

    def record(self, frame: Frame, rule: str, node: ast.AST, message: str) -> None:
        """Store a finding, as allowed when a comment with a reason covers it."""
        if rule in self.disabled:
            return
        line = getattr(node, "lineno", 1)
        finding = Finding(
            path=frame.module.path,
            line=line,
            column=getattr(node, "col_offset", 0) + 1,
            rule=rule,
            message=message,
            function=frame.function.qualname if frame.function else "<module>",
            hot_path=tuple(f"{f.module.name}:{f.qualname}" for f in self._chain),
        )
        allowance = frame.module.allowance_for(range(line, getattr(node, "end_lineno", line) + 1), rule)
        if allowance is None:
            self.open.setdefault(finding, finding)
            return
        allowance.used = True
        allowed = Finding(
            finding.path,
            finding.line,
            finding.column,
            rule,
            message,
            finding.function,
            finding.hot_path,
            allowance.reason,
        )
        self.allowed.setdefault(allowed, allowed)

    def allows_function(self, function: Function) -> bool:
        """Whether a comment on the `def` line takes the whole function out of the scan."""
        if isinstance(function.node, ast.Lambda):
            return False
        last = function.node.body[0].lineno - 1
        for allowance in function.module.allowances:
            on_def = (
                function.node.lineno <= allowance.line <= max(last, function.node.lineno) and not allowance.standalone
            )
            if on_def and allowance.reason and not allowance.rules:
                allowance.used = True
                return True
        return False

    def call(
        self,
        frame: Frame | None,
        function: Function,
        bind: Callable[[Function], dict[str, Value]],
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
    ) -> Value:
        """Interpret a call of a scanned function once for each distinct set of argument values."""
        muted = frame.muted if frame is not None else 0
        if self.allows_function(function):
            return UNKNOWN
        key = (function.key, tuple(arguments), tuple(sorted(keywords.items(), key=lambda kv: kv[0])), bool(muted))
        if key in self._memo:
            return self._memo[key]
        if len(self._chain) >= _DEPTH_LIMIT:
            return UNKNOWN
        self._memo[key] = UNKNOWN  # what a recursive call sees
        self._chain.append(function)
        if not muted:
            self.functions[f"{function.module.name}:{function.qualname}"] = None
        try:
            result = self.execute(Frame(self, function.module, function, bind(function), muted))
        finally:
            self._chain.pop()
        self._memo[key] = result
        return result

    def forget(self) -> None:
        """Drop results of earlier calls: they were computed before all attributes were known."""
        self._memo.clear()

    def attribute(self, class_: Class, name: str) -> Value | None:
        """What `self.name` holds according to the class and its bases; None when nothing is known."""
        found = [c.attributes[name] for c in self.project.bases(class_) if name in c.attributes]
        return join(found) if found else None
