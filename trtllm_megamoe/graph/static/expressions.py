# SPDX-License-Identifier: Apache-2.0
"""Expressions: where each one's value lives, and the findings that need no call to happen."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trtllm_megamoe.graph.static import calls, names
from trtllm_megamoe.graph.static import vocabulary as words
from trtllm_megamoe.graph.static.calls import Arguments, Receiver
from trtllm_megamoe.graph.static.frame import Frame
from trtllm_megamoe.graph.static.sources import LOCALS, Class, Function, Module, dotted_name
from trtllm_megamoe.graph.static.values import (
    DEVICE_BOOL,
    HOST,
    HOST_NONE,
    PAGEABLE,
    UNKNOWN,
    Dtype,
    Kind,
    Value,
    container,
    container_of,
    join,
)

_BUILTINS = frozenset(dir(builtins))


def evaluate(frame: Frame, node: ast.expr | None) -> Value:
    """Abstract value of an expression; reports what the expression does on the way."""
    if node is None:
        return HOST_NONE
    handler = _HANDLERS.get(type(node))
    if handler is not None:
        return handler(frame, node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            evaluate(frame, child)
    return UNKNOWN


def truth(frame: Frame, node: ast.expr, place: str, rule: str = "GR201") -> None:
    """Evaluate a condition; report every part whose truth value the host would have to read from the device."""
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            truth(frame, part, place, rule)
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        truth(frame, node.operand, place, rule)
        return
    value = evaluate(frame, node)
    if value.on_device:
        frame.report(rule, node, f"{place} depends on a device value: `{_text(node)}`")


def iterate(frame: Frame, node: ast.expr) -> Value:
    """Element of a loop over an expression; looping over a device tensor is a finding."""
    value = evaluate(frame, node)
    if value.on_device:
        frame.report("GR202", node, f"Python loop over a device tensor: `{_text(node)}`")
    return value.iterated()


def index(frame: Frame, node: ast.Subscript, written: Value | None = None, augmented: bool = False) -> Value:
    """Value of `base[...]`; with `written`, the store of that value into it."""
    base = evaluate(frame, node.value)
    elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    with frame.reading_as(read_rule="GR706"):
        for element in elements:
            if isinstance(element, ast.Slice):
                for bound in (element.lower, element.upper, element.step):
                    if bound is not None and evaluate(frame, bound).on_device:
                        frame.report("GR303", bound, f"slice bound `{_text(bound)}` is a device value")
                continue
            _index_element(frame, base, element, written, augmented)
    if written is not None and base.on_device and written.kind is Kind.PAGEABLE:
        frame.report("GR104", node, f"pageable host tensor written into device tensor `{_text(node.value)}`")
    return _element_of(base, node)


def _index_element(frame: Frame, base: Value, element: ast.expr, written: Value | None, augmented: bool) -> None:
    value = evaluate(frame, element)
    if not value.on_device or base.is_host_tensor:
        return
    if base.kind is Kind.CONTAINER or base.kind is Kind.HOST:
        frame.report("GR706", element, f"`{_text(element)}` indexes a Python container with a device value")
    elif value.dtype is Dtype.BOOL:
        fills = written is not None and written.kind is Kind.HOST and not augmented
        if not fills:
            frame.report("GR302", element, f"boolean mask `{_text(element)}` selects a data-dependent number of rows")
    elif value.scalar and value.dtype is not Dtype.FLOAT:
        frame.report("GR706", element, f"0-dimensional device tensor `{_text(element)}` is read on the host to index")


def _element_of(base: Value, node: ast.Subscript) -> Value:
    if base.kind is Kind.CONTAINER:
        if isinstance(node.slice, ast.Slice):
            return container_of(join(base.members())) if base.members() else base
        position = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.slice, ast.UnaryOp) and isinstance(node.slice.operand, ast.Constant):
            number = node.slice.operand.value
            position = -number if isinstance(number, int) else None
        if base.items is not None and isinstance(position, int) and -len(base.items) <= position < len(base.items):
            return base.items[position]
        return join(base.members())
    if base.kind in (Kind.DEVICE, Kind.PAGEABLE, Kind.PINNED):
        return replace(base, scalar=False)
    return HOST if base.kind is Kind.HOST else UNKNOWN


def register_lambda(frame: Frame, node: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Value:
    """Make a nested function callable; it sees the enclosing frame's names as they are at each call."""
    outer = frame.function.qualname + f".{LOCALS}." if frame.function else ""
    key = f"{frame.module.name}:{outer}{name}"
    function = frame.session.project.functions.get(key)
    if function is None:
        owner = frame.function.owner if frame.function else None
        function = Function(key, f"{outer}{name}", node, frame.module, owner, frame.function)
        frame.session.project.functions[key] = function
    function.closure = frame.env
    return Value(Kind.LOCAL, target=key)


