# SPDX-License-Identifier: Apache-2.0
"""Entry point of the static method: which functions are hot, in what order things are inferred, what is reported.

Called by the CLI, the pytest plugin and users. Reads files, imports nothing of them.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.graph.static import names
from trtllm_megamoe.graph.static import vocabulary as words
from trtllm_megamoe.graph.static.findings import Finding, ScanReport
from trtllm_megamoe.graph.static.frame import Frame, Session
from trtllm_megamoe.graph.static.rules import RULES
from trtllm_megamoe.graph.static.sources import LOCALS, Class, Function, Module, Project, resolve_target
from trtllm_megamoe.graph.static.statements import execute, run_block
from trtllm_megamoe.graph.static.values import Kind

_CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
_TOP_LEVEL = (ast.Assign, ast.AnnAssign, ast.If, ast.Try, ast.With)


def scan(targets: Sequence[str], hot: Sequence[str] = (), disabled: Iterable[str] = ()) -> ScanReport:
    """Scan files, folders or modules for what stalls or breaks CUDA-graph capture.

    Args:
        targets: Files, folders or dotted module names. Calls are followed inside these files only.
        hot: `module:function` or `module:Class.method` specs to start from. Without any, every function of the files is
            hot except those whose names say that they prepare a step (`__init__`, `load_weights`, `warm_up`, ...).
        disabled: Rule ids that report nothing.

    Raises:
        MegaMoeConfigError: a target or hot function does not exist, or a file is not valid Python.

    Source: R51 (1).
    """
    project = Project()
    if not targets and not hot:
        raise MegaMoeConfigError("nothing to scan: give files, folders or module names, or --hot module:function")
    for target in targets:
        for path in resolve_target(target):
            project.add_file(path)
    roots = [_hot_function(project, spec) for spec in hot]
    return _scan(project, roots or _default_roots(project), frozenset(disabled))


def scan_source(text: str, name: str = "snippet", hot: Sequence[str] = (), disabled: Iterable[str] = ()) -> ScanReport:
    """Scan source text given as a string; `hot` holds function names of that text."""
    project = Project()
    module = project.add_source(text, f"{name}.py", name)
    roots = [_function_of(module, function) for function in hot]
    return _scan(project, roots or _default_roots(project), frozenset(disabled))


def scan_function(function: Callable[..., Any], targets: Sequence[str] = ()) -> ScanReport:
    """Scan one Python function object (and what it calls in its own file and in `targets`)."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    path = inspect.getsourcefile(plain)
    if path is None:
        raise MegaMoeConfigError(f"no source file for {function!r}; give a function defined in a Python file")
    project = Project()
    module = project.add_file(Path(path))
    for target in targets:
        for extra in resolve_target(target):
            project.add_file(extra)
    return _scan(project, [_function_of(module, plain.__qualname__)], frozenset())


def _scan(project: Project, roots: list[Function], disabled: frozenset[str]) -> ScanReport:
    session = Session(project, execute, disabled)
    _infer(session)
    for function in roots:
        _enter(session, function)
    _check_comments(session)
    return ScanReport(
        findings=tuple(sorted(session.open)),
        allowed=tuple(sorted(session.allowed)),
        files=tuple(m.path for m in project.modules.values()),
        functions=tuple(session.functions),
    )


def _enter(session: Session, function: Function) -> None:
    if function.parent is not None:  # a nested function needs the names of the function around it
        quiet = Frame(session, function.module, None, {}, muted=1)
        outer = function.parent
        session.call(quiet, outer, lambda f: names.bind(session, f, None, (), {}), (), {})
    session.call(None, function, lambda f: names.bind(session, f, None, (), {}), (), {})


