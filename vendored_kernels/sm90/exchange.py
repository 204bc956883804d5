# SPDX-License-Identifier: Apache-2.0
"""What the exchange between ranks is on Hopper: token rows are pulled into the pool as f16.

All else is `common/exchange.py`; the kernel calls both under this module's name.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import ptx
from ..common import exchange
from ..common.exchange import (
    FEW_TOKENS,
    PRODUCER_BARRIER,
    STAGED_BARRIER,
    ExchangeOffsets,
    advance_expected,
    compare_headers,
    lay_out_sends,
    load_peers,
    offer_payload,
    place_routes,
    publish,
    receive_cells,
    receive_payload,
    share_table,
    wait_for_own_rows,
)

__all__ = [
    "FEW_TOKENS",
    "PRODUCER_BARRIER",
    "STAGED_BARRIER",
    "ExchangeOffsets",
    "advance_expected",
    "compare_headers",
    "lay_out_sends",
    "load_peers",
    "offer_payload",
    "pieces_per_row",
    "place_routes",
    "publish",
    "pull",
    "receive_cells",
    "receive_payload",
    "share_table",
    "wait_for_own_rows",
]

PIECE_COLUMNS = {"nvfp4": 1024, "bf16": 512}
"""Columns of a token row that one warp pulls at a time, its loads all in flight; the unit of `pool_ready`."""


def pieces_per_row(cfg) -> int:
    """Pieces of a pulled row."""
    return -(-cfg.layer.hidden_size // PIECE_COLUMNS[cfg.layer.activation_mode])


@cute.jit
def pull(
    cfg,
    ex: Int32,
    table: Int32,
    control: Int32,
    pool: Int64,
    row_meta: Int64,
    row_scale: Int64,
    row_weight: Int64,
    pool_ready: Int64,
    index_at: Int64,
    index_row_words,
    payload_at: Int64,
    payload_row_bytes,
    payload_scales_at: Int64,
    payload_scale_row_bytes,
    route_weights_at: Int64,
    bidx,
    gdim,
    warp,
    lane,
):
    """Dispatch warps: see `common.exchange.pull`; codes become f16 values on the way."""
    exchange.pull(
        cfg,
        pieces_per_row(cfg),
        _copy_piece,
        (pool, row_scale, row_weight),
        ex,
        table,
        control,
        row_meta,
        pool_ready,
        index_at,
        index_row_words,
        payload_at,
        payload_row_bytes,
        payload_scales_at,
        payload_scale_row_bytes,
        route_weights_at,
        bidx,
        gdim,
        warp,
        lane,
    )


@cute.jit
def _copy_piece(
    cfg,
    pool: Int64,
    row_scale: Int64,
    row_weight: Int64,
    payload: Int64,
    payload_scales: Int64,
    weight: Int64,
    row,
    piece,
    lane,
):
    """One warp: a piece of a staged row into a pool row as f16; with the first piece what belongs to the whole row."""
    layer = cfg.layer
    hidden = const_expr(layer.hidden_size)
    width = const_expr(PIECE_COLUMNS[layer.activation_mode])
    column = piece * width + lane * 8
    inside = [Int32(1) if column + p * 256 < hidden else Int32(0) for p in range(width // 256)]
    target = pool + (Int64(row) * hidden + column) * 2
    once = Int32(1) if piece == 0 and lane == 0 else Int32(0)
    if const_expr(layer.weigh_before_requant):
        ptx.stg32_if(row_weight + Int64(row) * 4, ptx.ldg32_if(weight, once), once)
    if const_expr(layer.activation_mode == "bf16"):
        scale = ptx.ldg32_if(payload_scales, once)
        rows = [ptx.ldg128_if(payload + (column + p * 256) * 2, inside[p]) for p in range(width // 256)]
        for p in cutlass.range_constexpr(width // 256):
            ptx.stg128_if(target + p * 512, *rows[p], inside[p])
        ptx.stg32_if(row_scale + Int64(row) * 4, scale, once)
    else:
        has_scales = Int32(1) if piece * width + lane * 64 < hidden else Int32(0)
        scales = ptx.ldg32_if(payload_scales + piece * (width // 16) + lane * 4, has_scales)
        codes = [ptx.ldg32_if(payload + (column + p * 256) // 2, inside[p]) for p in range(width // 256)]
        for p in cutlass.range_constexpr(width // 256):
            four = cute.arch.shuffle_sync(scales, p * 4 + lane // 8)
            byte = (four >> (lane // 2 % 4 * 8)) & 0xFF
            ptx.stg128_if(target + p * 512, *ptx.nvfp4_codes_as_f16(codes[p], byte), inside[p])