def _constant(frame: Frame, node: ast.Constant) -> Value:
    return HOST_NONE if node.value is None else Value(Kind.HOST, literal=node.value)


def _name(frame: Frame, node: ast.Name) -> Value:
    if node.id in frame.env and node.id not in frame.global_names:
        return frame.env[node.id]
    module = frame.module
    if node.id in module.functions:
        return Value(Kind.LOCAL, target=module.functions[node.id].key)
    if node.id in module.classes:
        return Value(Kind.LOCAL, target=module.classes[node.id].key)
    if node.id in module.imports:
        return _resolved(frame, module.imports[node.id])
    if node.id in module.globals:
        return module.globals[node.id]
    if node.id in _BUILTINS:
        return Value(Kind.NAME, target=f"builtins.{node.id}")
    return names.by_habit(node.id)


def _resolved(frame: Frame, dotted: str) -> Value:
    found = frame.session.project.find(dotted)
    if isinstance(found, Function | Class):
        return Value(Kind.LOCAL, target=found.key)
    if found is None:
        module, _, last = dotted.rpartition(".")
        holder = frame.session.project.find(module) if module else None
        if isinstance(holder, Module) and last in holder.globals:
            return holder.globals[last]
    return Value(Kind.NAME, target=dotted)


def attribute_of(frame: Frame, base: Value, name: str) -> Value:
    """Value of `base.name` for a base already evaluated."""
    if base.kind is Kind.NAME:
        if base.target.startswith("torch.") and name in words.INT_DTYPES | words.FLOAT_DTYPES | {"bool"}:
            return HOST
        return _resolved(frame, f"{base.target}.{name}")
    if base.kind in (Kind.DEVICE, Kind.PAGEABLE, Kind.PINNED):
        if name in words.HOST_ATTRIBUTES:
            return HOST
        return base if name in ("T", "mT", "H", "mH", "real", "imag", "data", "grad") else UNKNOWN
    if base.kind is Kind.HOST:
        return HOST
    if base.kind is Kind.CONTAINER:
        named = join(base.members())
        return replace(named, dtype=Dtype.INT) if name == "indices" and named.on_device else named
    habit = names.by_habit(name)
    if base.kind is Kind.INSTANCE or base.kind is Kind.LOCAL:
        class_ = frame.session.project.classes.get(base.target)
        if class_ is not None:
            known = frame.session.attribute(class_, name)
            if known is not None:
                return known if habit.kind is Kind.UNKNOWN else habit
            method = frame.session.project.method(class_, name)
            if method is not None:
                if method.decorators & {"property", "cached_property"}:
                    return calls.follow(frame, method, Arguments(), base)
                return Value(Kind.LOCAL, target=method.key, bound=base)
    if habit.kind is not Kind.UNKNOWN:
        return habit
    return HOST if name in words.HOST_ATTRIBUTES else UNKNOWN


def _attribute(frame: Frame, node: ast.Attribute) -> Value:
    narrowed = frame.env.get(dotted_name(node) or "")
    if narrowed is not None:
        return narrowed
    return attribute_of(frame, evaluate(frame, node.value), node.attr)


def _binary(frame: Frame, node: ast.BinOp) -> Value:
    left, right = evaluate(frame, node.left), evaluate(frame, node.right)
    if isinstance(node.op, ast.Mod) and isinstance(left.literal, str):
        if right.holds_device:
            frame.report(frame.format_rule, node, f"device value formatted with %: `{_text(node)}`")
        return HOST
    return combine(left, right, bitwise=isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor))


