# SPDX-License-Identifier: Apache-2.0
"""Statements: flow of values through a function body, branches, and the findings that need a whole statement."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from trtllm_megamoe.graph.static import names
from trtllm_megamoe.graph.static import vocabulary as words
from trtllm_megamoe.graph.static.expressions import (
    assign,
    attribute_of,
    combine,
    evaluate,
    index,
    iterate,
    register_lambda,
    truth,
)
from trtllm_megamoe.graph.static.frame import Frame
from trtllm_megamoe.graph.static.sources import Class, dotted_name
from trtllm_megamoe.graph.static.values import HOST, UNKNOWN, Kind, Value, container_of, join

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def execute(frame: Frame) -> Value:
    """Interpret a frame's function body; the joined value of its returns."""
    if frame.function is None:
        raise ValueError("a module frame has no body to return from; use run_block")
    node = frame.function.node
    if isinstance(node, ast.Lambda):
        return evaluate(frame, node.body)
    run_block(frame, node.body)
    return join(frame.returns) if frame.returns else HOST


def run_block(frame: Frame, body: Iterable[ast.stmt]) -> None:
    """Interpret statements in order, as far as control can get."""
    for node in body:
        handler = _HANDLERS.get(type(node))
        if handler is not None:
            handler(frame, node)
        if isinstance(node, _LEAVES):
            return


def _expression(frame: Frame, node: ast.Expr) -> None:
    call = node.value
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "extend"):
        holder = call.func.value
        with frame.mute():
            grows = any(evaluate(frame, arg).holds_device for arg in call.args)
        if grows and isinstance(holder, ast.Attribute):
            frame.report("GR402", node, f"list of device tensors grows at every step: `{ast.unparse(call)[:60]}`")
        if isinstance(holder, ast.Name) and holder.id in frame.env:
            with frame.mute():
                values = [evaluate(frame, arg) for arg in call.args]
            held = frame.env[holder.id]
            if held.kind is Kind.CONTAINER and values:
                frame.env[holder.id] = Value(Kind.CONTAINER, element=join([*held.members(), *values]))
    evaluate(frame, call)


def _assign(frame: Frame, node: ast.Assign) -> None:
    for target in node.targets:
        _check_growth(frame, target, node.value)
    value = evaluate(frame, node.value)
    computed = not isinstance(node.value, ast.Name | ast.Attribute)
    for target in node.targets:
        _check_counter(frame, target, value, node, computed and _mentions(node.value, target))
        assign(frame, target, value)


def _annotated(frame: Frame, node: ast.AnnAssign) -> None:
    declared = names.from_annotation(frame.session, frame.module, node.annotation)
    value = evaluate(frame, node.value) if node.value is not None else UNKNOWN
    assign(
        frame,
        node.target,
        declared if value.kind in (Kind.UNKNOWN, Kind.CONTAINER) and declared.kind is not Kind.UNKNOWN else value,
    )


def _augmented(frame: Frame, node: ast.AugAssign) -> None:
    value = evaluate(frame, node.value)
    if isinstance(node.target, ast.Subscript):
        index(frame, node.target, written=value, augmented=True)
        return
    held = evaluate(frame, node.target)
    _check_counter(frame, node.target, value, node, True)
    if (
        isinstance(node.target, ast.Attribute)
        and held.kind is not Kind.DEVICE
        and value.kind is Kind.CONTAINER
        and value.holds_device
    ):
        frame.report("GR402", node, f"list of device tensors grows at every step: `{ast.unparse(node)[:60]}`")
    assign(frame, node.target, combine(held, value, bitwise=isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)))


def _check_growth(frame: Frame, target: ast.expr, value: ast.expr) -> None:
    """Of an attribute or an entry of one (`self.keys[i]`): what a local name holds is gone after the step."""
    kept = target
    while isinstance(kept, ast.Subscript):
        kept = kept.value
    if not (isinstance(kept, ast.Attribute) and isinstance(value, ast.Call)):
        return
    called = (dotted_name(value.func) or "").rsplit(".", 1)[-1]
    if called in words.GROWERS and any(_mentions(arg, target) for arg in value.args):
        frame.report("GR402", value, f"state grows at every step: `{ast.unparse(target)} = {called}(...)`")


def _mentions(node: ast.AST, target: ast.expr) -> bool:
    written = ast.unparse(target)
    kinds = ast.Attribute | ast.Name | ast.Subscript
    return any(isinstance(n, kinds) and ast.unparse(n) == written for n in ast.walk(node))


