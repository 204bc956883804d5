# SPDX-License-Identifier: Apache-2.0
"""Dispatch between ranks: routes and counts to the expert owners, token rows into expert order (docs/protocol.md).

The steps of one launch, in the protocol's words: `publish` as soon as routes are counted, meanwhile `stage` (the
kernel's staging, and `place_routes` here), `offer` once it is done; `cells`, `pull`; `fc1`, `fc2`, `reduce` follow
elsewhere. Nothing is reset by the host, no rank waits for a barrier: a size cell carries the launch's tag and is banked
by its parity, ready counters are banked and cleared by the other launch, payload tags and return counters only grow.
Called by a kernel where a layer has several ranks; knows no formats, no matrices.

`cfg` is the kernel's configuration of any architecture. Used here: `layer`, `threads`, `staging_threads` (which place
routes), `offer_barrier_threads` (which meet before CTA 0 offers: those that stage and one dispatch warp; 0: they have
met), `table_experts` and `route_table_experts` (padded numbers of experts: of this rank, of the layer), `token_block`
(rows of a full one), `pool_block_rows` (experts start at its multiples), `return_pieces` (row pieces of a full fc2
tile).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import ptx
from .routing import load_expert
from .sites import FAULT_RETURN, SITE_HEADER, SITE_PAYLOAD, SITE_RETURNS, SITE_STAGED
from .tiles import TABLE_BARRIER, TableOffsets
from .units import DISPATCH_WARPS, HELD_INDICES, READY_ROWS, SINGLE_WARPS
from .waits import (
    COUNT_BITS,
    LAUNCH,
    RANK,
    record_failure,
    wait_at_least,
    wait_for_cell,
    wait_for_peer,
)

PRODUCER_BARRIER = 11
"""Named barrier of the single-purpose warps and the dispatch warps together."""

PRODUCER_THREADS = 32 * (SINGLE_WARPS + DISPATCH_WARPS)

STAGED_BARRIER = 12
"""Named barrier of CTA 0's staging warps and the dispatch warp that offers, where that one has not staged itself."""

FEW_TOKENS = 4
"""So many tokens CTA 0 stages alone, which saves the others' hop through a counter."""

HEADER_FIXED_WORDS = 2
"""Words of a rank's header that never change: the buffers' generation, the layout's digest. Two banks of the launch's
facts follow: what all ranks must launch alike."""


class ExchangeOffsets:
    """Byte offsets of the exchange's shared tables (E experts in all, L local, R ranks)."""

    def __init__(self, cfg) -> None:
        ranks, local = cfg.layer.ep_size, cfg.layer.num_local_experts
        self.peers = 0  # u64 (R): shared bases
        self.sent = 8 * ranks  # (R): own routes per expert owner
        self.lost = self.sent + 4 * ranks  # not 0: some size cell never came; then total token blocks and live experts
        self.blocks = self.lost + 4
        self.live = self.lost + 8
        self.missing = self.lost + 12  # not 0: some payload tag never came
        self.counts = (
            16 * ranks + 16
        )  # (E): own routes per expert; once published, received routes per (source, expert)
        self.cursors = self.counts + 4 * cfg.route_table_experts  # (E): next place in the owner's index row
        self.first = self.cursors + 4 * cfg.route_table_experts  # (L, R + 1): rows of an expert before the i-th source
        self.start = self.first + 4 * local * (ranks + 1)  # (R, L): place of an expert in a source's index row
        self.held = self.start + 4 * ranks * local  # (R, HELD_INDICES): the first words of a source's index row


@cute.jit
def load_peers(cfg, ex: Int32, peers: Int64, thread):
    """Shared bases of all ranks into shared memory; nothing is lost or missing yet."""
    at = const_expr(ExchangeOffsets(cfg))
    if thread < cfg.layer.ep_size:
        ptx.sts64(ex + at.peers + thread * 8, ptx.ldg64(peers + Int64(thread) * 8))
    if thread == 0:
        ptx.sts32(ex + at.lost, 0)
        ptx.sts32(ex + at.missing, 0)


def payload_tags(cfg) -> int:
    """Bytes from the first size cell to the payload tags, one u64 per source: they lie behind both banks."""
    return 2 * 8 * cfg.layer.num_experts