def combine(left: Value, right: Value, bitwise: bool = False) -> Value:
    """Result of an element-wise operation: on the device when either side is."""
    if not (left.on_device or right.on_device):
        if left.is_host_tensor or right.is_host_tensor:
            return PAGEABLE
        if left.kind is Kind.CONTAINER or right.kind is Kind.CONTAINER:
            return join(v for v in (left, right) if v.kind is Kind.CONTAINER)
        return HOST if left.kind is Kind.HOST and right.kind is Kind.HOST else UNKNOWN
    sides = [v for v in (left, right) if v.on_device]
    dtypes = {v.dtype for v in sides}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is Dtype.BOOL and not bitwise:
        dtype = None
    scalar = all(v.scalar for v in sides) and all(v.on_device or v.kind is Kind.HOST for v in (left, right))
    return Value(Kind.DEVICE, dtype=dtype, scalar=scalar)


def _unary(frame: Frame, node: ast.UnaryOp) -> Value:
    if isinstance(node.op, ast.Not):
        truth(frame, node.operand, "`not`")
        return HOST
    return replace(evaluate(frame, node.operand), assumed=False, literal=None)


def _boolean(frame: Frame, node: ast.BoolOp) -> Value:
    for part in node.values[:-1]:
        truth(frame, part, f"`{'and' if isinstance(node.op, ast.And) else 'or'}`")
    with frame.mute():
        values = [evaluate(frame, part) for part in node.values[:-1]]
    return join([*values, evaluate(frame, node.values[-1])])


def _compare(frame: Frame, node: ast.Compare) -> Value:
    operands = [evaluate(frame, operand) for operand in (node.left, *node.comparators)]
    if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return HOST
    if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
        if any(v.on_device for v in operands):
            frame.report("GR203", node, f"membership test reads a device value: `{_text(node)}`")
        return HOST
    if any(isinstance(v.literal, str) or _is_enum_member(v) for v in operands):
        return HOST
    on_device = [v for v in operands if v.on_device]
    if not on_device:
        return (
            HOST
            if all(v.kind is Kind.HOST for v in operands)
            else PAGEABLE
            if any(v.is_host_tensor for v in operands)
            else UNKNOWN
        )
    if len(node.ops) > 1:
        frame.report("GR201", node, f"chained comparison needs a truth value from the device: `{_text(node)}`")
        return HOST
    return replace(
        DEVICE_BOOL,
        scalar=all(v.scalar for v in on_device) and all(v.on_device or v.kind is Kind.HOST for v in operands),
    )


def _is_enum_member(value: Value) -> bool:
    parts = value.target.split(".")
    return value.kind is Kind.NAME and len(parts) > 1 and parts[-1].isupper() and parts[-2][:1].isupper()


def _conditional(frame: Frame, node: ast.IfExp) -> Value:
    truth(frame, node.test, "conditional expression")
    return join((evaluate(frame, node.body), evaluate(frame, node.orelse)))


def _fstring(frame: Frame, node: ast.JoinedStr) -> Value:
    for part in node.values:
        if isinstance(part, ast.FormattedValue) and evaluate(frame, part.value).holds_device:
            frame.report(frame.format_rule, part.value, f"device value in an f-string: `{_text(part.value)}`")
    return HOST


def _sequence(frame: Frame, node: ast.Tuple | ast.List | ast.Set) -> Value:
    items: list[Value] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            inner = evaluate(frame, element.value)
            if inner.items is None:
                return container_of(join([*items, inner.iterated()]))
            items.extend(inner.items)
        else:
            items.append(evaluate(frame, element))
    return container(items)


def _dict(frame: Frame, node: ast.Dict) -> Value:
    for key in node.keys:
        if key is not None:
            evaluate(frame, key)
    values = [evaluate(frame, value) for value in node.values]
    if len({value.holds_device for value in values}) > 1:  # a record of mixed fields: which one is read is not known
        return container_of(UNKNOWN)
    return container_of(join(values)) if values else container(())


