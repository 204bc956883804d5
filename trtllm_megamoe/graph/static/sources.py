# SPDX-License-Identifier: Apache-2.0
"""The files of one scan: parsed modules, their functions and classes, imports, and allow-list comments.

Nothing is imported or executed. The interpreter asks here what a dotted name means inside the given files.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.graph.static.values import Value

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ALLOW = re.compile(r"#\s*graph-ok(?:\[(?P<rules>[^\]]*)\])?\s*(?::\s*(?P<reason>.*))?$")
LOCALS = "<locals>"


@dataclass(slots=True)
class Allowance:
    """One `# graph-ok[RULES]: reason` comment; `rules` empty means all, `used` is set when it allowed something."""

    line: int
    rules: frozenset[str]
    reason: str
    standalone: bool
    used: bool = False

    def covers(self, rule: str) -> bool:
        """Whether the comment speaks of this rule and gives a reason."""
        return bool(self.reason) and (not self.rules or rule in self.rules)


@dataclass(eq=False)
class Function:
    """A function, method, nested function or lambda of the scanned files."""

    key: str
    qualname: str
    node: FunctionNode
    module: Module
    owner: Class | None = None
    parent: Function | None = None
    closure: dict[str, Value] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Last part of the qualified name."""
        return self.qualname.rsplit(".", 1)[-1]

    @cached_property
    def mentions(self) -> frozenset[str]:
        """Names and attributes that the body loads."""
        nodes = [n for n in ast.walk(self.node) if isinstance(n, ast.Name | ast.Attribute)]
        return frozenset(n.id if isinstance(n, ast.Name) else n.attr for n in nodes)

    @property
    def decorators(self) -> frozenset[str]:
        """Last names of the decorators, calls included."""
        if isinstance(self.node, ast.Lambda):
            return frozenset()
        heads = (d.func if isinstance(d, ast.Call) else d for d in self.node.decorator_list)
        return frozenset(
            h.attr if isinstance(h, ast.Attribute) else h.id for h in heads if isinstance(h, (ast.Attribute, ast.Name))
        )


@dataclass(eq=False, slots=True)
class Class:
    """A class of the scanned files; `attributes` is filled by the interpreter from assignments to `self`."""

    key: str
    node: ast.ClassDef
    module: Module
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    inferred: bool = False


@dataclass(eq=False, slots=True)
class Module:
    """One parsed file."""

    path: str
    name: str
    tree: ast.Module
    is_package: bool
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    globals: dict[str, Value] = field(default_factory=dict)
    allowances: list[Allowance] = field(default_factory=list)
    inferred: bool = False

    def allowance_for(self, lines: Iterable[int], rule: str) -> Allowance | None:
        """Comment on one of `lines`, or alone on the line above the first, that allows `rule`."""
        wanted = list(lines)
        for allowance in self.allowances:
            above = allowance.standalone and wanted and allowance.line == wanted[0] - 1
            if (allowance.line in wanted or above) and allowance.covers(rule):
                return allowance
        return None


