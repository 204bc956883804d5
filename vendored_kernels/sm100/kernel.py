# SPDX-License-Identifier: Apache-2.0
"""`Sm100MegaMoeNvfp4Kernel`: one MoE layer of one rank as one persistent launch on Blackwell (sm_100a, sm_103a).

NEVER RUN ON HARDWARE. Compiled, inspected, and its PTX executed by an interpreter (docs/blackwell.md).

Purpose
    Routing ids and bf16 tokens in, bf16 layer output out: count routes, quantise tokens to NVFP4, dispatch them to the
    ranks that own their experts, fc1, SwiGLU, requantisation, fc2, result rows in wire format straight to the token
    owners, top-k sum there. FP4 x FP4 on the tensor cores (block of 16). The protocol between ranks is the Hopper
    kernel's, and so is its code (`common/exchange.py`, docs/protocol.md).
Supported
    1 to 16 ranks that can address each other's memory, whatever token block each of them runs; H and I multiples of 32,
    up to 256 local experts, top_k up to 16, any token count including 0 (read from device memory, so one captured graph
    serves every T of its bucket), ids int32 or int64 with masked (out of range) and duplicate entries, three wire
    formats, both score placements, one token block per kernel (32, 64, 128 or 256). A tile is one CTA's, or from 64
    tokens on a pair's: a cluster of two whose MMA takes 256 weight rows; each CTA loads and keeps its 128 of them, half
    of the tokens and the scales of all. An odd number of row tiles leaves one CTA of the last pair with rows that are
    dropped.
Not supported
    bf16 activations; all ranks in one launch; grids that are not fully resident (every CTA runs at once); pairs with an
    odd number of CTAs.
Operands (addresses; R pool rows, T tokens, E experts of this rank, K top_k; atoms(k) = ceil(k / 64), blocks(r) =
ceil(r / 128))
    w1_codes (E, 2I, H/2) u8          gate and up interleaved by 16 rows; two e2m1 a byte, even column in the low nibble
    w1_scales (E, blocks(2I), atoms(H), 512) u8, w2_scales (E, blocks(H), atoms(I), 512) u8     e4m3 atoms, padding 0
    w2_codes (E, H, I/2) u8
    scales (E + 1, 4) f32             {alpha_gate, alpha_up, alpha_down, qs2}; last row {qs1, 0} and a u64 that all
                                      ranks must launch with alike
    x (T, H) bf16; ids (T, K) i32 or i64; route_weights (T, K) f32; num_tokens i32; y (T, H) bf16
    pool (R, H/2) u8, pool_scales (blocks(R), atoms(H), 512) u8; h (R, I/2) u8, h_scales (blocks(R), atoms(I), 512) u8
    row_weight (R) f32; row_meta (R, 2) i32; route_rows (T, K) i32
    counters u32 (96): exit ticket, two banks of {claim, staged, fc2 done}; ready u32 (2, ready_words);
    pool_ready u32 (2, pool_ready_words); epoch u64; expected_returns u64 (ranks); error u64 (8)
    peers u64 (ranks): bases of the shared spaces; the regions behind them, at the same offsets on every rank: abort,
    header, size cells and payload tags, return counters, index rows, payload and its scales (in column order), routing
    weights, result rows and scales (trtllm_megamoe/regions.py has shapes; wire format by token * K + slot)
Scale atoms
    512 bytes for 128 rows x 4 blocks of 16: byte (r % 32) * 16 + (r % 128) / 32 * 4 + block. A load takes whole 128-row
    blocks, so it also reads other tokens' scales, perhaps while they are written, or scales of no token, perhaps NaN;
    at 256 tokens the codes of the next expert's rows as well. All of it ends in columns that are dropped.
Warp roles (12 warps, 1 CTA per SM)
    0-3    epilogue; at the start they stage tokens, at the end they sum routes
    4-7    helpers: they stage and sum too; with several ranks they send size cells before they stage (CTA 0), read
           them afterwards (with 8 to 11), send (CTA 0, one warp) and read payload tags, and pull rows of peers into the
           pool while tiles run
    8      MMA                                     9      W: table, claims, weight loads
    10     T: token loads, the only warp that waits for a tile's tokens
    11     R: releases; it also clears the next launch's counters and, in CTA 0, compares the ranks' headers
    A pair's even CTA leads: its W claims for both, its T waits for both, its MMA warp issues for both. The other CTA's
    W and T load what they are told, its MMA warp is idle; everything else is every CTA's own (pairs.py).
Pipelines (producer -> consumer, arrivals; [those of a pair, where they differ])
    full[stage]   W, T -> MMA: 2 and the bytes of both          empty[stage]  MMA -> W, T: 1 (commit) [to both CTAs]
                  [of both CTAs, in the leader]
    afull[pair]   MMA -> epilogue: 1 (commit) [to both CTAs]    aempty[pair]  epilogue -> MMA: one per warp [of both]
    ifull[slot]   W -> T, MMA, epilogue, R: 1 [the leader's W   iempty[slot]  T, MMA, R -> W: 3 [6: T, R and MMA or W of
                  to both CTAs, also to the other's W]                        both CTAs, to the leader]
    rfull[slot]   T -> epilogue: 1 (each row's route or         done[slot]    epilogue -> R: one per warp
                  weight; whether a wait failed)
                  [the leader's T to both, also to the other's T]
    TMEM: two accumulators (at 256 tokens they overlap, one pair), then four (two) buffers for a stage's scales. The
    manual orders scale copies before later MMAs only, so the MMA warp waits for empty[stage] of a buffer's last use.
Synchronisation contract, every kernel
    object           writer                                        reader                              reset
    h, h_scales      epilogue: st, fence.proxy.async, arrive on    T: ld.acquire.gpu >= row tiles,     stream
                     done; R: fence.proxy.async, red.release.gpu   fence.proxy.async, TMA
    claim            W: atom.relaxed.gpu                           (the value is all there is)         other bank, by R
    staged, ready,   as here                                       as here                             other bank, by R
    pool_ready,
    fc2 done
    TMEM             MMA: tcgen05.cp / mma, commit                 tcgen05.fence after the wait, ld    dealloc by warp 0
                                                                   wait::ld, fence before the arrival
    exit ticket,     last CTA out: atom.acq_rel.gpu; it stores     next launch: plain ld               the last CTA
    epoch, expected  them
    error, abort     first failure: exch, st; then st.release.sys  every wait: ld.acquire.sys;         host
                     to every rank's abort word                    a CTA's thread 0 at entry: plain ld
Pairs, beside the above (all in shared memory; barriers initialised, then a cluster barrier)
    ring entry,      leader's W, T: st.shared::cluster,            mbarrier.try_wait.acquire.cluster   as read
    row facts        mbarrier.arrive.release.cluster
    entry read       T, R, W: fence.release of own shared memory,  leader's W: the same                phase
                     mbarrier.arrive.relaxed.cluster; MMA: arrive
    accumulator      epilogue: tcgen05.wait::ld, fence::before,    MMA: try_wait.relaxed.cluster,      phase
    read             mbarrier.arrive.relaxed.cluster               fence::after
    abort at entry   leader: st.shared, cluster barrier            both: ld.shared::cluster            launch
    TMEM             cluster barrier, alloc by warp 0 of each      CTA barrier                         exit
    exit             every commit awaited by W of either CTA (accumulators': by the epilogues), cluster barrier, dealloc
One rank
    pool, scales,    staging warps: st, fence.proxy.async, named   T: ld.acquire.gpu,                  stream
    row_*            barrier, one red.release.gpu on `staged`      fence.proxy.async, TMA
    results          epilogue: st, arrive on done;                 all staging warps: ld.acquire.gpu,  stream
                     R: red.release.gpu on `fc2 done`              ld
Several ranks
    payload, index   staging warps: st, named barrier, one         peers' helpers: plain ld after      own next launch
    rows, weights    red.release.gpu on `staged`; a helper warp    their payload tags (never ld.nc)
                     of CTA 0: ld.acquire.gpu
    size cells,      CTA 0's helpers: fence.acq_rel.sys and        every CTA: ld.acquire.sys until     never: tag of the
    launch facts     st.relaxed.sys in each storing thread         the tag is this launch's            launch, two banks
    payload tags     a helper warp of CTA 0: fence.acq_rel.sys     every CTA's helpers:                never: they grow
                     and st.relaxed.sys in each storing lane       ld.acquire.sys >= this launch,
                                                                   barrier of theirs
    pool, scales,    helpers: st, syncwarp, red.release.gpu on     T: ld.acquire.gpu >= pieces,        stream
    row_*            pool_ready                                    fence.proxy.async, TMA
    results          epilogue: st to the token owner, arrive on    owner: ld.acquire.sys >= sum of     never: cumulative
                     done; R: red.release.sys on its counter       all routes sent, named barrier, ld
Provenance
    Written for this project; the main loop follows our own compile-only prototype, the tile stream the Hopper kernel.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from .. import ptx
from ..common import exchange, release, routing, tiles, wire
from ..common.exchange import PRODUCER_BARRIER, PRODUCER_THREADS, ExchangeOffsets
from ..common.sites import FAULT_PUBLISH, FAULT_PULL, FAULT_STAGED, SITE_FC2
from ..common.tiles import TABLE_BARRIER
from ..common.units import CONTROL_BYTES
from ..common.waits import (
    ABORT,
    ABORT_AT,
    CTAS,
    ERROR,
    GIVEN_UP,
    LAUNCH,
    PEERS,
    RANK,
    TIMEOUT,
    TOKENS,
    record_departure,
    wait_at_least,
)
from . import epilogue, mainloop, pairs, staging
from .config import EPILOGUE_WARPS, K_STAGE, RING_SLOTS, STAGING_WARPS, THREADS, KernelConfig
from .instructions import fence_after_sync, fence_before_sync

STAGING_BARRIER = 9
"""Named barrier of the staging warps; 1 is the epilogue's own, 10 the four other warps', 11 theirs and the helpers'."""