def _infer(session: Session) -> None:
    """Learn module globals, then what every `self.x` holds, without reporting."""
    for module in session.project.modules.values():
        frame = Frame(session, module, None, module.globals, muted=1)
        run_block(frame, [node for node in module.tree.body if isinstance(node, _TOP_LEVEL)])
        module.globals = frame.env
    for class_ in session.project.classes.values():
        _infer_fields(session, class_)
    for constructors in (True, False):
        for class_ in session.project.classes.values():
            quiet = Frame(session, class_.module, None, {}, muted=1)
            for method in class_.methods.values():
                if constructors == (method.name in _CONSTRUCTORS):
                    session.call(quiet, method, lambda f: names.bind(session, f, None, (), {}), (), {})
        session.forget()


def _infer_fields(session: Session, class_: Class) -> None:
    for node in class_.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared = names.from_annotation(session, class_.module, node.annotation)
            habit = names.by_habit(node.target.id)
            known = habit if habit.kind is not Kind.UNKNOWN else declared
            if known.kind is not Kind.UNKNOWN:
                class_.attributes[node.target.id] = known


def _default_roots(project: Project) -> list[Function]:
    roots = []
    for function in list(project.functions.values()):
        hot = not words.SETUP_FUNCTIONS.match(function.name)
        inside_hot = function.parent is not None and not words.SETUP_FUNCTIONS.match(function.parent.name)
        if hot and not inside_hot and not _only_prepares(project, function):
            roots.append(function)
    return roots


def _only_prepares(project: Project, function: Function) -> bool:
    """Whether the files use this function in constructors only, or its result is cached for ever."""
    if function.decorators & {"lru_cache", "cache"}:
        return True
    users = [f for f in project.functions.values() if f is not function and function.name in f.mentions]
    return bool(users) and all(user.name in _CONSTRUCTORS for user in users)


def _hot_function(project: Project, spec: str) -> Function:
    place, separator, name = spec.partition(":")
    if not separator or not place or not name:
        raise MegaMoeConfigError(f"hot function {spec!r} is malformed; write module:function or module:Class.method")
    matches = [m for m in project.modules.values() if place in (m.name, m.path) or m.name.endswith(f".{place}")]
    if not matches:
        matches = [project.add_file(path) for path in resolve_target(place)[:1]]
    if len(matches) > 1:
        raise MegaMoeConfigError(
            f"module {place!r} of {spec!r} is ambiguous: {', '.join(m.name for m in matches)}; write it in full"
        )
    return _function_of(matches[0], name)


def _function_of(module: Module, name: str) -> Function:
    for qualname, function in module.functions.items():
        if name in (qualname, qualname.replace(f".{LOCALS}", "")):
            return function
    if name in module.classes:
        for entry in ("forward", "__call__"):
            if entry in module.classes[name].methods:
                return module.classes[name].methods[entry]
    near = difflib.get_close_matches(name, module.functions, n=3, cutoff=0.4)
    hint = (
        f"; did you mean {', '.join(near)}?"
        if near
        else f"; it defines {', '.join(list(module.functions)[:8]) or 'none'}"
    )
    raise MegaMoeConfigError(f"no function {name!r} in {module.path}{hint}")


def _check_comments(session: Session) -> None:
    for module in session.project.modules.values():
        spans = [f.node for f in module.functions.values() if f"{f.module.name}:{f.qualname}" in session.functions]
        for comment in module.allowances:
            unknown = sorted(comment.rules - RULES.keys())
            if not comment.reason:
                _record(session, module, comment.line, "GR001", "graph-ok comment without a reason allows nothing")
            elif unknown:
                _record(session, module, comment.line, "GR001", f"graph-ok names unknown rules: {', '.join(unknown)}")
            elif not comment.used and any(n.lineno <= comment.line <= (n.end_lineno or n.lineno) for n in spans):
                _record(session, module, comment.line, "GR002", "graph-ok comment allows nothing here any more")


def _record(session: Session, module: Module, line: int, rule: str, message: str) -> None:
    if rule not in session.disabled:
        finding = Finding(module.path, line, 1, rule, message, "<comment>")
        session.open.setdefault(finding, finding)