def _check_counter(frame: Frame, target: ast.expr, added: Value, node: ast.stmt, depends_on_itself: bool) -> None:
    if not depends_on_itself or added.holds_device or added.is_host_tensor:
        return
    if isinstance(target, ast.Name):
        if target.id in frame.global_names and added.kind is Kind.HOST:
            frame.report(
                "GR204", node, f"host counter `{target.id}` changes inside the step; a graph replays its captured value"
            )
        return
    owner = frame.function.owner if frame.function else None
    if owner is None or not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
        return
    imports_torch = any(name.split(".")[0] == "torch" for name in frame.module.imports.values())
    if not imports_torch and not any(value.on_device for value in frame.env.values()):
        return  # host bookkeeping without any tensor
    if frame.function is not None and "replay" in frame.function.mentions:
        return  # host code around graphs: host-known integers may choose which one runs
    with frame.mute():
        held = attribute_of(frame, evaluate(frame, target.value), target.attr)
    counts = held.kind is Kind.HOST or (held.kind is Kind.UNKNOWN and words.COUNTER_NAMES.search(target.attr))
    if counts and _is_read(owner, target, node):
        frame.report(
            "GR204",
            node,
            f"host state `{ast.unparse(target)}` changes inside the step; a graph replays its captured value",
        )


def _is_read(owner: Class, target: ast.Attribute, update: ast.stmt) -> bool:
    inside = set(ast.walk(update))
    for method in owner.methods.values():
        if words.SETUP_FUNCTIONS.match(method.name):
            continue
        for node in ast.walk(method.node):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == target.attr
                and isinstance(node.ctx, ast.Load)
                and node not in inside
            ):
                return True
    return False


def _if(frame: Frame, node: ast.If) -> None:
    guard = _capture_guard(node.test)
    if guard is None:
        truth(frame, node.test, "branch")
    _check_empty_shortcut(frame, node)
    before = dict(frame.env)
    frame.env = _narrow(before, _tested_classes(node.test, ast.And))
    with frame.mute(guard is False or _is_error_path(node.body)):
        run_block(frame, node.body)
    after_body = frame.env
    frame.env = _narrow(before, _tested_classes(ast.UnaryOp(ast.Not(), node.test), ast.And))
    with frame.mute(guard is True or _is_error_path(node.orelse)):
        run_block(frame, node.orelse)
    _merge(frame, [(after_body, node.body), (frame.env, node.orelse)])
    if not _leaves(node.body):  # what was proved about attributes holds inside the branches only
        frame.env = {name: value for name, value in frame.env.items() if "." not in name}
    if guard is True and _leaves(node.body):
        frame.muted += 1  # the rest of this function never runs under capture


def _merge(frame: Frame, branches: list[tuple[dict[str, Value], list[ast.stmt]]]) -> None:
    live = [env for env, body in branches if not _leaves(body)] or [env for env, _ in branches]
    merged: dict[str, Value] = {}
    for name in dict.fromkeys(name for env in live for name in env):
        merged[name] = join(env[name] for env in live if name in env)
    frame.env = merged


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], _LEAVES)


