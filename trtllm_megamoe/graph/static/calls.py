# SPDX-License-Identifier: Apache-2.0
"""Calls: follows functions of the scanned files, knows builtins and library functions, hands tensors to `tensors`."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from trtllm_megamoe.graph.static import names, tensors
from trtllm_megamoe.graph.static import vocabulary as words
from trtllm_megamoe.graph.static.frame import Frame
from trtllm_megamoe.graph.static.sources import Function
from trtllm_megamoe.graph.static.tensors import Arguments, call_text
from trtllm_megamoe.graph.static.values import HOST, UNKNOWN, Kind, Value, container, container_of, join

__all__ = ["Arguments", "Receiver", "apply", "follow", "special_rules"]

_HOST_RNG_INSTANCE = "host random generator"


@dataclass(frozen=True, slots=True)
class Receiver:
    """What a method was called on: its value, the method's name, the receiver as written."""

    value: Value
    name: str
    text: str = field(default="")

    @property
    def last(self) -> str:
        """Last part of the receiver as written: `logger` of `self.logger`."""
        return self.text.rsplit(".", 1)[-1]


def _is_log_call(function: Value, receiver: Receiver | None) -> bool:
    if function.kind is Kind.NAME and (function.target.startswith("logging.") or function.target == "warnings.warn"):
        return True
    return (
        receiver is not None and receiver.name in words.LOG_METHODS and bool(words.LOG_RECEIVERS.search(receiver.last))
    )


def special_rules(function: Value, receiver: Receiver | None) -> tuple[str | None, str | None]:
    """More specific rules for reads and for formatting among this call's arguments."""
    read = "GR705" if function.kind is Kind.NAME and function.target.startswith("einops.") else None
    return read, "GR703" if _is_log_call(function, receiver) else None


def follow(frame: Frame, function: Function, arguments: Arguments, receiver: Value | None = None) -> Value:
    """Interpret a function of the scanned files with these arguments."""
    session = frame.session
    positional = list(arguments.positional)
    bound = [receiver] if receiver is not None else []
    result = session.call(
        frame,
        function,
        lambda f: names.bind(session, f, receiver, positional, arguments.keywords),
        [*bound, *positional],
        arguments.keywords,
    )
    if result.kind is Kind.UNKNOWN and not isinstance(function.node, ast.Lambda):
        return names.from_annotation(session, function.module, function.node.returns)
    return result


def apply(frame: Frame, node: ast.Call, function: Value, receiver: Receiver | None, arguments: Arguments) -> Value:
    """Value of a call whose function and arguments are evaluated; reports what the call does."""
    if _is_log_call(function, receiver):
        if any(v.holds_device for v in arguments.values()):
            frame.report("GR703", node, f"device value handed to a log call: `{call_text(node)}`")
        return HOST
    if function.kind is Kind.LOCAL:
        return _local(frame, function, arguments)
    if function.kind is Kind.INSTANCE:
        return _instance(frame, function, arguments)
    if function.kind is Kind.NAME:
        if function.target.startswith("builtins."):
            return _builtin(frame, node, function.target[9:], arguments)
        return _external(frame, node, function.target, arguments)
    if receiver is not None:
        return _method(frame, node, receiver, arguments)
    _follow_callbacks(frame, arguments)
    return UNKNOWN


def _local(frame: Frame, function: Value, arguments: Arguments) -> Value:
    project = frame.session.project
    target = project.functions.get(function.target)
    if target is not None:
        unbound = function.bound is not None and function.bound.kind is Kind.LOCAL
        if unbound and arguments.positional and not target.decorators & {"classmethod", "staticmethod"}:
            return follow(frame, target, arguments.rest(), arguments.positional[0])  # Class.method(instance, ...)
        return follow(frame, target, arguments, function.bound)
    class_ = project.classes[function.target]
    instance = Value(Kind.INSTANCE, target=class_.key)
    constructor = project.method(class_, "__init__")
    if constructor is not None:
        with frame.mute(constructor.name == "__init__" and frame.function is None):
            follow(frame, constructor, arguments, instance)
    return instance


def _instance(frame: Frame, function: Value, arguments: Arguments) -> Value:
    class_ = frame.session.project.classes.get(function.target)
    if class_ is not None:
        for name in ("__call__", "forward"):
            method = frame.session.project.method(class_, name)
            if method is not None:
                return follow(frame, method, arguments, function)
    return Value(Kind.DEVICE) if any(v.holds_device for v in arguments.values()) else UNKNOWN


