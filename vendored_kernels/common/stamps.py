# SPDX-License-Identifier: Apache-2.0
"""Timestamps from inside a launch, for kernels compiled with `timestamps`; nothing is emitted in all others.

One thread of a CTA writes each event (layout: `vendored_kernels/timeline.py`). Stores are not waited for, so a stamp
costs its thread a clock read.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import ptx
from ..timeline import CTA_WORDS, ENTERED, ENTERED_NS, FIRST_TILE, LEFT, LEFT_NS, TILE_COUNT, TRACE_TILES

BASE, TILES = 0, 8
"""Bytes of the shared words: address of this CTA's events; tiles so far."""
SHARED_BYTES = 16


@cute.jit
def enter(stamps: Int32, buffer: Int64, cta):
    """One thread, first of all: where this CTA writes, and when it came."""
    cycles = ptx.clock64()
    base = buffer + Int64(cta) * (8 * CTA_WORDS)
    ptx.sts64(stamps + BASE, base)
    ptx.sts32(stamps + TILES, 0)
    ptx.stg64(base + 8 * ENTERED, cycles)
    ptx.stg64(base + 8 * ENTERED_NS, cute.arch.globaltimer())


@cute.jit
def event(stamps: Int32, word):
    """One thread: this event happens now."""
    ptx.stg64(ptx.lds64(stamps + BASE) + 8 * word, ptx.clock64())


@cute.jit
def tile_begins(stamps: Int32):
    """One thread, always the same one, with `tile_ends`."""
    tiles = ptx.lds32(stamps + TILES)
    if tiles < TRACE_TILES:
        event(stamps, FIRST_TILE + 2 * tiles)


@cute.jit
def tile_ends(stamps: Int32, is_fc2):
    """The tile that began last is finished."""
    tiles = ptx.lds32(stamps + TILES)
    if tiles < TRACE_TILES:
        cycles = (ptx.clock64() >> 1 << 1) + Int64(is_fc2)
        ptx.stg64(ptx.lds64(stamps + BASE) + 8 * (FIRST_TILE + 1) + 16 * tiles, cycles)
    ptx.sts32(stamps + TILES, tiles + 1)


@cute.jit
def leave(stamps: Int32):
    """One thread, last of all."""
    base = ptx.lds64(stamps + BASE)
    ptx.stg64(base + 8 * TILE_COUNT, Int64(ptx.lds32(stamps + TILES)))
    ptx.stg64(base + 8 * LEFT, ptx.clock64())
    ptx.stg64(base + 8 * LEFT_NS, cute.arch.globaltimer())
