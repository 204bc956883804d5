# SPDX-License-Identifier: Apache-2.0
"""What can be said about a compiled Blackwell kernel without a Blackwell GPU; called by `tools/check_kernels.py`.

Each rule is a count or a neighbourhood of instructions that `vendored_kernels/sm100` promises. That the instructions do
the right thing is shown by the interpreter (`tools/ptxsim`), not here.
"""

from __future__ import annotations

import re
from typing import Any

from tools.bulk_stores import unwaited_bulk_stores
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm100.config import (
    K_ATOM,
    K_STAGE,
    MAX_SHARED_BYTES,
    REGISTER_FILE,
    THREADS,
    TMEM_COLUMNS,
    KernelConfig,
    TileConfig,
)

FORBIDDEN = ("tanh.approx", "ld.global.nc", "ld.volatile", "membar", ".weak.")
FORBIDDEN_ALONE = ("cta_group::2", ".multicast::", "::cluster.b32", ".cluster.shared", "barrier.cluster")
"""What only pairs of CTAs have; `FORBIDDEN_IN_PAIRS`: what only single ones have."""
FORBIDDEN_IN_PAIRS = ("cta_group::1",)


def config_of(facts: dict[str, Any]) -> KernelConfig:
    """The configuration that a kernel's facts describe."""
    return KernelConfig(LayerSpec(**facts["layer"]), TileConfig(**facts["tile"]))


def expected_counts(config: KernelConfig) -> dict[str, int]:
    """PTX instructions (regular expressions at the start of a line) and how often each must appear."""
    steps = K_STAGE // K_ATOM
    exchange = {
        r"fence\.acq_rel\.sys": 2,  # in front of the size cells, of the payload tags
        r"st\.relaxed\.sys": 2,  # size cell, payload tag
        r"red\.release\.sys": 1,  # returned rows
        # two in each wait for a cell (two kinds of warps), for a payload tag and for returned rows
        r"ld\.acquire\.sys\.global\.b64": 8,
    }
    pair = {
        r"tcgen05\.commit\.cta_group::2\S*\.multicast::cluster": 2,
        r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\S*\.cta_group::2": 12,
        r"barrier\.cluster\.arrive": 2,  # allocation, exit
        r"barrier\.cluster\.wait": 2,
        r"mbarrier\.arrive\.release\.cluster\.shared::cluster": 2,  # a tile, and its tokens
        r"mbarrier\.arrive\.relaxed\.cluster\.shared::cluster": 4,  # entries given back by T, R, W; an accumulator
        r"fence\.release\.sync_restrict::shared::cta\.cluster": 3,  # before the three entries
        r"mbarrier\.try_wait\.parity\.acquire\.cluster": 7,  # entry: T, R, W, epilogue; tokens: T, epilogue; free entry
        r"mbarrier\.try_wait\.parity\.relaxed\.cluster": 2,  # accumulator: full, given back
        r"st\.shared::cluster\.b32": 8 + int(config.layer.weigh_before_requant),  # entry, whether given up, row facts
        r"ld\.shared::cluster\.b32": 1,  # whether a rank had aborted at entry
    }
    waits = 7 if config.exchange else 3
    group = rf"cta_group::{config.tile.ctas}"
    return {
        rf"tcgen05\.mma\.{group}\.kind::mxf4nvf4\.block_scale\.block16": steps,
        r"tcgen05\.mma": steps,
        rf"tcgen05\.cp\.{group}\.32x128b\.warpx4": steps * (1 + config.token_scale_blocks),
        r"tcgen05\.cp": steps * (1 + config.token_scale_blocks),
        rf"tcgen05\.alloc\.{group}": 1,
        rf"tcgen05\.relinquish_alloc_permit\.{group}": 1,
        rf"tcgen05\.dealloc\.{group}": 1,
        r"tcgen05\.commit": 2,  # a stage, an accumulator
        r"tcgen05\.ld": 1,
        r"tcgen05\.wait::ld": 1,
        r"tcgen05\.fence::after_thread_sync": 6,  # allocation, accumulator, stage, scale buffer, epilogue, exit
        r"tcgen05\.fence::before_thread_sync": 3,  # allocation, accumulator handed back, exit
        # codes and scales of weights and tokens, two GEMMs; a pair's weights are loaded by code of either CTA
        r"cp\.async\.bulk\.tensor\.2d": 12 if config.pair else 8,
        r"mbarrier\.init": config.num_barriers,
        r"fence\.mbarrier_init": 1,
        r"fence\.proxy\.async": 3 if config.exchange else 4,  # token warp, epilogue, release warp; staging of one rank
        r"red\.release\.gpu": 3,  # staged tokens, fc1 block, fc2 tile or pulled piece
        r"ld\.acquire\.gpu": 6,  # two in each of three waits
        r"ld\.acquire\.sys\.global\.b32": waits + 3,  # abort word in each wait, at the exit, in a departure's record
        r"st\.release\.sys": waits + (3 if config.exchange else 0),  # failures of waits and of two header words
        r"atom\.acq_rel\.gpu\.global\.add": 1,  # exit ticket
        **(exchange if config.exchange else {}),
        **(pair if config.pair else {}),
    }