def _comprehension(frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
    saved = dict(frame.env)
    for generator in node.generators:
        assign(frame, generator.target, iterate(frame, generator.iter))
        for condition in generator.ifs:
            truth(frame, condition, "comprehension filter")
    if isinstance(node, ast.DictComp):
        evaluate(frame, node.key)
        element = evaluate(frame, node.value)
    else:
        element = evaluate(frame, node.elt)
    frame.env = saved
    return container_of(element)


def assign(frame: Frame, target: ast.expr, value: Value) -> None:
    """Bind a value to a target: names, tuples, attributes of `self`, subscripts."""
    if isinstance(target, ast.Name):
        masked = value.on_device and value.dtype is None and words.MASK_NAMES.search(target.id)
        frame.env[target.id] = replace(value, dtype=Dtype.BOOL) if masked and value.assumed else value
        if frame.function is None or target.id in frame.global_names:
            frame.module.globals[target.id] = value
    elif isinstance(target, ast.Starred):
        assign(frame, target.value, container_of(value))
    elif isinstance(target, ast.Tuple | ast.List):
        fixed = value.items if value.items is not None and len(value.items) == len(target.elts) else None
        for position, element in enumerate(target.elts):
            assign(frame, element, fixed[position] if fixed is not None else value.iterated())
    elif isinstance(target, ast.Attribute):
        base = evaluate(frame, target.value)
        class_ = frame.session.project.classes.get(base.target) if base.kind is Kind.INSTANCE else None
        if class_ is not None:
            known = class_.attributes.get(target.attr)
            class_.attributes[target.attr] = value if known is None else join((known, value))
    elif isinstance(target, ast.Subscript):
        index(frame, target, written=value)


def _walrus(frame: Frame, node: ast.NamedExpr) -> Value:
    value = evaluate(frame, node.value)
    assign(frame, node.target, value)
    return value


def _lambda(frame: Frame, node: ast.Lambda) -> Value:
    return register_lambda(frame, node, f"<lambda:{node.lineno}:{node.col_offset}>")


def _starred(frame: Frame, node: ast.Starred) -> Value:
    return evaluate(frame, node.value).iterated()


def _call(frame: Frame, node: ast.Call) -> Value:
    receiver, function = None, UNKNOWN
    if isinstance(node.func, ast.Attribute):
        base = evaluate(frame, node.func.value)
        function = attribute_of(frame, base, node.func.attr)
        receiver = Receiver(base, node.func.attr, dotted_name(node.func.value) or "")
    else:
        function = evaluate(frame, node.func)
    read_rule, format_rule = calls.special_rules(function, receiver)
    with frame.reading_as(read_rule, format_rule):
        arguments = _arguments(frame, node)
    return calls.apply(frame, node, function, receiver, arguments)


def _arguments(frame: Frame, node: ast.Call) -> Arguments:
    arguments = Arguments()
    for arg in node.args:
        value = evaluate(frame, arg)
        arguments.positional.append(value)
        arguments.nodes.append(arg)
    for keyword in node.keywords:
        value = evaluate(frame, keyword.value)
        if keyword.arg is not None:
            arguments.keywords[keyword.arg] = value
            arguments.keyword_nodes[keyword.arg] = keyword.value
    return arguments


def _subscript(frame: Frame, node: ast.Subscript) -> Value:
    return index(frame, node)


def _wrapped(frame: Frame, node: ast.Await | ast.YieldFrom) -> Value:
    return evaluate(frame, node.value)


def _yield(frame: Frame, node: ast.Yield) -> Value:
    frame.returns.append(container_of(evaluate(frame, node.value)))
    return UNKNOWN


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."


_HANDLERS: dict[type[ast.expr], Callable[[Frame, Any], Value]] = {
    ast.Constant: _constant, ast.Name: _name, ast.Attribute: _attribute, ast.Subscript: _subscript, ast.BinOp: _binary,
    ast.UnaryOp: _unary, ast.BoolOp: _boolean, ast.Compare: _compare, ast.IfExp: _conditional, ast.JoinedStr: _fstring,
    ast.Tuple: _sequence, ast.List: _sequence, ast.Set: _sequence, ast.Dict: _dict, ast.ListComp: _comprehension,
    ast.SetComp: _comprehension, ast.GeneratorExp: _comprehension, ast.DictComp: _comprehension, ast.Call: _call,
    ast.NamedExpr: _walrus, ast.Lambda: _lambda, ast.Starred: _starred, ast.Await: _wrapped, ast.YieldFrom: _wrapped,
    ast.Yield: _yield,
}  # fmt: skip