def _builtin(frame: Frame, node: ast.Call, name: str, arguments: Arguments) -> Value:
    first = arguments.get(0)
    text = call_text(node)
    if name in words.HOST_CASTS:
        if first.on_device:
            rule = frame.read_rule if frame.read_rule != "GR101" else "GR103"
            frame.report(rule, node, f"host conversion of a device value: `{text}`")
        return HOST
    if name in words.BUILTIN_REDUCTIONS:
        return _builtin_reduction(frame, node, name, arguments)
    if name in words.FORMATTERS:
        if any(v.holds_device for v in arguments.values()):
            frame.report(frame.format_rule, node, f"device value formatted: `{text}`")
        return HOST
    if name == "range":
        for arg, value in zip(arguments.nodes, arguments.positional, strict=True):
            if value.on_device:
                frame.report("GR202", arg, f"loop bound is a device value: `{text}`")
        return container_of(HOST)
    if name in ("enumerate", "zip", "map", "filter"):
        sequences = arguments.positional[1:] if name in ("map", "filter") else arguments.positional
        if any(v.on_device for v in sequences):
            frame.report("GR202", node, f"Python loop over a device tensor: `{text}`")
        elements = [v.iterated() for v in sequences]
        if name == "map" and elements:
            return container_of(_callback(frame, first, elements))
        if name == "filter":
            if _callback(frame, first, elements).on_device:
                frame.report("GR201", node, f"filter needs truth values from the device: `{text}`")
            return container_of(join(elements))
        return container_of(container([HOST, *elements] if name == "enumerate" else elements))
    if name in ("list", "tuple", "set", "frozenset", "reversed", "iter"):
        return first if first.kind is Kind.CONTAINER else container_of(first.iterated())
    if name == "next":
        return first.iterated()
    if name in ("abs", "pow", "divmod"):
        return join(arguments.positional)
    if name == "super":
        owner = frame.function.owner if frame.function else None
        return Value(Kind.INSTANCE, target=owner.key, literal="super") if owner is not None else UNKNOWN
    if name == "dict":
        return container_of(join(arguments.keywords.values())) if arguments.keywords else first
    if name == "getattr":
        return UNKNOWN
    return (
        HOST
        if name in ("len", "isinstance", "id", "type", "hasattr", "callable", "hash", "issubclass", "chr")
        else UNKNOWN
    )


def _builtin_reduction(frame: Frame, node: ast.Call, name: str, arguments: Arguments) -> Value:
    values = arguments.positional
    on_device = [v for v in values if v.on_device]
    members = values[0].members() if len(values) == 1 else ()
    compares = name != "sum" and any(m.on_device for m in members)
    if on_device or compares:
        frame.report("GR701", node, f"builtin {name}() over a device value: `{call_text(node)}`")
    if name == "sum" and members:
        return join(members)
    if name in ("any", "all"):
        return HOST
    if name == "sorted":
        return container_of(join(members)) if members else container_of(UNKNOWN)
    return (
        Value(Kind.DEVICE, scalar=True)
        if on_device or compares
        else HOST
        if all(v.kind is Kind.HOST for v in values)
        else UNKNOWN
    )


def _callback(frame: Frame, function: Value, arguments: list[Value]) -> Value:
    target = frame.session.project.functions.get(function.target) if function.kind is Kind.LOCAL else None
    if target is not None:
        return follow(frame, target, Arguments(positional=arguments), function.bound)
    return HOST if function.kind is Kind.NAME and function.target.startswith("builtins.") else UNKNOWN


def _follow_callbacks(frame: Frame, arguments: Arguments) -> None:
    for value in arguments.values():
        target = frame.session.project.functions.get(value.target) if value.kind is Kind.LOCAL else None
        if target is not None:
            follow(frame, target, Arguments(), value.bound)


