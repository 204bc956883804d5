# SPDX-License-Identifier: Apache-2.0
"""Compressed attention state: every `ratio` tokens become one cache entry, decided on the device."""

from __future__ import annotations

import torch

from trtllm_megamoe.errors import MegaMoeConfigError


class Compressor:
    """Pools windows of `ratio` tokens, weighted by a gate, into one entry each.

    The ring takes a token at every step. An entry is computed at every step too; only at a window's last token it goes
    to its slot, otherwise to a spill slot nobody reads. So the step has one form, whatever the position.

    Args:
        num_rows: Sequences side by side (the bucket).
        ratio: Tokens in a window: 4 or 128 in the models that do this.
        width: Values of a token.
        num_slots: Entries kept for each sequence; later ones are dropped into the spill slot.
        device: Where the state lives.

    Graph-safe: yes. Source: R54.
    """

    def __init__(self, num_rows: int, ratio: int, width: int, num_slots: int, device: torch.device | str) -> None:
        if min(num_rows, ratio, width, num_slots) < 1:
            raise MegaMoeConfigError(
                f"compressor sizes must be positive, got {num_rows=}, {ratio=}, {width=}, {num_slots=}"
            )
        self.ratio = ratio
        self.num_slots = num_slots
        self.ring = torch.zeros(num_rows, ratio, width, device=device)
        self.gates = torch.zeros(num_rows, ratio, device=device)
        self._slots = torch.zeros(num_rows, num_slots + 1, width, device=device)

    @property
    def entries(self) -> torch.Tensor:
        """Shape (rows, num_slots, width), a view; only the first `num_entries` of a row are meaningful."""
        return self._slots[:, : self.num_slots]

    def state(self) -> list[torch.Tensor]:
        """All tensors that a step changes."""
        return [self.ring, self.gates, self._slots]

    def num_entries(self, positions: torch.Tensor) -> torch.Tensor:
        """Entries complete once the tokens at `positions` are in; 0 for idle rows. Shape (rows,), int64."""
        return ((positions + 1) // self.ratio).clamp(min=0, max=self.num_slots)

    def step(self, values: torch.Tensor, gates: torch.Tensor, positions: torch.Tensor) -> None:
        """Take one token of each row.

        Args:
            values: Shape (rows, width), float32.
            gates: Shape (rows,), float32: the token's logit in its window.
            positions: Shape (rows,), int64, 0-based; -1 marks an idle row, which changes nothing that is read.
        """
        live = positions >= 0
        phase = positions.clamp(min=0) % self.ratio
        place = phase.view(-1, 1)
        wide = place.unsqueeze(-1).expand(-1, 1, values.shape[-1])
        self.ring.scatter_(1, wide, torch.where(live.view(-1, 1, 1), values.unsqueeze(1), self.ring.gather(1, wide)))
        self.gates.scatter_(1, place, torch.where(live.view(-1, 1), gates.unsqueeze(1), self.gates.gather(1, place)))
        pooled = (self.gates.softmax(dim=1).unsqueeze(-1) * self.ring).sum(dim=1, keepdim=True)
        window = positions.clamp(min=0) // self.ratio
        emits = live & (phase == self.ratio - 1) & (window < self.num_slots)
        slot = torch.where(emits, window, self.num_slots)
        self._slots.scatter_(1, slot.view(-1, 1, 1).expand(-1, 1, values.shape[-1]), pooled)
