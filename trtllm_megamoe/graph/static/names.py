# SPDX-License-Identifier: Apache-2.0
"""What names, annotations and habits say about a value before anything is interpreted."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from trtllm_megamoe.graph.static import vocabulary as words
from trtllm_megamoe.graph.static.frame import Session
from trtllm_megamoe.graph.static.sources import Class, Function, Module, dotted_name
from trtllm_megamoe.graph.static.values import (
    HOST,
    HOST_NONE,
    PAGEABLE,
    PINNED,
    UNKNOWN,
    Dtype,
    Kind,
    Value,
    container_of,
    is_none,
    join,
)

ASSUMED = Value(Kind.DEVICE, assumed=True)
_TENSORS = {"Tensor", "Parameter", "LongTensor", "FloatTensor", "IntTensor", "HalfTensor", "BFloat16Tensor"}
_HOSTS = {"int", "float", "bool", "str", "bytes", "complex", "dtype", "device", "Size", "ndarray", "Path", "None"}
_SEQUENCES = {"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Iterator", "set", "Set", "deque", "Collection"}
_MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict"}
_RESOURCES = {"Stream", "Event", "Generator"}


def by_habit(name: str) -> Value:
    """What a name promises: `*_cpu` and `*_host` live on the host, `pinned_*` is pinned, `*_np` is NumPy."""
    if words.PINNED_NAMES.search(name):
        return PINNED
    if words.HOST_TENSOR_NAMES.search(name):
        return PAGEABLE
    if words.NUMPY_NAMES.search(name):
        return HOST
    return UNKNOWN


def from_annotation(session: Session, module: Module, node: ast.expr | None) -> Value:
    """Value that an annotation promises; UNKNOWN when it says nothing of use."""
    if node is None:
        return UNKNOWN
    if isinstance(node, ast.Constant):
        if node.value is None:
            return HOST_NONE
        if isinstance(node.value, str):
            try:
                return from_annotation(session, module, ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return UNKNOWN
    if isinstance(node, ast.BinOp):
        return join((from_annotation(session, module, node.left), from_annotation(session, module, node.right)))
    if isinstance(node, ast.Subscript):
        return _generic(session, module, node)
    name = (dotted_name(node) or "").rsplit(".", 1)[-1]
    if name in _TENSORS:
        return Value(Kind.DEVICE, dtype=Dtype.INT if name in ("LongTensor", "IntTensor") else None, assumed=True)
    if name == "BoolTensor":
        return Value(Kind.DEVICE, dtype=Dtype.BOOL, assumed=True)
    if name in _HOSTS:
        return HOST
    if name in _RESOURCES:
        return Value(Kind.INSTANCE, target=f"torch.cuda.{name}")
    if name == "Module":
        return Value(Kind.INSTANCE, target="torch.nn.Module")
    found = session.project.find_expression(module, node)
    return Value(Kind.INSTANCE, target=found.key) if isinstance(found, Class) else UNKNOWN


def _generic(session: Session, module: Module, node: ast.Subscript) -> Value:
    head = (dotted_name(node.value) or "").rsplit(".", 1)[-1]
    parts: Sequence[ast.expr] = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if head in ("Optional", "Union", "Annotated", "Final", "ClassVar"):
        return join(from_annotation(session, module, p) for p in (parts[:1] if head == "Annotated" else parts))
    if head in _SEQUENCES:
        return container_of(join(from_annotation(session, module, p) for p in parts))
    if head in _MAPPINGS:
        return container_of(from_annotation(session, module, parts[-1]))
    inner = from_annotation(session, module, parts[0])
    if inner.on_device:  # jaxtyping: Float[Tensor, "tokens hidden"]
        return Value(
            Kind.DEVICE, dtype=Dtype.BOOL if head == "Bool" else Dtype.INT if head == "Int" else None, assumed=True
        )
    return UNKNOWN


def bind(
    session: Session,
    function: Function,
    receiver: Value | None,
    arguments: Sequence[Value],
    keywords: Mapping[str, Value],
) -> dict[str, Value]:
    """Local names of a call: what was passed, else what annotation, default, use in the body or habit say."""
    args = function.node.args
    env = dict(function.closure)
    names = [*args.posonlyargs, *args.args]
    passed = list(arguments)
    if function.owner is not None and function.parent is None and "staticmethod" not in function.decorators:
        kind = Kind.LOCAL if "classmethod" in function.decorators else Kind.INSTANCE
        passed.insert(0, receiver if receiver and receiver.kind is kind else Value(kind, target=function.owner.key))
    defaults: dict[str, ast.expr] = dict(
        zip((a.arg for a in names[len(names) - len(args.defaults) :]), args.defaults, strict=True)
    )
    defaults.update({a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None})
    for position, arg in enumerate([*names, *args.kwonlyargs]):
        given = keywords.get(arg.arg, UNKNOWN)
        if position < min(len(passed), len(names)):
            given = passed[position]
        declared = declare(session, function, arg, defaults.get(arg.arg))
        useless = given.kind is Kind.UNKNOWN or (is_none(given) and declared.kind is Kind.UNKNOWN)
        env[arg.arg] = declared if useless else given
    if args.vararg:
        env[args.vararg.arg] = container_of(
            join([*passed[len(names) :], from_annotation(session, function.module, args.vararg.annotation)])
        )
    if args.kwarg:
        env[args.kwarg.arg] = UNKNOWN
    return env


def declare(session: Session, function: Function, arg: ast.arg, default: ast.expr | None) -> Value:
    """Value of a parameter nobody passed."""
    habit = by_habit(arg.arg)
    if habit.kind is not Kind.UNKNOWN:
        return habit
    annotated = from_annotation(session, function.module, arg.annotation)
    if annotated.kind is not Kind.UNKNOWN:
        masked = annotated.on_device and annotated.dtype is None and words.MASK_NAMES.search(arg.arg)
        return Value(Kind.DEVICE, dtype=Dtype.BOOL, assumed=True) if masked else annotated
    if isinstance(default, ast.Constant) and default.value is not None:
        return HOST
    if arg.annotation is None and (_used_as_tensor(function, arg.arg) or words.TENSOR_NAMES.match(arg.arg)):
        return Value(Kind.DEVICE, dtype=Dtype.BOOL if words.MASK_NAMES.search(arg.arg) else None, assumed=True)
    return UNKNOWN


def _used_as_tensor(function: Function, name: str) -> bool:
    for node in ast.walk(function.node):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            if node.attr in words.TENSOR_ATTRIBUTES or (node.attr in words.TENSOR_METHODS - words.AMBIGUOUS_METHODS):
                return True
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            if any(isinstance(side, ast.Name) and side.id == name for side in (node.left, node.right)):
                return True
        elif (
            isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == name
        ):
            dotted = dotted_name(node.func) or ""
            head = dotted.partition(".")[0]
            target = function.module.imports.get(head, head)
            makes = dotted.rsplit(".", 1)[-1] in words.FACTORIES | words.RANDOM_FACTORIES
            if (
                "." in dotted
                and target.split(".")[0] == "torch"
                and not makes
                and dotted.count(".") <= 3
                and "device" not in dotted
            ):
                return True
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
            and isinstance(node.slice, ast.Tuple)
        ):
            return True
    return False
