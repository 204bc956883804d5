# SPDX-License-Identifier: Apache-2.0
"""Choosing and fetching a fixed number of cache entries; what does not exist is masked, never skipped."""

from __future__ import annotations

import torch


class TopKSelector:
    """The `k` best of the first `num_valid` columns of each row, always `k` wide.

    Args:
        num_columns: Width of the scores.
        k: Entries to choose, at most `num_columns`.
        device: Where the scores live.

    Graph-safe: yes. Source: R54.
    """

    def __init__(self, num_columns: int, k: int, device: torch.device | str) -> None:
        self.k = min(k, num_columns)
        self._columns = torch.arange(num_columns, device=device)

    def __call__(self, scores: torch.Tensor, num_valid: torch.Tensor) -> torch.Tensor:
        """Indices of the best columns, -1 where a row has fewer.

        Args:
            scores: Shape (rows, num_columns).
            num_valid: Shape (rows,), int64: columns that exist.

        Returns:
            Shape (rows, k), int64, best first.
        """
        exists = self._columns < num_valid.unsqueeze(1)
        best = scores.masked_fill(~exists, float("-inf")).topk(self.k, dim=1).indices
        return torch.where(best < num_valid.unsqueeze(1), best, -1)


def gather_rows(entries: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fetch entries by index; an index outside the entries gives zeros and is marked invalid.

    Args:
        entries: Shape (rows, num_columns, width).
        indices: Shape (rows, k), int64; -1 or any other value outside means "none".

    Returns:
        Fetched entries of shape (rows, k, width), and which are real, shape (rows, k), bool.
    """
    valid = (indices >= 0) & (indices < entries.shape[1])
    safe = torch.where(valid, indices, 0).unsqueeze(-1).expand(-1, -1, entries.shape[2])
    return entries.gather(1, safe).masked_fill(~valid.unsqueeze(-1), 0.0), valid
