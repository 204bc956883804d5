# SPDX-License-Identifier: Apache-2.0
"""Where a bounded wait of the kernel can give up: the `site` word of an error record, for kernel and host. No DSL."""

SITE_STAGED = 1
"""Token warp of one rank, CTA 0 of several: the staged tokens of this launch (index: none; expected: CTAs)."""
SITE_FC1 = 2
"""Token warp: a token block of fc1 output (index: block; expected: fc1 row tiles)."""
SITE_FC2 = 3
"""Math warps, one rank: all result rows of this launch (index: none; expected: fc2 tiles)."""
SITE_CELLS = 4
"""Producer warps: every source's size cells (index: source * local experts + expert; expected: the launch's tag)."""
SITE_POOL = 5
"""Token warp: pulled rows of a 32-row pool block (index: block; expected: row pieces). Twice as patient as the
others, so that a source that is late is named by the wait for it."""
SITE_RETURNS = 6
"""Math warps: result rows from an expert owner (index: that rank; expected: cumulative 128-column pieces)."""
SITE_HEADER = 7
"""CTA 0: a peer's header word is not this rank's (index: that rank; expected: own word; seen: theirs)."""
SITE_PEER = 8
"""Not a wait: a rank had given up, and this one left with it (index: that rank; expected: for whom it waited, or -1)"""

SITE_PAYLOAD = 9
"""Dispatch warps: a source has staged (index: that rank; expected: the launch's tag)."""

SITE_NAMES = {
    SITE_STAGED: "staged tokens",
    SITE_FC1: "fc1 output block",
    SITE_FC2: "fc2 tiles",
    SITE_CELLS: "size cell",
    SITE_POOL: "pool block",
    SITE_RETURNS: "returned rows of rank",
    SITE_HEADER: "header of rank",
    SITE_PEER: "failure of rank",
    SITE_PAYLOAD: "payload of rank",
}
"""What the host's error message calls each site."""

FAULT_STAGED, FAULT_PUBLISH, FAULT_PULL, FAULT_RETURN = 1, 2, 3, 4
"""Values of the launch argument `fault_step`: a rank that stops before this step, for tests of the waits above."""