@cute.jit
def _scan(value, lane):
    """Inclusive sum over the lanes of a warp."""
    for d in (1, 2, 4, 8, 16):
        other = ptx.shuffle_up(value, d)
        value = value + (other if lane >= d else Int32(0))
    return value


@cute.jit
def lay_out_sends(cfg, ex: Int32, warp, lane):
    """One warp per owner: routes per expert, this CTA's write cursors in the owner's index row, routes per owner."""
    at = const_expr(ExchangeOffsets(cfg))
    local = const_expr(cfg.layer.num_local_experts)
    owner = warp
    while owner < cfg.layer.ep_size:
        carry = Int32(0)
        for first in cutlass.range_constexpr(0, local, 32):
            inside = first + lane < local
            word = (owner * local + first + lane) * 4
            before = Int32(0)
            total = Int32(0)
            if inside:
                before = ptx.lds32(ex + at.cursors + word)
                total = before + ptx.lds32(ex + at.counts + word)
            upto = _scan(total, lane)
            if inside:
                ptx.sts32(ex + at.counts + word, total)
                ptx.sts32(ex + at.cursors + word, carry + upto - total + before)
            carry = carry + cute.arch.shuffle_sync(upto, 31)
        if lane == 0:
            ptx.sts32(ex + at.sent + owner * 4, carry)
        owner = owner + const_expr(cfg.threads // 32)


@cute.jit
def place_routes(
    cfg,
    ex: Int32,
    ids: Int64,
    ids_are_64,
    weights: Int64,
    index_at: Int64,
    index_row_words,
    route_weights_at: Int64,
    rank,
    first_route,
    own_routes,
    thread,
):
    """Each of this CTA's live routes into its owner's index row; its weight to where the owner will read it."""
    at = const_expr(ExchangeOffsets(cfg))
    layer = cfg.layer
    own = ptx.lds64(ex + at.peers + rank * 8)
    i = thread
    while i < own_routes:
        route = first_route + i
        expert = load_expert(ids, route, Int32(1), ids_are_64, layer.num_experts)
        if expert >= 0:
            owner = expert // layer.num_local_experts
            place = ptx.shared_add(ex + at.cursors + expert * 4, 1)
            row = ptx.lds64(ex + at.peers + owner * 8) + index_at
            ptx.stg32(row + (Int64(rank) * Int64(index_row_words) + place) * 4, route)
            if const_expr(layer.weigh_before_requant):
                ptx.stg32(own + route_weights_at + Int64(route) * 4, ptx.ldg32(weights + Int64(route) * 4))
        i = i + const_expr(cfg.staging_threads)


@cute.jit
def publish(cfg, ex: Int32, control: Int32, cells_at: Int64, header_at: Int64, launch_facts: Int64, thread):
    """CTA 0's dispatch warps, routes counted: one size cell per expert of the layer, also where the count is 0.

    Each thread's fence stands between its store of the launch's facts and its own cells. Nothing is said of payload.
    """
    at = const_expr(ExchangeOffsets(cfg))
    ranks, local = const_expr(cfg.layer.ep_size), const_expr(cfg.layer.num_local_experts)
    rank = ptx.lds32(control + RANK)
    tag = ptx.lds64(control + LAUNCH) + 1
    own_facts = ptx.lds64(ex + at.peers + rank * 8) + header_at + (HEADER_FIXED_WORDS + (Int32(tag) & 1)) * 8
    ptx.stg64(own_facts, ptx.ldg64(launch_facts))  # every thread, so that each one's fence covers it
    ptx.fence_acq_rel_sys()
    expert = thread
    while expert < cfg.layer.num_experts:
        owner = expert // local
        cell = ptx.lds64(ex + at.peers + owner * 8) + cells_at
        place = ((Int32(tag) & 1) * ranks + rank) * local + expert - owner * local
        count = ptx.lds32(ex + at.counts + expert * 4)
        ptx.peer_flag_store_relaxed_sys64(cell + Int64(place) * 8, tag * (1 << COUNT_BITS) + Int64(count))
        expert = expert + 32 * DISPATCH_WARPS


@cute.jit
def offer_payload(cfg, ex: Int32, control: Int32, staged: Int64, other_ctas, cells_at: Int64, lane):
    """One dispatch warp of CTA 0: when every CTA has staged, this launch's tag to every owner, a lane for each.

    The warp meets the staging warps of its own CTA at a barrier and waits for the `other_ctas` at a counter. Each
    lane's fence stands between what the warp saw of these (payload, index rows, routing weights) and its own tag.
    """
    at = const_expr(ExchangeOffsets(cfg))
    ranks = const_expr(cfg.layer.ep_size)
    if const_expr(cfg.offer_barrier_threads > 0):
        cute.arch.barrier(barrier_id=STAGED_BARRIER, number_of_threads=cfg.offer_barrier_threads)
    gave_up = Int32(0)
    if lane == 0 and other_ctas > 0:
        gave_up = wait_at_least(staged, other_ctas, control, ranks, SITE_STAGED, 0)
    gave_up = ptx.broadcast_lane0(gave_up)
    cute.arch.sync_warp()  # what lane 0 has acquired, every lane's fence covers
    if gave_up == 0 and lane < ranks:
        ptx.fence_acq_rel_sys()
        tags = ptx.lds64(ex + at.peers + lane * 8) + cells_at + const_expr(payload_tags(cfg))
        tag = ptx.lds64(control + LAUNCH) + 1
        ptx.peer_flag_store_relaxed_sys64(tags + Int64(ptx.lds32(control + RANK)) * 8, tag)


@cute.jit
def compare_headers(cfg, ex: Int32, control: Int32, header_at: Int64, peer):
    """After the cells: the peer's buffer must be the one this rank was built with, its launch one of the same layer.

    Nothing is compared when cells are missing: facts are as late as they are.
    """
    at = const_expr(ExchangeOffsets(cfg))
    rank = ptx.lds32(control + RANK)
    facts = HEADER_FIXED_WORDS + ((ptx.lds32(control + LAUNCH) + 1) & 1)
    lost = ptx.lds32(ex + at.lost)
    for i in cutlass.range_constexpr(HEADER_FIXED_WORDS + 1):
        word = facts if i == HEADER_FIXED_WORDS else Int32(i)
        expected = ptx.ldg64(ptx.lds64(ex + at.peers + rank * 8) + header_at + Int64(word) * 8)
        seen = ptx.ldg64(ptx.lds64(ex + at.peers + peer * 8) + header_at + Int64(word) * 8)
        if seen != expected and lost == 0:
            record_failure(control, cfg.layer.ep_size, Int32(SITE_HEADER), peer, expected, seen, peer)


@cute.jit
def receive_cells(cfg, ex: Int32, table: Int32, control: Int32, cells_at: Int64, thread):
    """Producer and dispatch warps: wait for every source's cells; from them the pool's layout (the producer warps) and
    places in the index rows (the dispatch warps).
    """
    at = const_expr(ExchangeOffsets(cfg))
    tab = const_expr(TableOffsets(cfg.table_experts))
    ranks, local = const_expr(cfg.layer.ep_size), const_expr(cfg.layer.num_local_experts)
    threads = const_expr(PRODUCER_THREADS)
    rank = ptx.lds32(control + RANK)
    lane = thread % 32
    tag = ptx.lds64(control + LAUNCH) + 1
    bank = ptx.lds64(ex + at.peers + rank * 8) + cells_at + Int64((Int32(tag) & 1) * (ranks * local * 8))
    i = thread
    while i < cfg.layer.num_experts:  # (source, local expert)
        count = wait_for_cell(bank + Int64(i) * 8, tag, control, ranks, i, i // local)
        if count < 0:
            ptx.sts32(ex + at.lost, 1)
        ptx.sts32(ex + at.counts + i * 4, count)
        i = i + threads
    cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=threads)
    lost = ptx.lds32(ex + at.lost)
    if thread < 128:
        e = thread
        while e < local:
            upto = Int32(0)
            for k in cutlass.range_constexpr(ranks):
                source = rank + (1 + k)  # rotated, so that all ranks do not pull from the same one at once
                source = source - ranks if source >= ranks else source
                ptx.sts32(ex + at.first + (e * (ranks + 1) + k) * 4, upto)
                count = ptx.lds32(ex + at.counts + (source * local + e) * 4)
                upto = upto + (count if lost == 0 else Int32(0))
            ptx.sts32(ex + at.first + (e * (ranks + 1) + ranks) * 4, upto)
            ptx.sts32(table + tab.rows + e * 4, upto)
            e = e + 128
        cute.arch.barrier(barrier_id=TABLE_BARRIER, number_of_threads=128)
        if thread < 32:
            carry = Int32(0)
            for first in cutlass.range_constexpr(0, cfg.table_experts, 32):
                rows = ptx.lds32(table + tab.rows + (first + lane) * 4)
                padded = (rows + (cfg.pool_block_rows - 1)) // cfg.pool_block_rows * cfg.pool_block_rows
                upto = _scan(padded, lane)
                ptx.sts32(table + tab.first_row + (first + lane) * 4, carry + upto - padded)
                carry = carry + cute.arch.shuffle_sync(upto, 31)
    else:
        for k in cutlass.range_constexpr(-(-ranks // DISPATCH_WARPS)):
            source = (thread - 128) // 32 + k * DISPATCH_WARPS
            carry = Int32(0)
            for first in cutlass.range_constexpr(0, local, 32):
                inside = first + lane < local and source < ranks
                word = (source * local + first + lane) * 4
                count = Int32(0)
                if inside:
                    count = ptx.lds32(ex + at.counts + word)
                upto = _scan(count, lane)
                if inside:
                    ptx.sts32(ex + at.start + word, carry + upto - count)
                carry = carry + cute.arch.shuffle_sync(upto, 31)


@cute.jit
def receive_payload(cfg, ex: Int32, control: Int32, cells_at: Int64, index_at: Int64, index_row_words, warp, lane):
    """Each dispatch warp, after :func:`receive_cells`: wait for its sources' tags, fetch how their index rows begin.

    A barrier of the dispatch warps must follow: they share what they have fetched, and what they have acquired. A tag
    may be the next launch's where the source sent nothing to this rank.
    """
    at = const_expr(ExchangeOffsets(cfg))
    ranks, local = const_expr(cfg.layer.ep_size), const_expr(cfg.layer.num_local_experts)
    own = ptx.lds64(ex + at.peers + ptx.lds32(control + RANK) * 8)
    awaited = warp + lane * DISPATCH_WARPS
    if awaited < ranks:
        tags = own + cells_at + const_expr(payload_tags(cfg))
        tag = ptx.lds64(control + LAUNCH) + 1
        if wait_for_peer(tags + Int64(awaited) * 8, tag, control, ranks, SITE_PAYLOAD, awaited) != 0:
            ptx.sts32(ex + at.missing, 1)
    cute.arch.sync_warp()  # what one lane has acquired, all lanes read
    usable = ptx.lds32(ex + at.lost) + ptx.lds32(ex + at.missing) == 0
    routes = []
    for k in cutlass.range_constexpr(-(-ranks // DISPATCH_WARPS)):
        source = warp + k * DISPATCH_WARPS
        wanted = Int32(0)
        if lane < HELD_INDICES and source < ranks and usable:
            last = (source * local + local - 1) * 4
            sent = ptx.lds32(ex + at.start + last) + ptx.lds32(ex + at.counts + last)
            wanted = Int32(1) if lane < sent else Int32(0)
        row = own + index_at + Int64(source) * (Int64(index_row_words) * 4)
        routes.append(ptx.ldg32_if(row + Int64(lane) * 4, wanted))
    for k in cutlass.range_constexpr(-(-ranks // DISPATCH_WARPS)):
        source = warp + k * DISPATCH_WARPS
        if lane < HELD_INDICES and source < ranks:
            ptx.sts32(ex + at.held + (source * HELD_INDICES + lane) * 4, routes[k])


@cute.jit
def share_table(cfg, ex: Int32, blocks, live, thread):
    """The single-purpose warps: what dispatch needs besides the tile table; a barrier of all of them follows."""
    at = const_expr(ExchangeOffsets(cfg))
    if thread == 0:
        ptx.sts32(ex + at.blocks, blocks)
        ptx.sts32(ex + at.live, live)


@cute.jit
def rows_of_source(cfg, ex: Int32, expert, first, valid, k):
    """How many of an expert's rows [first, first + valid) came from its k-th source."""
    at = const_expr(ExchangeOffsets(cfg))
    entry = ex + at.first + (expert * (cfg.layer.ep_size + 1) + k) * 4
    begin, end = ptx.lds32(entry), ptx.lds32(entry + 4)
    begin = begin if begin > first else first
    end = end if end < first + valid else first + valid
    return end - begin if end > begin else Int32(0)


@cute.jit
def _find_row(cfg, ex: Int32, table: Int32, slot, rank):
    """Slot of the tile order -> (expert, row in the expert or -1, source, place in the source's index row)."""
    at = const_expr(ExchangeOffsets(cfg))
    tab = const_expr(TableOffsets(cfg.table_experts))
    ranks, local = const_expr(cfg.layer.ep_size), const_expr(cfg.layer.num_local_experts)
    block_rows = const_expr(cfg.token_block)
    block = slot // block_rows
    low = Int32(0)  # becomes the last live expert of the order whose first block is not behind `block`
    high = ptx.lds32(ex + at.live) - 1
    while low < high:
        middle = (low + high + 1) // 2
        behind = ptx.lds32(table + tab.first_block + middle * 4) > block
        high = middle - 1 if behind else high
        low = low if behind else middle
    expert = ptx.lds32(table + tab.order + low * 4)
    row = slot - ptx.lds32(table + tab.first_block + low * 4) * block_rows
    k = Int32(0)
    entry = ex + at.first + expert * ((ranks + 1) * 4)
    for j in cutlass.range_constexpr(1, ranks):
        k = k + (Int32(1) if ptx.lds32(entry + j * 4) <= row else Int32(0))
    source = rank + 1 + k
    source = source - ranks if source >= ranks else source
    place = ptx.lds32(ex + at.start + (source * local + expert) * 4) + row - ptx.lds32(entry + k * 4)
    row = row if row < ptx.lds32(table + tab.rows + expert * 4) else Int32(-1)
    return expert, row, source, place


@cute.jit
def pull(
    cfg,
    pieces: cutlass.Constexpr,
    copy_piece: cutlass.Constexpr,
    context: tuple,
    ex: Int32,
    table: Int32,
    control: Int32,
    row_meta: Int64,
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
    """Dispatch warps: copy token rows from their owners into the pool in tile order, a piece of a row at a time.

    A row has `pieces` of them; `copy_piece(cfg, *context, payload, its scales, weight, row, piece, lane)` copies one,
    given its token's addresses. A warp looks up 32 pieces at once, one per lane, then copies them one after the other.
    Neighbouring pieces belong to different CTAs, so the first tiles' rows come from all of them.
    """
    at = const_expr(ExchangeOffsets(cfg))
    tab = const_expr(TableOffsets(cfg.table_experts))
    if ptx.lds32(ex + at.missing) == 0:  # nobody may be told of rows whose source gave no word
        item = warp * gdim + bidx
        # What is cheap to read again is not kept: these warps have few registers.
        while item < ptx.lds32(ex + at.blocks) * const_expr(cfg.token_block * pieces):
            total = ptx.lds32(ex + at.blocks) * const_expr(cfg.token_block * pieces)
            mine = item + lane * (gdim * DISPATCH_WARPS)
            rank = ptx.lds32(control + RANK)
            word = Int32(0)  # source and route
            pool_row = Int32(-1)
            piece = Int32(0)
            if mine < total:
                slot = mine // pieces
                piece = mine - slot * pieces
                expert, row, source, place = _find_row(cfg, ex, table, slot, rank)
                if row >= 0:
                    pool_row = ptx.lds32(table + tab.first_row + expert * 4) + row
                    index = ptx.lds64(ex + at.peers + rank * 8) + index_at
                    held = Int32(1) if place < HELD_INDICES else Int32(0)
                    route = ptx.ldg32_if(index + (Int64(source) * Int64(index_row_words) + place) * 4, Int32(1) - held)
                    if held != 0:
                        route = ptx.lds32(ex + at.held + (source * HELD_INDICES + place) * 4)
                    word = source * (1 << COUNT_BITS) + route
                    if piece == 0:
                        ptx.stg_pair(row_meta + Int64(pool_row) * 8, source, route)
            waiting = ptx.ballot(Int32(1) if pool_row >= 0 else Int32(0))
            while waiting != 0:
                j = ptx.first_bit(waiting)
                waiting = waiting & (waiting - 1)
                this_row = cute.arch.shuffle_sync(pool_row, j)
                this_piece = cute.arch.shuffle_sync(piece, j)
                packed = cute.arch.shuffle_sync(word, j)
                base = ptx.lds64(ex + at.peers + (packed >> COUNT_BITS) * 8)
                route = packed & ((1 << COUNT_BITS) - 1)
                token = Int64(route // cfg.layer.top_k)
                copy_piece(
                    cfg,
                    *context,
                    base + payload_at + token * Int64(payload_row_bytes),
                    base + payload_scales_at + token * Int64(payload_scale_row_bytes),
                    base + route_weights_at + Int64(route) * 4,
                    this_row,
                    this_piece,
                    lane,
                )
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.flag_add_release_gpu(pool_ready + Int64(this_row // READY_ROWS) * 4, 1)
            item = item + gdim * (32 * DISPATCH_WARPS)


@cute.jit
def rows_of(
    cfg, ex: Int32, table: Int32, control: Int32, returns_at: Int64, fault_step, expert, row_tile, row0, valid, lane
):
    """R: row pieces of a tile that belong to this lane's source, the lane-th after this rank.

    A piece is 128 columns of a result row: counted so, ranks agree whatever tiles each of them runs.
    """
    tab = const_expr(TableOffsets(cfg.table_experts))
    count = Int32(0)
    if lane < cfg.layer.ep_size:
        first = row0 - ptx.lds32(table + tab.first_row + expert * 4)
        columns = const_expr(cfg.return_pieces)
        rest = cfg.layer.result_pieces - row_tile * columns
        count = rows_of_source(cfg, ex, expert, first, valid, lane) * (rest if rest < columns else Int32(columns))
    return count


@cute.jit
def give_back(cfg, ex: Int32, table: Int32, control: Int32, returns_at: Int64, fault_step, rows, lane):
    """R: adds finished rows of fc2 tiles to the return counters of their token owners, one lane per source."""
    at = const_expr(ExchangeOffsets(cfg))
    ranks = const_expr(cfg.layer.ep_size)
    if rows > 0 and fault_step != FAULT_RETURN:
        rank = ptx.lds32(control + RANK)
        source = rank + 1 + lane
        source = source - ranks if source >= ranks else source
        counter = ptx.lds64(ex + at.peers + source * 8) + returns_at + Int64(rank) * 8
        ptx.peer_flag_add_release_sys64(counter, Int64(rows))


@cute.jit
def wait_for_own_rows(cfg, ex: Int32, control: Int32, returns_at: Int64, expected: Int64, lane):
    """One warp of the token owner: until every expert owner has returned all rows that were ever sent to it."""
    at = const_expr(ExchangeOffsets(cfg))
    ranks = const_expr(cfg.layer.ep_size)
    if lane < ranks:
        sent = Int64(ptx.lds32(ex + at.sent + lane * 4)) * Int64(cfg.layer.result_pieces)
        target = ptx.ldg64(expected + Int64(lane) * 8) + sent
        counter = ptx.lds64(ex + at.peers + ptx.lds32(control + RANK) * 8) + returns_at + Int64(lane) * 8
        wait_for_peer(counter, target, control, ranks, SITE_RETURNS, lane)
    cute.arch.sync_warp()


@cute.jit
def advance_expected(cfg, ex: Int32, expected: Int64):
    """The last CTA out: this launch's routes join the cumulative expectation, in the unit of the return counters."""
    at = const_expr(ExchangeOffsets(cfg))
    for r in cutlass.range(cfg.layer.ep_size, unroll=1):
        cell = expected + Int64(r) * 8
        ptx.stg64(cell, ptx.ldg64(cell) + Int64(ptx.lds32(ex + at.sent + r * 4)) * Int64(cfg.layer.result_pieces))
