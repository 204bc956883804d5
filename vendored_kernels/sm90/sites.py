# SPDX-License-Identifier: Apache-2.0
"""Where a bounded wait of the kernel can give up: the `site` word of an error record, for kernel and host. No DSL."""

SITE_STAGED = 1
"""Token warp: the pool rows of this launch (index: none; expected: CTAs)."""
SITE_FC1 = 2
"""Token warp: a token block of fc1 output (index: block; expected: fc1 row tiles)."""
SITE_FC2 = 3
"""Math warps: all result rows of this launch (index: none; expected: fc2 tiles)."""

SITE_NAMES = {SITE_STAGED: "staged tokens", SITE_FC1: "fc1 output block", SITE_FC2: "fc2 tiles"}
"""What the host's error message calls each site."""
