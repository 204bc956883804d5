# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a PTX text, one at a time: each removed or weakened wait, arrival, fence, release, acquire, count.

A test tool for the interpreter and for the kernels: a fault that no run catches is either harmless or not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text with one fault: what was done, on which line."""

    kind: str
    line: int
    before: str
    text: str


_RULES: tuple[tuple[str, str, str], ...] = (
    # kind, pattern of the statement, replacement ("" removes the statement)
    ("wait removed", r"mbarrier\.try_wait\.parity\S* (\S+), .*", r"setp.eq.b32 \1, 0, 0"),
    ("arrival removed", r"mbarrier\.arrive\.(?!expect_tx)\S* .*", ""),
    ("announced bytes removed", r"mbarrier\.arrive\.expect_tx\S* .*", ""),
    ("arrival count", r"(mbarrier\.init\S*) (\[[^\]]*\]), .*", r"\1 \2, 63"),
    ("barrier removed", r"bar\.(?:sync|arrive) .*", ""),
    ("cluster barrier removed", r"barrier\.cluster\.\w+", ""),
    ("fence removed", r"fence\..*", ""),
    ("release weakened", r"(red|st)\.release\.(gpu|sys)(.*)", r"\1.relaxed.\2\3"),
    ("acquire weakened", r"ld\.acquire\.(gpu|sys)(.*)", r"ld.relaxed.\1\2"),
    ("scope narrowed", r"(red\.release|st\.release|ld\.acquire)\.(gpu|sys)(.*)", r"\1.cta\3"),
    ("cluster release weakened", r"(mbarrier\.arrive)\.release\.cluster(.*)", r"\1.relaxed.cluster\2"),
    ("cluster release narrowed", r"(mbarrier\.arrive)\.release\.cluster(.*)", r"\1.release.cta\2"),
    ("cluster acquire weakened", r"(mbarrier\.try_wait\.parity)\.acquire\.cluster(.*)", r"\1.relaxed.cluster\2"),
    ("cluster acquire narrowed", r"(mbarrier\.try_wait\.parity)\.acquire\.cluster(.*)", r"\1.acquire.cta\2"),
    ("store to the other CTA removed", r"st\.shared::cluster.*", ""),
    ("own address for the leader's or the other CTA's", r"mapa\S+ (\S+), (\S+), .*", r"mov.b32 \1, \2"),
    ("order weakened", r"atom\.acq_rel\.(.*)", r"atom.relaxed.\1"),
    ("wgmma wait loosened", r"wgmma\.wait_group\.sync\.aligned\s+\d+", "wgmma.wait_group.sync.aligned 9"),
    ("bulk wait removed", r"cp\.async\.bulk\.wait_group.*", ""),
    ("bulk wait for reads only", r"cp\.async\.bulk\.wait_group\s+(\d+)", r"cp.async.bulk.wait_group.read \1"),
    ("tcgen05 fence removed", r"tcgen05\.fence.*", ""),
    ("tcgen05 load wait removed", r"tcgen05\.wait.*", ""),
    ("commit removed", r"tcgen05\.commit.*", ""),
    ("multicast to the leader only", r"(tcgen05\.commit\S* \S+), \S+", r"\1, 1"),
    ("multicast to the other CTA only", r"(tcgen05\.commit\S* \S+), \S+", r"\1, 2"),
    ("dealloc removed", r"tcgen05\.dealloc.*", ""),
)


def mutants(text: str, kinds: tuple[str, ...] = ()) -> Iterator[Mutant]:
    """Every applicable fault in order of the text; `kinds` restricts them."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        body = line.strip()
        if not body.endswith(";"):
            continue
        statement = re.sub(r"\s+", " ", body[:-1].strip())
        for kind, pattern, replacement in _RULES:
            if (kinds and kind not in kinds) or not re.fullmatch(pattern, statement):
                continue
            changed = re.sub(pattern, replacement, statement)
            if changed == statement:
                continue
            new = lines.copy()
            new[number] = changed + ";" if changed else ""
            yield Mutant(kind, number + 1, statement, "\n".join(new))


def abort_seen_at_entry(text: str, by: str) -> str:
    """The text as if the abort word had gone up while a launch begins: some see it at entry and some do not.

    `by` "others": all but the first thread of the CTA, of a pair of CTAs the leader's, see it; none goes by what these
    see. "other CTAs": all CTAs but the first (pair) see it. At entry each thread loads T, launch number, abort word.
    """
    load = r"^\tld\.global\.b{}\s+(%\w+), \[%rd\d+\];\n"
    entry = re.search(load.format(32) + load.format(64) + load.format(32), text, re.MULTILINE)
    if entry is None:
        raise ValueError("the three loads at entry are not where they were")
    pair = "barrier.cluster" in text
    if by == "others":
        who = f"mov.u32 a, %tid.x; and.b32 c, c, {int(pair)}; or.b32 a, a, c;"
    else:
        who = f"shr.u32 a, c, {int(pair)};"
    sees = f"setp.ne.s32 p, a, 0; selp.b32 {entry[3]}, 1, 0, p;"
    added = f"{{.reg .pred p; .reg .b32 a, c; mov.u32 c, %ctaid.x; {who} {sees}}}\n"
    return text[: entry.end()] + added + text[entry.end() :]