class Project:
    """All modules of one scan and the names they define."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, Class] = {}
        self._by_path: dict[str, Module] = {}

    def add_file(self, path: Path) -> Module:
        """Parse a file once; unreadable or malformed source is a :class:`MegaMoeConfigError` naming file and line."""
        shown = _display(path)
        if shown in self._by_path:
            return self._by_path[shown]
        try:
            with tokenize.open(path) as handle:
                text = handle.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as err:
            raise MegaMoeConfigError(f"cannot read {shown}: {err}; give Python source files or folders") from None
        return self.add_source(text, shown, _module_name(path), path.name == "__init__.py")

    def add_source(self, text: str, path: str, name: str, is_package: bool = False) -> Module:
        """Add source text under a display path and a dotted module name."""
        try:
            tree = ast.parse(text, filename=path)
        except (SyntaxError, ValueError) as err:
            line = getattr(err, "lineno", None)
            raise MegaMoeConfigError(
                f"cannot parse {path}:{line or 1}: {err.args[0]}; the scan needs valid Python"
            ) from None
        module = Module(path, name, tree, is_package)
        module.allowances = list(_allowances(text))
        _index(module)
        self.modules[name] = module
        self._by_path[path] = module
        for function in module.functions.values():
            self.functions[function.key] = function
        for class_ in module.classes.values():
            self.classes[class_.key] = class_
        return module

    def find(self, dotted: str) -> Function | Class | Module | None:
        """What a dotted name means in the given files, following re-exports; None when it lies outside."""
        for _ in range(8):
            if dotted in self.modules:
                return self.modules[dotted]
            found = self._split(dotted)
            if found is None:
                return None
            module, rest = found
            if rest in module.functions:
                return module.functions[rest]
            if rest in module.classes:
                return module.classes[rest]
            head, _, tail = rest.partition(".")
            if head not in module.imports:
                return None
            dotted = module.imports[head] + (f".{tail}" if tail else "")
        return None

    def _split(self, dotted: str) -> tuple[Module, str] | None:
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = self.modules.get(".".join(parts[:cut]))
            if module is not None:
                return module, ".".join(parts[cut:])
        return None

    def bases(self, class_: Class) -> Iterator[Class]:
        """The class and its bases inside the given files, nearest first."""
        seen: set[str] = set()
        queue = [class_]
        while queue:
            current = queue.pop(0)
            if current.key in seen:
                continue
            seen.add(current.key)
            yield current
            for base in current.node.bases:
                found = self.find_expression(current.module, base)
                if isinstance(found, Class):
                    queue.append(found)

    def method(self, class_: Class, name: str, after: Class | None = None) -> Function | None:
        """Method by name along the bases; with `after`, only those behind that class (`super()`)."""
        skipping = after is not None
        for candidate in self.bases(class_):
            if skipping:
                skipping = candidate is not after
                continue
            if name in candidate.methods:
                return candidate.methods[name]
        return None

    def find_expression(self, module: Module, node: ast.expr) -> Function | Class | Module | None:
        """What a (dotted, maybe subscripted or quoted) name written in `module` means."""
        dotted = dotted_name(node)
        if dotted is None:
            return None
        if dotted in module.classes:
            return module.classes[dotted]
        head, _, tail = dotted.partition(".")
        return self.find(module.imports[head] + (f".{tail}" if tail else "")) if head in module.imports else None


def dotted_name(node: ast.expr) -> str | None:
    """`a.b.c` of a name or attribute chain (also quoted or subscripted), else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Subscript):
        return dotted_name(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted_name(node.value)
        return f"{head}.{node.attr}" if head else None
    return None


def resolve_target(target: str) -> list[Path]:
    """Files behind one PATH argument: a file, a folder (all `*.py` below), or a dotted module name (not imported)."""
    path = Path(target)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(path.rglob("*.py"))
        if not files:
            raise MegaMoeConfigError(f"folder {target!r} holds no Python file; give files, folders or module names")
        return files
    if re.fullmatch(r"\w+(\.\w+)*", target):
        for root in (Path.cwd(), *(Path(entry) for entry in sys.path if entry)):
            base = root.joinpath(*target.split("."))
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if candidate.is_file():
                    return [candidate]
    raise MegaMoeConfigError(
        f"{target!r} is no file, folder or module on sys.path; give Python files, folders or module names"
    )


def _display(path: Path) -> str:
    resolved = path.resolve()
    try:
        return resolved.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return resolved.as_posix()


def _module_name(path: Path) -> str:
    path = path.resolve()
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(parts)) or path.stem


def _allowances(text: str) -> Iterator[Allowance]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := _ALLOW.search(token.string)):
            rules = frozenset(r.strip() for r in (match["rules"] or "").split(",") if r.strip())
            standalone = not token.line[: token.start[1]].strip()
            yield Allowance(token.start[0], rules, (match["reason"] or "").strip(), standalone)


def _index(module: Module) -> None:
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                module.imports[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = package.split(".")
                source = ".".join([*parts[: len(parts) - node.level + 1], *([source] if source else [])])
            for alias in node.names:
                module.imports[alias.asname or alias.name] = f"{source}.{alias.name}" if source else alias.name
    _index_body(module, module.tree.body, "", None, None)


def _index_body(
    module: Module, body: list[ast.stmt], prefix: str, owner: Class | None, parent: Function | None
) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            qualname = prefix + node.name
            function = Function(f"{module.name}:{qualname}", qualname, node, module, owner, parent)
            module.functions[qualname] = function
            if owner is not None and parent is None:
                owner.methods[node.name] = function
            _index_body(module, node.body, f"{qualname}.{LOCALS}.", owner, function)
        elif isinstance(node, ast.ClassDef):
            class_ = Class(f"{module.name}:{prefix}{node.name}", node, module)
            module.classes[prefix + node.name] = class_
            _index_body(module, node.body, f"{prefix}{node.name}.", class_, None)
        else:
            for _, nested in ast.iter_fields(node):
                if isinstance(nested, list) and nested and isinstance(nested[0], ast.stmt):
                    _index_body(module, nested, prefix, owner, parent)
