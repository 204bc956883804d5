# SPDX-License-Identifier: Apache-2.0
"""Tensor operations: which read the device, have data-dependent shapes or allocate, and what they return."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from trtllm_megamoe.graph.static import vocabulary as words
from trtllm_megamoe.graph.static.frame import Frame
from trtllm_megamoe.graph.static.values import (
    DEVICE,
    HOST,
    PAGEABLE,
    PINNED,
    UNKNOWN,
    Dtype,
    Kind,
    Value,
    container,
    container_of,
)

_NOT_SIZES = frozenset({"value", "fill_value", "out", "dtype", "device", "generator", "mode"})


@dataclass(slots=True)
class Arguments:
    """Evaluated arguments of one call, with the nodes they came from."""

    positional: list[Value] = field(default_factory=list)
    nodes: list[ast.expr] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)
    keyword_nodes: dict[str, ast.expr] = field(default_factory=dict)

    def values(self) -> Iterator[Value]:
        """All argument values."""
        yield from self.positional
        yield from self.keywords.values()

    def get(self, position: int, keyword: str = "") -> Value:
        """Argument by position or keyword, UNKNOWN when absent."""
        if position < len(self.positional):
            return self.positional[position]
        return self.keywords.get(keyword, UNKNOWN)

    def has(self, position: int, keyword: str) -> bool:
        """Whether the argument was given."""
        return position < len(self.positional) or keyword in self.keywords

    def rest(self) -> Arguments:
        """Arguments behind the first one, which is the tensor of a `torch` function."""
        if self.positional:
            return Arguments(self.positional[1:], self.nodes[1:], self.keywords, self.keyword_nodes)
        keywords = {k: v for k, v in self.keywords.items() if k != "input"}
        return Arguments([], [], keywords, self.keyword_nodes)


def call_text(node: ast.AST) -> str:
    """Source of a node, shortened for a message."""
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."


def _pins(arguments: Arguments) -> bool:
    return "pin_memory" in arguments.keywords and arguments.keywords["pin_memory"].literal is not False


def is_true(value: Value) -> bool:
    """Whether an argument is the constant True."""
    return value.literal is True


def torch_function(frame: Frame, node: ast.Call, target: str, arguments: Arguments) -> Value:
    """A call of `torch.*`: factories first, then operations whose first argument is the tensor."""
    name = target.rsplit(".", 1)[-1]
    if target.startswith("torch.") and target.count(".") == 1:
        if name in words.FACTORIES:
            return _factory(frame, node, name, arguments)
        if name in words.RANDOM_FACTORIES or name in words.LIKE_FACTORIES:
            return _factory(frame, node, name, arguments)
        if name in words.GROWERS:
            return (
                DEVICE
                if any(v.holds_device for v in arguments.values())
                else PAGEABLE
                if _all_host(arguments)
                else DEVICE
            )
    if name[:1].isupper():
        return Value(Kind.INSTANCE, target=target)
    tensor = arguments.get(0, "input")
    if target.startswith("torch.nn.functional.") or target.count(".") == 1 or target.startswith("torch.special."):
        return operation(frame, node, tensor, name, arguments.rest(), is_method=False)
    return DEVICE if any(v.holds_device for v in arguments.values()) else UNKNOWN


def _all_host(arguments: Arguments) -> bool:
    members = [m for v in arguments.positional for m in v.members()]
    return bool(members) and all(m.is_host_tensor for m in members)


def method(frame: Frame, node: ast.Call, tensor: Value, name: str, arguments: Arguments) -> Value:
    """A method call on a tensor, or on a value of unknown origin that may be one."""
    moved = _transfer(frame, node, tensor, name, arguments)
    if moved is not None:
        return moved
    if name in words.HOST_METHODS:
        return HOST
    if name in words.NEW_METHODS and (tensor.on_device or name.startswith("new_")):
        _sizes(frame, node, Arguments(arguments.positional[:1], arguments.nodes[:1]))
        if name == "new_tensor":
            frame.report("GR104", node, f"host data copied to the device: `{call_text(node)}`")
        else:
            frame.report("GR401", node, f"tensor allocated: `{call_text(node)}`")
        return replace(tensor, kind=Kind.DEVICE if tensor.kind is Kind.UNKNOWN else tensor.kind, assumed=False)
    if tensor.kind is Kind.UNKNOWN and name not in words.TENSOR_METHODS - words.AMBIGUOUS_METHODS:
        return UNKNOWN
    return operation(frame, node, tensor, name, arguments, is_method=True)


def operation(frame: Frame, node: ast.Call, tensor: Value, name: str, arguments: Arguments, is_method: bool) -> Value:
    """A tensor operation, as method or as function; `arguments` come behind the tensor."""
    text = call_text(node)
    others = list(arguments.values())
    if tensor.is_host_tensor and not any(v.on_device for v in others):
        return PAGEABLE
    maybe_device = tensor.kind in (Kind.DEVICE, Kind.UNKNOWN)
    known_device = tensor.on_device or any(v.on_device for v in others)
    ranged = name == "histc" and arguments.has(1, "min") and arguments.has(2, "max")
    if name in words.IMPLICIT_READS and known_device and not ranged:
        frame.report("GR707", node, f"reads the device to answer: `{text}`")
        return HOST if name in ("equal", "allclose", "is_nonzero") else DEVICE
    if _is_data_dependent(tensor, name, arguments, is_method) and maybe_device:
        frame.report("GR301", node, f"output shape depends on device values: `{text}`")
    elif name in words.SIZE_METHODS and maybe_device and not (is_method and _is_module_call(tensor, others)):
        _sizes(frame, node, arguments)
    return _result(tensor, name, arguments)


def _is_module_call(receiver: Value, arguments: list[Value]) -> bool:
    """An unknown receiver with whole tensors as arguments is a module with a method of that name, not a tensor."""
    return not receiver.on_device and any(v.on_device and not v.scalar for v in arguments)


def _is_data_dependent(tensor: Value, name: str, arguments: Arguments, is_method: bool) -> bool:
    if name in words.DATA_DEPENDENT:
        return tensor.on_device or not is_method or name not in ("unique", "combinations", "bincount")
    if name == "where":
        return not is_method and not arguments.has(1, "other") and not arguments.has(0, "input")
    if name == "repeat_interleave":
        repeats = arguments.get(0, "repeats")
        alone = not is_method and not arguments.has(0, "repeats")
        written = ast.unparse(arguments.nodes[0]) if arguments.nodes else ""
        counts = repeats.on_device or (repeats.kind is Kind.UNKNOWN and words.COUNT_NAMES.search(written))
        return "output_size" not in arguments.keywords and bool(alone or counts)
    if name == "one_hot":
        return not arguments.has(0, "num_classes") or arguments.get(0, "num_classes").literal == -1
    return False


def _sizes(frame: Frame, node: ast.Call, arguments: Arguments) -> None:
    named = [(arguments.keyword_nodes[k], v) for k, v in arguments.keywords.items() if k not in _NOT_SIZES]
    for arg, value in [*zip(arguments.nodes, arguments.positional, strict=True), *named]:
        if value.holds_device:
            frame.report("GR303", arg, f"device value where a host number is needed: `{call_text(node)}`")


def _factory(frame: Frame, node: ast.Call, name: str, arguments: Arguments) -> Value:
    text = call_text(node)
    first = arguments.get(0)
    like = name in words.LIKE_FACTORIES
    device = arguments.keywords.get("device")
    if "out" in arguments.keywords:
        return arguments.keywords["out"]
    if name in ("tensor", "as_tensor") and first.kind is Kind.CONTAINER and first.holds_device:
        frame.report("GR101", node, f"device values read one by one into a new tensor: `{text}`")
        return DEVICE
    if name == "as_tensor" and first.on_device:
        return first
    if not like and name not in words.FROM_HOST_DATA:
        _sizes(frame, node, arguments)
    if name == "full" and arguments.get(1, "fill_value").on_device:
        frame.report("GR303", node, f"device value where a host number is needed: `{text}`")
    on_host = device is not None and device.literal == "cpu"
    random = name in words.RANDOM_FACTORIES
    if random and device is None and not any(v.on_device for v in arguments.values()):
        frame.report("GR501", node, f"random numbers drawn on the host: `{text}`")
        return PAGEABLE
    if random and on_host:
        frame.report("GR501", node, f"random numbers drawn on the host: `{text}`")
        return PAGEABLE
    if name in words.FROM_HOST_DATA and device is not None and not on_host and not first.on_device:
        frame.report("GR104", node, f"host data copied to the device: `{text}`")
        return DEVICE
    if name == "from_numpy":
        return PAGEABLE
    frame.report("GR401", node, f"tensor allocated: `{text}`")
    if on_host or name in words.FROM_HOST_DATA:
        return PINNED if _pins(arguments) else PAGEABLE
    if like:
        return replace(first, assumed=False, scalar=False) if first.kind is not Kind.UNKNOWN else DEVICE
    if _pins(arguments):
        return PINNED
    return Value(Kind.DEVICE, dtype=_dtype_of(arguments.keyword_nodes.get("dtype"), name))


def _dtype_of(node: ast.expr | None, name: str) -> Dtype | None:
    if node is not None:
        last = call_text(node).rsplit(".", 1)[-1]
        if last == "bool":
            return Dtype.BOOL
        return Dtype.INT if last in words.INT_DTYPES else Dtype.FLOAT if last in words.FLOAT_DTYPES else None
    return Dtype.INT if name in words.INT_RESULTS else None


def _transfer(frame: Frame, node: ast.Call, tensor: Value, name: str, arguments: Arguments) -> Value | None:
    text = call_text(node)
    maybe_device = tensor.kind in (Kind.DEVICE, Kind.UNKNOWN, Kind.INSTANCE)
    non_blocking = is_true(arguments.get(1, "non_blocking")) or is_true(arguments.get(99, "non_blocking"))
    if name in words.READ_METHODS:
        if maybe_device:
            frame.report(frame.read_rule, node, f"device value read by the host: `{text}`")
        return HOST
    if name == "cpu":
        if maybe_device:
            frame.report("GR102", node, f"device tensor copied to the host: `{text}`")
        return PAGEABLE
    if name == "pin_memory":
        frame.report("GR403", node, f"pinned memory allocated: `{text}`")
        return PINNED
    if name == "cuda":
        _to_device(frame, node, tensor, non_blocking, explicit=True)
        return DEVICE
    if name == "copy_":
        _copy(frame, node, tensor, arguments.get(0, "src"), non_blocking)
        return tensor
    if name != "to" and not (name == "type" and arguments.positional):
        return None
    if name == "type":
        return replace(tensor, dtype=_dtype_of(arguments.nodes[0], ""), assumed=False)
    return _to(frame, node, tensor, arguments, non_blocking)


def _to(frame: Frame, node: ast.Call, tensor: Value, arguments: Arguments, non_blocking: bool) -> Value:
    places = [arguments.keywords["device"]] if "device" in arguments.keywords else arguments.positional[:1]
    nodes = [arguments.keyword_nodes["device"]] if "device" in arguments.keywords else arguments.nodes[:1]
    place = places[0] if places else UNKNOWN
    if place.literal == "cpu":
        if tensor.kind in (Kind.DEVICE, Kind.UNKNOWN):
            frame.report("GR102", node, f"device tensor copied to the host: `{call_text(node)}`")
        return PAGEABLE
    if place.kind in (Kind.DEVICE, Kind.PAGEABLE, Kind.PINNED):  # .to(other)
        return replace(tensor, kind=place.kind, dtype=place.dtype)
    explicit = isinstance(place.literal, str) and place.literal.startswith("cuda")
    named = nodes and call_text(nodes[0]).rsplit(".", 1)[-1].rstrip("'\")").endswith("device")
    if explicit or named:
        _to_device(frame, node, tensor, non_blocking, explicit)
        return replace(tensor, kind=Kind.DEVICE, assumed=False)
    dtype_node = arguments.keyword_nodes.get("dtype", nodes[0] if nodes else None)
    kind = tensor.kind if tensor.kind is not Kind.UNKNOWN else Kind.UNKNOWN
    return replace(tensor, kind=kind, dtype=_dtype_of(dtype_node, ""), assumed=False)


def _to_device(frame: Frame, node: ast.Call, tensor: Value, non_blocking: bool, explicit: bool) -> None:
    if tensor.kind is Kind.PAGEABLE or (tensor.kind is Kind.PINNED and not non_blocking):
        frame.report("GR104", node, f"blocking copy of a host tensor to the device: `{call_text(node)}`")
    elif explicit and not non_blocking and (tensor.kind is Kind.UNKNOWN or tensor.assumed):
        frame.report("GR104", node, f"moves to the device, so the source may be on the host: `{call_text(node)}`")


def _copy(frame: Frame, node: ast.Call, target: Value, source: Value, non_blocking: bool) -> None:
    text = call_text(node)
    if target.is_host_tensor and source.on_device:
        if not (target.kind is Kind.PINNED and non_blocking):
            frame.report("GR102", node, f"blocking copy of a device tensor to the host: `{text}`")
    elif target.kind in (Kind.DEVICE, Kind.UNKNOWN) and (
        source.kind is Kind.PAGEABLE or (source.kind is Kind.PINNED and not non_blocking)
    ):
        frame.report("GR104", node, f"blocking copy of a host tensor to the device: `{text}`")


def _result(tensor: Value, name: str, arguments: Arguments) -> Value:
    if name in words.SEQUENCE_RESULTS:
        return container_of(Value(Kind.DEVICE, dtype=tensor.dtype))
    dim_given = bool(arguments.positional) or "dim" in arguments.keywords or "axis" in arguments.keywords
    if name in words.PAIR_RESULTS and dim_given and not (name in ("max", "min") and arguments.get(0).on_device):
        return container([Value(Kind.DEVICE, dtype=tensor.dtype), Value(Kind.DEVICE, dtype=Dtype.INT)])
    if name in ("sort", "topk", "aminmax"):
        return container([Value(Kind.DEVICE, dtype=tensor.dtype), Value(Kind.DEVICE, dtype=Dtype.INT)])
    others = [v for v in arguments.values() if v.on_device]
    stays_scalar = tensor.scalar and name not in words.SIZE_METHODS and all(v.scalar for v in others)
    scalar = (name in words.FULL_REDUCTIONS and not dim_given) or stays_scalar
    if name in words.BOOL_RESULTS:
        return Value(Kind.DEVICE, dtype=Dtype.BOOL, scalar=scalar)
    if name in words.INT_RESULTS:
        return Value(Kind.DEVICE, dtype=Dtype.INT, scalar=scalar)
    if name in words.FLOAT_RESULTS:
        return Value(Kind.DEVICE, dtype=Dtype.FLOAT, scalar=scalar)
    # Arithmetic on a mask gives numbers; only moving it about keeps it a mask.
    keeps = tensor.dtype is not Dtype.BOOL or name in words.REARRANGEMENTS
    return Value(Kind.DEVICE, dtype=tensor.dtype if keeps and name != "where" else None, scalar=scalar)
