# SPDX-License-Identifier: Apache-2.0
"""Reads the snippet corpus of the static scan: tests/data/graph_corpus. Used by the graph tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "data" / "graph_corpus"
_EXPECT = re.compile(r"#\s*expect:\s*(GR\d+(?:\s*,\s*GR\d+)*)")
_SNIPPET = re.compile(r"^# snippet: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """One snippet: source behind its file's preamble, and the findings it must give as (line, rule) pairs."""

    name: str
    source: str
    expected: frozenset[tuple[int, str]]


def read_snippets(folder: str) -> list[Snippet]:
    """All snippets of one folder of the corpus; the `# expect:` marks are cut from the source."""
    snippets = []
    for path in sorted((CORPUS / folder).glob("*.py")):
        preamble, *rest = _SNIPPET.split(path.read_text(encoding="utf-8"))
        for name, body in zip(rest[::2], rest[1::2], strict=True):
            lines, expected = [], set()
            for number, line in enumerate((preamble + body).splitlines(), start=1):
                mark = _EXPECT.search(line)
                if mark:
                    expected.update((number, rule.strip()) for rule in mark[1].split(","))
                    line = line[: mark.start()].rstrip()
                lines.append(line)
            snippets.append(Snippet(f"{path.stem}-{name}", "\n".join(lines) + "\n", frozenset(expected)))
    return snippets
