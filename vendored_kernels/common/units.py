# SPDX-License-Identifier: Apache-2.0
"""Units in which all kernels count, and warps that all have. For configurations, kernels and host; no DSL."""

SINGLE_WARPS = 4
"""Warps with one purpose each (weights, tokens, releases and one more); they build the tile table together."""

DISPATCH_WARPS = 4
"""Warps that publish size cells, offer payload and pull token rows from their owners (kernels with an exchange)."""

READY_ROWS = 32
"""Pool rows of one `pool_ready` counter; experts start at multiples of it."""

HELD_INDICES = 16
"""Words of each source's index row that dispatch keeps in shared memory: with few tokens, all of them."""

CONTROL_BYTES = 64
"""The control block of the bounded waits (waits.py) in shared memory."""

RETURN_COLUMNS = 128
"""Columns of a result row that count as one piece in the return counters, whatever tiles a rank runs."""


def exchange_words(ep_size: int, num_local_experts: int, route_table_experts: int) -> int:
    """32-bit words of the exchange's tables in shared memory (`ExchangeOffsets`); 0 for one rank."""
    if ep_size == 1:
        return 0
    per_rank = 4 + 2 * num_local_experts + HELD_INDICES
    return 2 * route_table_experts + per_rank * ep_size + num_local_experts + 4