class Sm100MegaMoeNvfp4Kernel:
    """The kernel of one :class:`KernelConfig`; call it inside `cute.compile`."""

    def __init__(self, config: KernelConfig) -> None:
        self.cfg = config

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        w1_codes: Int64,
        w1_scales: Int64,
        w2_codes: Int64,
        w2_scales: Int64,
        scales: Int64,
        x: Int64,
        ids: Int64,
        route_weights: Int64,
        num_tokens: Int64,
        y: Int64,
        pool: Int64,
        pool_scales: Int64,
        row_weight: Int64,
        row_meta: Int64,
        route_rows: Int64,
        h: Int64,
        h_scales: Int64,
        counters: Int64,
        ready: Int64,
        pool_ready: Int64,
        epoch: Int64,
        expected_returns: Int64,
        error: Int64,
        timeout_ns: Int64,
        peers: Int64,
        abort_at: Int64,
        header_at: Int64,
        cells_at: Int64,
        returns_at: Int64,
        index_at: Int64,
        payload_at: Int64,
        payload_scales_at: Int64,
        route_weights_at: Int64,
        results_at: Int64,
        result_scales_at: Int64,
        pool_rows: Int32,
        ready_words: Int32,
        pool_ready_words: Int32,
        index_row_words: Int32,
        payload_row_bytes: Int32,
        payload_scale_row_bytes: Int32,
        ids_are_64: Int32,
        fault_step: Int32,
        dry: Int32,
        lag: Int32,
        rank: Int32,
        grid: Int32,
        stream,
    ):
        """One launch. `anchor` is any device tensor (it names the device); all else is an address or a number."""
        cfg = self.cfg
        layer = cfg.layer
        mma = mainloop.make_mma(cfg)
        layouts = mainloop.shared_layouts(cfg, mma)
        hidden, inter = layer.hidden_size, layer.intermediate_size
        maps1 = mainloop.tensor_maps(
            cfg, mma, layouts, w1_codes, w1_scales, pool, pool_scales, 2 * inter, pool_rows, hidden
        )
        maps2 = mainloop.tensor_maps(cfg, mma, layouts, w2_codes, w2_scales, h, h_scales, hidden, pool_rows, inter)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, cfg.stages]
            empty: cute.struct.MemRange[Int64, cfg.stages]
            afull: cute.struct.MemRange[Int64, 2]
            aempty: cute.struct.MemRange[Int64, 2]
            ifull: cute.struct.MemRange[Int64, RING_SLOTS]
            iempty: cute.struct.MemRange[Int64, RING_SLOTS]
            done: cute.struct.MemRange[Int64, RING_SLOTS]
            rfull: cute.struct.MemRange[Int64, RING_SLOTS]
            info: cute.struct.Align[cute.struct.MemRange[Int32, RING_SLOTS * 8], 16]
            hold: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            control: cute.struct.Align[cute.struct.MemRange[Int32, CONTROL_BYTES // 4], 16]
            rows: cute.struct.Align[cute.struct.MemRange[Int32, RING_SLOTS * cfg.tile.tokens], 16]
            table: cute.struct.Align[cute.struct.MemRange[Int32, cfg.table_words], 16]
            exchange: cute.struct.Align[cute.struct.MemRange[Int32, max(cfg.exchange_words, 4)], 16]
            buffer: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.epilogue_bytes], 128]
            weights: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.stages * 128 * K_STAGE // 2], 1024]
            tokens: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.stages * cfg.token_code_bytes], 1024]
            weight_scales: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.stages * cfg.weight_scale_bytes], 1024]
            token_scales: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.stages * cfg.token_scale_bytes], 1024]

        self.storage = Storage
        cluster = {"cluster": [cfg.tile.ctas, 1, 1]} if cfg.pair else {}
        self.kernel(
            mma,
            tuple(maps1),
            tuple(maps2),
            layouts,
            scales,
            x,
            ids,
            route_weights,
            num_tokens,
            y,
            pool,
            pool_scales,
            row_weight,
            row_meta,
            route_rows,
            h,
            h_scales,
            counters,
            ready,
            pool_ready,
            epoch,
            expected_returns,
            error,
            timeout_ns,
            peers,
            abort_at,
            header_at,
            cells_at,
            returns_at,
            index_at,
            payload_at,
            payload_scales_at,
            route_weights_at,
            results_at,
            result_scales_at,
            ready_words,
            pool_ready_words,
            index_row_words,
            payload_row_bytes,
            payload_scale_row_bytes,
            ids_are_64,
            fault_step,
            dry,
            lag,
            rank,
        ).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], **cluster, min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        maps1: tuple,
        maps2: tuple,
        layouts: tuple,
        scales: Int64,
        x: Int64,
        ids: Int64,
        route_weights: Int64,
        num_tokens: Int64,
        y: Int64,
        pool: Int64,
        pool_scales: Int64,
        row_weight: Int64,
        row_meta: Int64,
        route_rows: Int64,
        h: Int64,
        h_scales: Int64,
        counters: Int64,
        ready: Int64,
        pool_ready: Int64,
        epoch: Int64,
        expected_returns: Int64,
        error: Int64,
        timeout_ns: Int64,
        peers: Int64,
        abort_at: Int64,
        header_at: Int64,
        cells_at: Int64,
        returns_at: Int64,
        index_at: Int64,
        payload_at: Int64,
        payload_scales_at: Int64,
        route_weights_at: Int64,
        results_at: Int64,
        result_scales_at: Int64,
        ready_words: Int32,
        pool_ready_words: Int32,
        index_row_words: Int32,
        payload_row_bytes: Int32,
        payload_scale_row_bytes: Int32,
        ids_are_64: Int32,
        fault_step: Int32,
        dry: Int32,
        lag: Int32,
        rank: Int32,
    ):
        """The device side: set up, count routes, then the roles."""
        cfg = self.cfg
        layer = cfg.layer
        experts, slots = const_expr(layer.num_local_experts), const_expr(cfg.table_experts)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        cta = pairs.cta_rank(cfg, bidx)
        memory = cutlass.utils.SmemAllocator().allocate(self.storage)
        bars = tuple(
            getattr(memory, name).data_ptr()
            for name in ("full", "empty", "afull", "aempty", "ifull", "iempty", "done", "rfull")
        )
        info, rows_at = Int32(memory.info.data_ptr().toint()), Int32(memory.rows.data_ptr().toint())
        table, buffer = Int32(memory.table.data_ptr().toint()), Int32(memory.buffer.data_ptr().toint())
        hold = memory.hold.data_ptr()  # TMEM address, the number of fc2 tiles, whether some rank has aborted
        hold_at = Int32(hold.toint())
        la, lb, lsa, lsb = layouts
        smem = (
            cute.make_tensor(cute.recast_ptr(memory.weights.data_ptr(), la.inner, dtype=Float4E2M1FN), la.outer),
            cute.make_tensor(cute.recast_ptr(memory.tokens.data_ptr(), lb.inner, dtype=Float4E2M1FN), lb.outer),
            cute.make_tensor(cute.recast_ptr(memory.weight_scales.data_ptr(), dtype=Float8E4M3FN), lsa),
            cute.make_tensor(cute.recast_ptr(memory.token_scales.data_ptr(), dtype=Float8E4M3FN), lsb),
        )
        height = const_expr(cfg.token_scale_blocks)
        targets = (  # the same shared memory as TMA sees it: scales in u64
            smem[0],
            smem[1],
            cute.make_tensor(
                cute.recast_ptr(memory.weight_scales.data_ptr(), dtype=Int64),
                cute.make_layout((1, K_STAGE, cfg.stages), stride=(K_STAGE, 1, K_STAGE)),
            ),
            cute.make_tensor(
                cute.recast_ptr(memory.token_scales.data_ptr(), dtype=Int64),
                cute.make_layout((height, K_STAGE, cfg.stages), stride=(K_STAGE, 1, K_STAGE * height)),
            ),
        )
        at = const_expr(tiles.TableOffsets(slots))
        counts, cursors = table + at.rows, table + at.cursors
        control, ex = Int32(memory.control.data_ptr().toint()), Int32(memory.exchange.data_ptr().toint())
        bases = ex
        if const_expr(cfg.exchange):
            ex_at = const_expr(ExchangeOffsets(cfg))
            counts, cursors, bases = ex + ex_at.counts, ex + ex_at.cursors, ex + ex_at.peers

        if warp == STAGING_WARPS:
            for i in cutlass.range_constexpr(4):
                cpasync.prefetch_descriptor(maps1[2 * i])
                cpasync.prefetch_descriptor(maps2[2 * i])
        if warp == STAGING_WARPS + 1:
            if lane == 0:
                numbers = (cfg.stages, cfg.stages, 2, 2, RING_SLOTS, RING_SLOTS, RING_SLOTS, RING_SLOTS)
                for kind in cutlass.range_constexpr(8):
                    for i in cutlass.range_constexpr(numbers[kind]):
                        cute.arch.mbarrier_init(bars[kind] + i, list(mainloop.barrier_counts(cfg).values())[kind])
            cute.arch.mbarrier_init_fence()
        if const_expr(not cfg.pair):
            if warp == 0:
                cute.arch.alloc_tmem(cfg.tmem_allocated, hold)
                cute.arch.relinquish_tmem_alloc_permit()
        abort = abort_at
        if const_expr(cfg.exchange):
            abort = ptx.ldg64(peers + Int64(rank) * 8) + abort_at
        # One round trip for all three. The abort word may go up at any time: what thread 0 has seen, of a pair the
        # leader's, holds for all.
        tokens, finished, aborted = ptx.ldg32(num_tokens), ptx.ldg64(epoch), ptx.ldg32(abort)
        if tidx == 0:  # what waits and the end of the launch need
            ptx.sts64(control + LAUNCH, finished)
            ptx.sts32(control + TOKENS, tokens)
            ptx.sts32(control + RANK, rank)
            ptx.sts64(control + ERROR, error)
            ptx.sts64(control + ABORT, abort)
            ptx.sts64(control + TIMEOUT, timeout_ns)
            ptx.sts64(control + PEERS, peers)
            ptx.sts64(control + ABORT_AT, abort_at)
            ptx.sts32(control + GIVEN_UP, 0)
            ptx.sts32(control + CTAS, gdim)
            ptx.sts32(hold_at + 8, aborted)
        i = tidx
        while i < const_expr(cfg.route_table_experts if cfg.exchange else slots):
            ptx.sts32(counts + i * 4, 0)
            ptx.sts32(cursors + i * 4, 0)
            i = i + THREADS
        if const_expr(cfg.exchange):
            i = tidx
            while i < slots:  # experts that only pad the table have no rows
                ptx.sts32(table + at.rows + i * 4, 0)
                i = i + THREADS
            exchange.load_peers(cfg, ex, peers, tidx)
        if const_expr(cfg.pair):
            pairs.sync_ctas(cfg)
            if warp == 0:  # the two allocate together, so each must know that the other runs
                cute.arch.alloc_tmem(cfg.tmem_allocated, hold, True)
                cute.arch.relinquish_tmem_alloc_permit(True)
        fence_before_sync()
        cute.arch.sync_threads()
        fence_after_sync()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, hold)
        aborted = pairs.leader_word(cfg, hold_at + 8)
        if aborted == 0 and dry == 0:
            bank_index = Int32(finished) & 1
            bank = counters + Int64(tiles.FIRST_BANK + bank_index * tiles.BANK_WORDS) * 4
            ready_bank = ready + Int64(bank_index * ready_words) * 4
            pool_bank = pool_ready + Int64(bank_index * pool_ready_words) * 4
            first_token = tokens * bidx // gdim
            own_tokens = tokens * (bidx + 1) // gdim - first_token
            staging_ctas = tokens if tokens < gdim else gdim  # those with at least one token
            if const_expr(cfg.exchange):
                if tokens <= exchange.FEW_TOKENS:
                    first_token = Int32(0)
                    own_tokens = tokens if bidx == 0 else Int32(0)
                    staging_ctas = Int32(0)
                elif tokens >= gdim:  # CTA 0 has tokens of its own
                    staging_ctas = gdim - 1
            staging_ctas = staging_ctas + (Int32(1) if fault_step == FAULT_STAGED else Int32(0))
            routing.count_routes(
                layer.num_experts,
                THREADS,
                counts,
                cursors,
                ids,
                ids_are_64,
                tokens * layer.top_k,
                first_token * layer.top_k,
                tidx,
            )
            cute.arch.sync_threads()
            if const_expr(cfg.exchange):
                exchange.lay_out_sends(cfg, ex, warp, lane)
            elif warp == 0:
                routing.lay_out_pool(slots, cfg.pool_block_rows, counts, table + at.first_row, cursors, lane)
            cute.arch.sync_threads()
            if warp >= STAGING_WARPS:
                thread = tidx - STAGING_WARPS * 32
                if const_expr(cfg.exchange):
                    cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=PRODUCER_THREADS)
                    exchange.receive_cells(cfg, ex, table, control, cells_at, thread)
                blocks, live = tiles.order_experts(experts, slots, cfg.tile.tokens, TABLE_BARRIER, table, thread)
                if const_expr(cfg.exchange):  # the helpers may begin to pull
                    exchange.share_table(cfg, ex, blocks, live, thread)
                    cute.arch.barrier_arrive(barrier_id=PRODUCER_BARRIER, number_of_threads=PRODUCER_THREADS)
                row_tiles1, row_tiles2 = cfg.fc1_row_tiles, cfg.fc2_row_tiles
                if const_expr(cfg.pair):  # a pair's tile is two row tiles
                    row_tiles1, row_tiles2, lag = row_tiles1 // 2, row_tiles2 // 2, lag // 2
                tiles.lay_out_segments(slots, row_tiles1, row_tiles2, TABLE_BARRIER, table, lag, blocks, live, thread)
                if warp == STAGING_WARPS:
                    if cta == pairs.LEADER:
                        mainloop.mma_warp(cfg, bars, info, mma, smem, layouts, tmem, lane)
                elif warp == STAGING_WARPS + 1:
                    if const_expr(cfg.pair):
                        if cta == pairs.LEADER:
                            mainloop.leader_weight_warp(
                                cfg, bars, table, blocks, info, maps1, maps2, mma, targets, bank, bidx, gdim, lane
                            )
                        else:
                            mainloop.follower_weight_warp(cfg, bars, info, maps1, maps2, mma, targets, lane)
                    else:
                        mainloop.weight_warp(
                            cfg, bars, table, blocks, info, maps1, maps2, mma, targets, bank, bidx, gdim, lane
                        )
                elif warp == STAGING_WARPS + 2:
                    mainloop.token_warp(
                        cfg,
                        bars,
                        info,
                        rows_at,
                        maps1,
                        maps2,
                        mma,
                        targets,
                        table,
                        control,
                        row_meta,
                        row_weight,
                        bank,
                        ready_bank,
                        pool_bank,
                        staging_ctas,
                        cta,
                        lane,
                    )
                else:
                    if const_expr(cfg.exchange):
                        if bidx == 0 and lane < layer.ep_size:
                            exchange.compare_headers(cfg, ex, control, header_at, lane)
                    other = 1 - bank_index
                    tiles.clear_bank(
                        counters + Int64(tiles.FIRST_BANK + other * tiles.BANK_WORDS) * 4,
                        ready + Int64(other * ready_words) * 4,
                        ready_words,
                        pool_ready + Int64(other * pool_ready_words) * 4,
                        pool_ready_words,
                        bidx,
                        gdim,
                        lane,
                    )
                    release.release_warp(
                        cfg,
                        RING_SLOTS,
                        partial(pairs.wait, cfg),
                        partial(pairs.give_back_entry, cfg),
                        bars[4],
                        bars[5],
                        bars[6],
                        info,
                        bank,
                        ready_bank,
                        ex,
                        table,
                        control,
                        returns_at,
                        fault_step,
                        lane,
                    )
            else:
                first_route, own_routes = first_token * layer.top_k, own_tokens * layer.top_k
                target = (pool, pool_scales)
                if const_expr(cfg.exchange):
                    if bidx == 0 and warp >= EPILOGUE_WARPS and fault_step != FAULT_PUBLISH:
                        exchange.publish(
                            cfg,
                            ex,
                            control,
                            cells_at,
                            header_at,
                            scales + experts * 16 + 8,
                            tidx - EPILOGUE_WARPS * 32,
                        )
                    exchange.place_routes(
                        cfg,
                        ex,
                        ids,
                        ids_are_64,
                        route_weights,
                        index_at,
                        index_row_words,
                        route_weights_at,
                        rank,
                        first_route,
                        own_routes,
                        tidx,
                    )
                    own = ptx.lds64(bases + rank * 8)
                    target = (own + payload_at, payload_row_bytes, own + payload_scales_at, payload_scale_row_bytes)
                else:
                    routing.place_routes(
                        experts,
                        layer.weigh_before_requant,
                        STAGING_WARPS * 32,
                        cursors,
                        ids,
                        ids_are_64,
                        route_weights,
                        row_meta,
                        row_weight,
                        route_rows,
                        first_route,
                        own_routes,
                        tidx,
                    )
                    cute.arch.barrier(barrier_id=STAGING_BARRIER, number_of_threads=STAGING_WARPS * 32)
                qs = ptx.as_float(ptx.ldg32(scales + experts * 16))
                staging.stage_tokens(cfg, x, target, route_rows, qs, first_token, own_tokens, warp, lane)
                if const_expr(not cfg.exchange):
                    ptx.fence_proxy_async()
                cute.arch.barrier(barrier_id=STAGING_BARRIER, number_of_threads=STAGING_WARPS * 32)
                if tidx == 0 and own_tokens > 0:
                    if const_expr(cfg.exchange):
                        if bidx > 0:
                            ptx.flag_add_release_gpu(bank + tiles.STAGED * 4, 1)
                    else:
                        ptx.flag_add_release_gpu(bank + tiles.STAGED * 4, 1)
                if warp < EPILOGUE_WARPS:
                    fc2_tiles = epilogue.epilogue_warps(
                        cfg,
                        bars,
                        info,
                        rows_at,
                        buffer,
                        bases,
                        tmem,
                        scales,
                        h,
                        h_scales,
                        results_at,
                        result_scales_at,
                        tidx,
                        warp,
                        lane,
                    )
                    if tidx == 0:
                        ptx.sts32(hold_at + 4, fc2_tiles)
                elif const_expr(cfg.exchange):
                    cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=PRODUCER_THREADS)
                    exchange.receive_cells(cfg, ex, table, control, cells_at, tidx)  # thread 128 and up
                    if bidx == 0 and warp == EPILOGUE_WARPS:
                        exchange.offer_payload(cfg, ex, control, bank + tiles.STAGED * 4, staging_ctas, cells_at, lane)
                    exchange.receive_payload(
                        cfg, ex, control, cells_at, index_at, index_row_words, warp - EPILOGUE_WARPS, lane
                    )
                    cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=PRODUCER_THREADS)
                    if fault_step != FAULT_PULL:
                        exchange.pull(
                            cfg,
                            cfg.row_pieces,
                            staging.copy_piece,
                            (pool, pool_scales, row_weight),
                            ex,
                            table,
                            control,
                            row_meta,
                            pool_bank,
                            index_at,
                            index_row_words,
                            payload_at,
                            payload_row_bytes,
                            payload_scales_at,
                            payload_scale_row_bytes,
                            route_weights_at,
                            bidx,
                            gdim,
                            warp - EPILOGUE_WARPS,
                            lane,
                        )
                cute.arch.barrier(barrier_id=STAGING_BARRIER, number_of_threads=STAGING_WARPS * 32)
                items = tokens * wire.items_per_token(layer)
                first_item = Int32(Int64(items) * Int64(bidx) // Int64(gdim))
                own_items = Int32(Int64(items) * Int64(bidx + 1) // Int64(gdim)) - first_item
                results, result_scales = results_at, result_scales_at
                if const_expr(cfg.exchange):
                    own = ptx.lds64(bases + rank * 8)
                    results, result_scales = own + results_at, own + result_scales_at
                    if warp == 0 and (own_items > 0 or bidx == 0):
                        exchange.wait_for_own_rows(cfg, ex, control, returns_at, expected_returns, lane)
                    cute.arch.barrier(barrier_id=STAGING_BARRIER, number_of_threads=STAGING_WARPS * 32)
                elif own_items > 0:
                    if lane == 0:
                        wait_at_least(bank + tiles.FC2_DONE * 4, ptx.lds32(hold_at + 4), control, 1, SITE_FC2, 0)
                    cute.arch.sync_warp()
                if own_items > 0:
                    wire.sum_routes(
                        layer,
                        STAGING_WARPS,
                        ids,
                        ids_are_64,
                        route_weights,
                        results,
                        result_scales,
                        y,
                        first_item,
                        own_items,
                        warp,
                        lane,
                    )
                if tidx == 0:
                    if ptx.flag_fetch_add_acq_rel_gpu(counters + tiles.EXIT_WORD * 4, 1) == gdim - 1:
                        ptx.stg32(counters + tiles.EXIT_WORD * 4, 0)
                        if ptx.flag_load_acquire_sys(abort) == 0:
                            if const_expr(cfg.exchange):
                                exchange.advance_expected(cfg, ex, expected_returns)
                            ptx.stg64(epoch, ptx.lds64(control + LAUNCH) + 1)
                        else:
                            record_departure(control)
        elif dry == 0 and tidx == 0:  # every CTA: others of this rank may have entered just before the abort
            record_departure(control)
        fence_before_sync()
        pairs.sync_ctas(cfg)  # nobody may touch TMEM after this point, nor the other CTA of a pair
        if warp == 0:
            fence_after_sync()
            cute.arch.dealloc_tmem(tmem, cfg.tmem_allocated, cfg.pair)