def _is_error_path(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _capture_guard(test: ast.expr) -> bool | None:
    """True for "capturing", False for "not capturing", None for any other condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _capture_guard(test.operand)
        return None if inner is None else not inner
    called = dotted_name(test.func) if isinstance(test, ast.Call) else None
    return True if called is not None and called.endswith("is_current_stream_capturing") else None


def _tested_classes(test: ast.expr, joined_by: type[ast.boolop], negated: bool = False) -> dict[str, str]:
    """Names that `isinstance` proves to be of some class when `test` is true: {name: classes as written}."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _tested_classes(test.operand, ast.Or if joined_by is ast.And else ast.And, not negated)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, joined_by):
        return {name: c for part in test.values for name, c in _tested_classes(part, joined_by, negated).items()}
    if negated or not isinstance(test, ast.Call) or dotted_name(test.func) != "isinstance" or len(test.args) != 2:
        return {}
    name = dotted_name(test.args[0])
    return {name: ast.unparse(test.args[1])} if name is not None else {}


def _narrow(env: dict[str, Value], classes: dict[str, str]) -> dict[str, Value]:
    narrowed = dict(env)
    for name, text in classes.items():
        if "ensor" not in text and "Parameter" not in text:
            sequence = "tuple" in text or "list" in text
            narrowed[name] = container_of(env.get(name, UNKNOWN)) if sequence and name in env else HOST
    return narrowed


def _check_empty_shortcut(frame: Frame, node: ast.If) -> None:
    if (
        frame.function is None
        or not node.body
        or not isinstance(node.body[-1], ast.Return)
        or not _tests_empty(node.test)
    ):
        return
    for call in ast.walk(frame.function.node):
        if isinstance(call, ast.Call) and call.lineno > node.lineno:
            name = (dotted_name(call.func) or "").rsplit(".", 1)[-1]
            if words.COLLECTIVES.match(name):
                frame.report("GR205", node, f"a rank without tokens returns before `{name}`, which its peers wait for")
                return


def _tests_empty(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_count(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        bound, op = test.comparators[0].value, test.ops[0]
        empty = (bound == 0 and isinstance(op, ast.Eq | ast.LtE)) or (bound == 1 and isinstance(op, ast.Lt))
        return empty and _is_count(test.left)
    return False


def _is_count(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.endswith((".shape[0]", ".size(0)", ".numel()")) or text.startswith("len(") or "num_tokens" in text


def _loop(frame: Frame, body: list[ast.stmt], enter: Callable[[], None]) -> None:
    before = dict(frame.env)
    enter()
    with frame.mute():
        run_block(frame, body)
    _merge(frame, [(before, []), (frame.env, [])])
    enter()
    run_block(frame, body)
    _merge(frame, [(before, []), (frame.env, [])])


def _for(frame: Frame, node: ast.For | ast.AsyncFor) -> None:
    _loop(frame, node.body, lambda: assign(frame, node.target, iterate(frame, node.iter)))
    run_block(frame, node.orelse)


def _while(frame: Frame, node: ast.While) -> None:
    _loop(frame, node.body, lambda: truth(frame, node.test, "while loop"))
    run_block(frame, node.orelse)


def _with(frame: Frame, node: ast.With | ast.AsyncWith) -> None:
    for item in node.items:
        value = evaluate(frame, item.context_expr)
        if item.optional_vars is not None:
            assign(frame, item.optional_vars, value)
    run_block(frame, node.body)


def _try(frame: Frame, node: ast.Try) -> None:
    run_block(frame, node.body)
    after_body = dict(frame.env)
    ends = [(after_body, node.body)]
    for handler in node.handlers:
        frame.env = dict(after_body)
        if handler.name:
            frame.env[handler.name] = HOST
        with frame.mute():  # a step that gets here has already failed
            run_block(frame, handler.body)
        ends.append((frame.env, handler.body))
    _merge(frame, ends)
    run_block(frame, node.orelse)
    run_block(frame, node.finalbody)


def _return(frame: Frame, node: ast.Return) -> None:
    frame.returns.append(evaluate(frame, node.value))


def _assert(frame: Frame, node: ast.Assert) -> None:
    truth(frame, node.test, "assert", "GR704")


def _match(frame: Frame, node: ast.Match) -> None:
    subject = evaluate(frame, node.subject)
    catches_all = (
        len(node.cases) == 1
        and isinstance(node.cases[0].pattern, ast.MatchAs)
        and node.cases[0].pattern.pattern is None
    )
    if subject.on_device and not catches_all:
        frame.report("GR201", node.subject, f"match on a device value: `{ast.unparse(node.subject)[:60]}`")
    before, ends = dict(frame.env), []
    for case in node.cases:
        frame.env = dict(before)
        for pattern in ast.walk(case.pattern):
            if isinstance(pattern, ast.MatchAs) and pattern.name:
                frame.env[pattern.name] = subject if pattern is case.pattern else UNKNOWN
        if case.guard is not None:
            truth(frame, case.guard, "case guard")
        run_block(frame, case.body)
        ends.append((frame.env, case.body))
    _merge(frame, [*ends, (before, [])])


def _function(frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        value = evaluate(frame, target)
        if value.kind is Kind.NAME and value.target in words.COMPILERS and frame.function is not None:
            frame.report("GR404", decorator, f"compiles a function inside the step: `@{ast.unparse(target)}`")
    frame.env[node.name] = register_lambda(frame, node, node.name)


def _global(frame: Frame, node: ast.Global | ast.Nonlocal) -> None:
    frame.global_names.update(node.names)


_HANDLERS: dict[type[ast.stmt], Callable[[Frame, Any], None]] = {
    ast.Expr: _expression, ast.Assign: _assign, ast.AnnAssign: _annotated, ast.AugAssign: _augmented, ast.If: _if,
    ast.For: _for, ast.AsyncFor: _for, ast.While: _while, ast.With: _with, ast.AsyncWith: _with, ast.Try: _try,
    ast.Return: _return, ast.Assert: _assert, ast.Match: _match, ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function, ast.Global: _global, ast.Nonlocal: _global,
}  # fmt: skip