def lint_ptx(text: str, facts: dict[str, Any]) -> list[str]:
    """Faults of the PTX; every rule fails when one of its instructions is removed."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("//")]
    forbidden = FORBIDDEN + (FORBIDDEN_IN_PAIRS if config_of(facts).pair else FORBIDDEN_ALONE)
    faults = [f"{word} must not appear" for word in forbidden if any(word in line for line in lines)]
    faults += unwaited_bulk_stores(lines)
    if f".target {facts['arch']}" not in lines:
        faults.append(f"target is not {facts['arch']}")
    for pattern, expected in expected_counts(config_of(facts)).items():
        found = sum(bool(re.match(pattern, line)) for line in lines)
        if found != expected:
            faults.append(f"{found} x {pattern}, expected {expected}")
    loads = [i for i, line in enumerate(lines) if line.startswith("tcgen05.ld")]
    if any(not lines[i + 1].startswith("tcgen05.wait::ld") for i in loads):
        faults.append("something stands between tcgen05.ld and its wait")
    return faults


def check_sass(lines: list[str], resources: str, facts: dict[str, Any]) -> list[str]:
    """Faults of the machine code and of the resource plan."""
    config = config_of(facts)
    faults = []
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", resources)}
    for name in ("STACK", "LOCAL"):
        if numbers[name]:
            faults.append(f"{name} {numbers[name]} bytes, must be 0")
    if numbers["REG"] * THREADS > REGISTER_FILE:
        faults.append(f"{numbers['REG']} registers x {THREADS} threads exceed {REGISTER_FILE}")
    if any(re.search(r"\b(LDL|STL)\b", line) for line in lines):
        faults.append("local memory instructions")
    steps = K_STAGE // K_ATOM
    two = ".2CTA" if config.pair else ""
    mma = f"UTCOMMA{two}.4X" if facts["arch"] == "sm_100a" else f"UTCOMMA{two}.BLOCK16"
    for opcode, expected in (
        (mma, steps),
        (f"UTCCP.T.S{two}", steps * (1 + config.token_scale_blocks)),
        (f"UTCBAR{two}{'.MULTICAST' if config.pair else ''}", 2),
        ("LDTM", 1),
    ):
        found = sum(opcode in line for line in lines)
        if found != expected:
            faults.append(f"{found} {opcode}, expected {expected}")
    if config.shared_bytes > MAX_SHARED_BYTES or config.tmem_allocated > TMEM_COLUMNS:
        faults.append(f"{config.shared_bytes} bytes of shared memory, {config.tmem_allocated} TMEM columns")
    return faults


def check_blackwell(text: str, lines: list[str], resources: str, facts: dict[str, Any]) -> list[str]:
    """All faults of one kernel."""
    return check_sass(lines, resources, facts) + lint_ptx(text, facts)
