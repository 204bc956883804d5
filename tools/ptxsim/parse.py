# SPDX-License-Identifier: Apache-2.0
"""PTX text to a list of instructions with resolved labels, scoped names and parameters. Knows syntax, no semantics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import SimError

_IDENTIFIER = re.compile(r"[%$A-Za-z_][\w$]*")
_LABEL = re.compile(r"[$A-Za-z_][\w$]*")
_GUARD = re.compile(r"@(!?)(\S+)\s+(.*)", re.S)
_TOKEN = re.compile(r"::|[{};:]|[^{};:]+")
_RANGE = re.compile(r"(%?[A-Za-z_]\w*)<(\d+)>")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with all suffixes, such as "add.s32".
        parts: the opcode split at dots ("shared::cta" stays one part).
        operands: as written, names made unique over scopes, parameters as "param:N".
        guard, guard_negated: the predicate in front, or None.
        target: index of the instruction a branch goes to, else -1.
        line: line of the file.
    """

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    guard_negated: bool
    target: int
    line: int

    @property
    def text(self) -> str:
        """For messages."""
        guard = "" if self.guard is None else f"@{'!' if self.guard_negated else ''}{self.guard} "
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()

    def has(self, part: str) -> bool:
        """Whether the opcode carries this suffix."""
        return part in self.parts


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel: its instructions, launch bounds and register types ("pred", "b16", "b32", "b64", "f32", ...)."""

    name: str
    target: str
    threads: int
    num_params: int
    instructions: tuple[Instruction, ...]
    types: dict[str, str]

    def type_of(self, register: str) -> str:
        """Declared type of a register."""
        found = self.types.get(register)
        if found is None:
            found = self.types.get(register.rstrip("0123456789") + "<>")
        if found is None:
            raise SimError(f"register {register} is not declared")
        return found


def split_operands(text: str) -> tuple[str, ...]:
    """At the commas outside brackets and braces."""
    out, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        out.append(current.strip())
    return tuple(out)


class _Scope:
    def __init__(self, parent: _Scope | None, number: int) -> None:
        self.parent, self.number = parent, number
        self.names: dict[str, str] = {}
        self.labels: dict[str, int] = {}

    def name(self, text: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if text in scope.names:
                return scope.names[text]
            scope = scope.parent
        return text

    def label(self, text: str) -> int:
        scope: _Scope | None = self
        while scope is not None:
            if text in scope.labels:
                return scope.labels[text]
            scope = scope.parent
        raise SimError(f"branch to unknown label {text}")


def parse_file(path: Path) -> Program:
    """The only kernel of a PTX file."""
    return parse(path.read_text())


@lru_cache(maxsize=16)
def parse(text: str) -> Program:
    """The only kernel of a PTX text.

    Raises:
        SimError: no kernel, or a name that is not declared.
    """
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\(", text)
    if entry is None:
        raise SimError("the text has no .entry")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", text)
    target = re.search(r"\.target\s+(\w+)", text)
    if threads is None or target is None:
        raise SimError("the text has no .target or no .reqntid")
    header_end = text.index(")", entry.end())
    num_params = len(re.findall(r"\.param\b", text[entry.end() : header_end]))
    start = text.index("{", header_end)
    body = re.sub(rf"\b{re.escape(entry[1])}_param_(\d+)\b", r"param:\1", text[start + 1 : text.rindex("}")])
    instructions, types = _statements(body, text.count("\n", 0, start) + 1)
    return Program(entry[1], target[1], int(threads[1]), num_params, instructions, types)


def _statements(body: str, line: int) -> tuple[tuple[Instruction, ...], dict[str, str]]:
    raw: list[tuple[_Scope, str, int]] = []
    types: dict[str, str] = {}
    scope, scopes, buffer, depth, start = _Scope(None, 0), 1, "", 0, line
    for token in _TOKEN.findall(body):
        blank = not buffer.strip()
        if blank:
            start = line + token[: len(token) - len(token.lstrip())].count("\n")
        line += token.count("\n")
        if token == "{" and blank:
            scope = _Scope(scope, scopes)
            scopes += 1
        elif token == "}" and depth == 0:
            if scope.parent is None or not blank:
                raise SimError(f"line {line}: misplaced brace")
            scope = scope.parent
        elif token == ":" and _LABEL.fullmatch(buffer.strip()):
            scope.labels[buffer.strip()] = len(raw)
            buffer = ""
        elif token == ";":
            statement = " ".join(buffer.split())
            buffer = ""
            if statement.startswith(".reg"):
                _declare(statement, scope, types)
            elif statement and not statement.startswith("."):
                raw.append((scope, statement, start))
        else:
            depth += (token == "{") - (token == "}")
            buffer += token
    return tuple(_instruction(*item) for item in raw), types


def _declare(statement: str, scope: _Scope, types: dict[str, str]) -> None:
    _, kind, names = statement.split(None, 2)
    for name in names.split(","):
        found = _RANGE.fullmatch(name.strip())
        if found:
            types[found[1] + "<>"] = kind[1:]
            continue
        unique = f"{name.strip()}#{scope.number}"
        scope.names[name.strip()] = unique
        types[unique] = kind[1:]


def _instruction(scope: _Scope, statement: str, line: int) -> Instruction:
    guard, negated = None, False
    found = _GUARD.fullmatch(statement)
    if found:
        guard, negated, statement = scope.name(found[2]), bool(found[1]), found[3]
    opcode, _, rest = statement.partition(" ")
    parts = tuple(opcode.split("."))
    if parts[0] == "bra":
        return Instruction(opcode, parts, (), guard, negated, scope.label(rest.strip()), line)
    renamed = _IDENTIFIER.sub(lambda m: scope.name(m[0]), rest) if scope.names or scope.parent else rest
    return Instruction(opcode, parts, split_operands(renamed), guard, negated, -1, line)
