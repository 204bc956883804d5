# SPDX-License-Identifier: Apache-2.0
"""Static inputs of a decode step: tokens and positions, uploaded once for a request, advanced on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError

IDLE = -1


class DecodeIO:
    """Tokens and positions of a bucket's rows, at addresses that never change.

    Args:
        num_rows: Rows of the bucket.
        device: Where the step runs.

    Graph-safe: `advance` is; `upload` runs between replays.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.full((num_rows,), IDLE, dtype=torch.int64, device=device)
        self._pinned_tokens = torch.zeros(num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._pinned_positions = torch.zeros(num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._uploaded = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def state(self) -> list[torch.Tensor]:
        """All tensors that a step changes."""
        return [self.tokens, self.positions]

    def upload(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set all rows from host numbers: missing rows become idle. Waits for the previous upload only.

        Raises:
            MegaMoeConfigError: as many tokens as positions are needed.
            MegaMoeCapacityError: more rows than the buffers have.
        """
        if len(tokens) != len(positions):
            raise MegaMoeConfigError(f"{len(tokens)} tokens and {len(positions)} positions; give one position for each")
        if len(tokens) > len(self._pinned_tokens):
            raise MegaMoeCapacityError(f"{len(tokens)} rows exceed the bucket of {len(self._pinned_tokens)}")
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the staging buffers may still be read by the previous copy
        idle = len(self._pinned_tokens) - len(tokens)
        self._pinned_tokens.copy_(torch.tensor([*tokens, *[0] * idle]))
        self._pinned_positions.copy_(torch.tensor([*positions, *[IDLE] * idle]))
        self.tokens.copy_(self._pinned_tokens, non_blocking=True)
        self.positions.copy_(self._pinned_positions, non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()

    def advance(self, next_tokens: torch.Tensor) -> None:
        """Take the sampled tokens of live rows and move them one position on.

        Args:
            next_tokens: Shape (rows,), int64.
        """
        live = self.positions >= 0
        self.tokens.copy_(torch.where(live, next_tokens, self.tokens))
        self.positions.add_(live.to(torch.int64))