def _external(frame: Frame, node: ast.Call, target: str, arguments: Arguments) -> Value:
    text, last = call_text(node), target.rsplit(".", 1)[-1]
    holds = any(v.holds_device for v in arguments.values())
    if target in words.HOST_TORCH:
        return HOST
    if target == "torch.device":
        return arguments.get(0)
    if target == "torch._assert":
        if arguments.get(0).on_device:
            frame.report("GR704", node, f"assert on a device value: `{text}`")
        return HOST
    if target in words.SYNCS or last in ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"):
        frame.report("GR601", node, f"waits on the host: `{text}`")
        return HOST
    if last in words.OBJECT_COLLECTIVES:
        frame.report("GR602", node, f"collective over pickled objects: `{text}`")
        return UNKNOWN
    if target in words.RESEEDS:
        frame.report("GR502", node, f"random state touched from the host: `{text}`")
        return HOST
    if target in words.HOST_RNG_OBJECTS:
        frame.report("GR501", node, f"host random generator: `{text}`")
        return Value(Kind.INSTANCE, target=_HOST_RNG_INSTANCE)
    if target in words.HOST_RNG or target.startswith(words.HOST_RNG_MODULES):
        frame.report("GR501", node, f"host random number: `{text}`")
        return HOST
    if target in words.COMPILERS:
        frame.report("GR404", node, f"compiles or loads code: `{text}`")
        return UNKNOWN
    if target in words.RESOURCES:
        frame.report("GR403", node, f"creates a stream, event, generator or graph: `{text}`")
        return Value(Kind.INSTANCE, target=target)
    if target in ("torch.cuda.current_stream", "torch.cuda.default_stream"):
        return Value(Kind.INSTANCE, target="torch.cuda.Stream")
    if target.startswith("numpy."):
        return _numpy(frame, node, target, holds)
    if target.startswith(words.HOST_MATH_MODULES) or target in words.HOST_MATH_MODULES:
        if holds:
            frame.report("GR103", node, f"host arithmetic on a device value: `{text}`")
        return HOST
    if target.startswith("einops."):
        for keyword, value in arguments.keywords.items():
            if value.on_device:
                frame.report("GR705", arguments.keyword_nodes[keyword], f"einops dimension {keyword} is a device value")
        return Value(Kind.DEVICE) if holds else UNKNOWN
    if target in words.IMPLICIT_READS_DOTTED:
        if holds or target.startswith("torch.linalg."):
            frame.report("GR707", node, f"reads the device to answer: `{text}`")
        return Value(Kind.DEVICE) if target.startswith("torch.linalg.") else UNKNOWN
    _follow_callbacks(frame, arguments)
    if target.startswith("torch."):
        return tensors.torch_function(frame, node, target, arguments)
    if last[:1].isupper():
        return Value(Kind.INSTANCE, target=target)
    return UNKNOWN


def _numpy(frame: Frame, node: ast.Call, target: str, holds: bool) -> Value:
    text = call_text(node)
    if holds:
        frame.report("GR101" if target in words.NUMPY_READS else "GR707", node, f"NumPy reads a device value: `{text}`")
    elif target in words.NUMPY_FACTORIES:
        frame.report("GR401", node, f"host array allocated: `{text}`")
    return HOST


def _method(frame: Frame, node: ast.Call, receiver: Receiver, arguments: Arguments) -> Value:
    value, name, text = receiver.value, receiver.name, call_text(node)
    holds = any(v.holds_device for v in arguments.values())
    if value.kind is Kind.INSTANCE and value.literal == "super":
        owner = frame.session.project.classes[value.target]
        method = frame.session.project.method(owner, name, after=owner)
        return follow(frame, method, arguments, Value(Kind.INSTANCE, target=owner.key)) if method else UNKNOWN
    if value.target == _HOST_RNG_INSTANCE:
        frame.report("GR501", node, f"host random number: `{text}`")
        return HOST
    queried = value.target in ("torch.cuda.Event", "torch.cuda.Stream") or (
        value.kind is Kind.UNKNOWN and not arguments.positional and not arguments.keywords
    )
    waits = name in words.SYNC_METHODS or (name == "query" and queried)
    if waits or (name == "barrier" and words.BARRIER_RECEIVERS.search(receiver.last)):
        frame.report("GR601", node, f"waits on the host: `{text}`")
        return HOST
    if name in words.OBJECT_COLLECTIVES:
        frame.report("GR602", node, f"collective over pickled objects: `{text}`")
        return UNKNOWN
    if name == "manual_seed":
        frame.report("GR502", node, f"random state touched from the host: `{text}`")
        return value
    if name in words.METRIC_METHODS and holds and not value.on_device:
        frame.report("GR703", node, f"device value handed to a metric: `{text}`")
        return UNKNOWN
    if name == "format" and holds and value.kind in (Kind.HOST, Kind.UNKNOWN):
        frame.report(frame.format_rule, node, f"device value formatted: `{text}`")
        return HOST
    if name in words.LIST_SEARCHES and holds and value.kind in (Kind.HOST, Kind.CONTAINER, Kind.UNKNOWN):
        frame.report("GR203", node, f"list search compares device values: `{text}`")
        return HOST
    if value.kind is Kind.CONTAINER:
        return _container_method(value, name, arguments)
    if value.kind is Kind.HOST:
        return HOST
    if value.kind in (Kind.LOCAL, Kind.NAME):
        return UNKNOWN
    if value.kind is Kind.INSTANCE:
        _follow_callbacks(frame, arguments)
        if name in ("forward", "__call__"):
            return _instance(frame, value, arguments)
        if name not in words.READ_METHODS | {"cpu", "cuda"}:
            return UNKNOWN
    return tensors.method(frame, node, value, name, arguments)


def _container_method(value: Value, name: str, arguments: Arguments) -> Value:
    element = join(value.members())
    if name == "items":
        return container_of(container([HOST, element]))
    if name in ("values", "copy"):
        return container_of(element)
    if name == "keys":
        return container_of(HOST)
    return element if name in ("get", "pop", "popitem", "setdefault") else UNKNOWN
