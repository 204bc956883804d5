# SPDX-License-Identifier: Apache-2.0
"""Closed sets of names for the layer's numerics: wire formats, activation modes, score placement.

The arithmetic behind each name is in docs/numerics.md; this module only holds names and byte counts.
"""

from __future__ import annotations

import enum


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class CombineFormat(str, enum.Enum):
    """Wire format of one route's result on its way back to the token owner (R4)."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"

    @classmethod
    def parse(cls, text: str) -> CombineFormat:
        """Accept the user's name or the wire name (`32e4m3xe8m0`, `16e2m1xbf16`)."""
        for member in cls:
            if text in (member.value, member.wire_name):
                return member
        allowed = ", ".join(f"{m.value} ({m.wire_name})" for m in cls)
        raise ValueError(f"combine format {text!r} is unknown; allowed: {allowed}")

    @property
    def wire_name(self) -> str:
        """Name that spells the encoding: block, element format, scale format."""
        return {"bf16": "bf16", "fp8": "32e4m3xe8m0", "fp4": "16e2m1xbf16"}[self.value]

    def data_row_bytes(self, hidden_size: int) -> int:
        """Bytes of one row's data plane."""
        return {"bf16": 2 * hidden_size, "fp8": hidden_size, "fp4": hidden_size // 2}[self.value]

    def scale_row_bytes(self, hidden_size: int) -> int:
        """Bytes of one row's scale plane, padded to 16; 0 for bf16."""
        raw = {"bf16": 0, "fp8": hidden_size // 32, "fp4": hidden_size // 8}[self.value]
        return round_up(raw, 16)


class ActivationMode(str, enum.Enum):
    """How activations enter fc1 and fc2 (R61)."""

    NVFP4 = "nvfp4"
    BF16 = "bf16"


class ScorePlacement(str, enum.Enum):
    """Where the routing weight multiplies a route (design D13)."""

    AFTER_FC2 = "after_fc2"
    BEFORE_REQUANT = "before_requant"

    @classmethod
    def for_architecture(cls, architecture: str | None) -> ScorePlacement:
        """The host's per-model choice: DeepSeek-V4 weighs before the requantisation, all others after fc2."""
        if architecture is not None and architecture.startswith("DeepseekV4"):
            return cls.BEFORE_REQUANT
        return cls.AFTER_FC2
