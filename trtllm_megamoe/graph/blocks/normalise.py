# SPDX-License-Identifier: Apache-2.0
"""Iterative normalisation with a fixed number of iterations: no test for convergence, so no read by the host."""

from __future__ import annotations

import torch


def doubly_stochastic(logits: torch.Tensor, iterations: int = 20, epsilon: float = 1e-6) -> torch.Tensor:
    """Turn square matrices of logits into matrices whose rows and columns sum to 1 (Sinkhorn and Knopp).

    Args:
        logits: Shape (rows, n, n), float32.
        iterations: Alternations of row and column scaling; 20 bring small matrices to about 1e-5.
        epsilon: Added to sums, so that a column of zeros stays finite.

    Returns:
        Shape (rows, n, n), float32; columns sum to 1 exactly up to rounding, rows up to convergence.

    Graph-safe: yes; the loop is unrolled at capture. Source: R54.
    """
    matrix = (logits - logits.amax(dim=(-2, -1), keepdim=True)).exp()
    for _ in range(iterations):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + epsilon)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + epsilon)
    return matrix
