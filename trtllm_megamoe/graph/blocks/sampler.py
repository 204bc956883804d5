# SPDX-License-Identifier: Apache-2.0
"""Sampling on the device: noise from a counter, a fixed window of recent tokens, greedy beside random rows."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _mix(word: torch.Tensor) -> torch.Tensor:
    """Spread 32 bits over 32 bits (the finaliser of MurmurHash3), in int64 arithmetic that wraps."""
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B) & _MASK
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35) & _MASK
    return word ^ (word >> 16)


def counter_uniform(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Random numbers that are a function of (seed, position, column), so that eager, replay and any batch agree.

    No generator state exists that a graph would have to register, and a row's numbers do not depend on its neighbours.

    Args:
        seeds: Shape (rows,), int64, one for each request.
        positions: Shape (rows,), int64.
        columns: Shape (num_columns,), int64.

    Returns:
        Shape (rows, num_columns), float32, in (0, 1): odd multiples of 2^-24.
    """
    key = _mix((_mix(seeds & _MASK) + positions * _GOLDEN) & _MASK)
    word = _mix((key.unsqueeze(1) + columns * _GOLDEN) & _MASK)
    return ((word >> 9) * 2 + 1).to(torch.float32) * 2.0**-24


class Sampler:
    """Chooses one token a row.

    Args:
        num_rows: Rows of the bucket.
        vocab_size: Columns of the logits.
        window: Recent tokens of a row that the repetition penalty looks at.
        device: Where the logits live.

    `temperature` (0 means greedy), `penalty` (1 means none) and `seeds` are static buffers of shape (rows,) that the
    engine writes between steps.

    Graph-safe: yes. Source: R54.
    """

    def __init__(self, num_rows: int, vocab_size: int, window: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.window = window
        self.temperature = torch.zeros(num_rows, device=device)
        self.penalty = torch.ones(num_rows, device=device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # Empty places of the window name a column behind the vocabulary, which is cut off again.
        self.recent = torch.full((num_rows, window), vocab_size, dtype=torch.int64, device=device)
        self._seen = torch.zeros(num_rows, vocab_size + 1, device=device)
        self._columns = torch.arange(vocab_size, device=device)

    def state(self) -> list[torch.Tensor]:
        """All tensors that a step changes."""
        return [self.recent, self._seen]

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Sample and remember one token for each row; idle rows (position -1) remember nothing.

        Args:
            logits: Shape (rows, vocab_size), float32.
            positions: Shape (rows,), int64: position of the token that was fed in.

        Returns:
            Shape (rows,), int64.
        """
        self._seen.zero_()
        self._seen.scatter_(1, self.recent, 1.0)
        penalty = self.penalty.unsqueeze(1)
        punished = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(self._seen[:, : self.vocab_size] > 0, punished, logits)
        noise = -(-counter_uniform(self.seeds, positions, self._columns).log()).log()
        temperature = self.temperature.unsqueeze(1)
        drawn = (logits / temperature.clamp(min=1e-6) + noise).argmax(dim=1)
        tokens = torch.where(self.temperature > 0, drawn, logits.argmax(dim=1))
        place = (positions.clamp(min=0) % self.window).unsqueeze(1)
        kept = torch.where((positions >= 0).unsqueeze(1), tokens.unsqueeze(1), self.recent.gather(1, place))
        self.recent.scatter_(1, place, kept)
        return tokens
