# SPDX-License-Identifier: Apache-2.0
"""`Sm90MegaMoeNvfp4Kernel`: one MoE layer of one rank as one persistent launch on Hopper (sm_90a).

Purpose
    Routing ids and bf16 tokens in, bf16 layer output out: count routes, quantise tokens (both activation modes of
    docs/numerics.md), dispatch them to the ranks that own their experts, fc1, SwiGLU, requantisation, fc2, result rows
    in wire format straight to the token owners, top-k sum there. Weights stay NVFP4 in HBM and shared memory and are
    decoded exactly to f16 registers. The protocol between ranks: docs/protocol.md.
Supported
    1 to 16 ranks that can address each other's memory, whatever tile configuration each of them runs; H multiple of 32
    up to 16384, I multiple of 16, up to 256 local experts, top_k up to 16, any token count including 0 (read from device
    memory, so one captured graph serves every T of its bucket), ids int32 or int64 with masked (out of range) and
    duplicate entries, at most four token widths per launch, whole (256-row) and half (128-row) tiles. For measuring and
    the sanitizer: all ranks in one launch on one GPU (`all_ranks`), time stamps of every CTA (`timestamps`).
Not supported
    Grids that are not fully resident (every CTA must run at once).
Operands (addresses; R rows of the pool, T tokens, E experts of this rank, K top_k)
    w1 (E, ceil(2I/128), ceil(H/128), 9216) u8     128x128 records, gate and up interleaved by 8 (see "Weight records")
    w2 (E, ceil(H/128), ceil(I/128), 9216) u8
    scales (E + 1, 4) f32   {alpha_gate * 2^14, alpha_up * 2^14, alpha_down * 2^14, qs2 or 2^q}; last row {qs1, 0} and a
                            u64 that all ranks must launch with alike (kept here, so that graphs see a reload)
    x (T, H) bf16; ids (T, K) i32 or i64; route_weights (T, K) f32; num_tokens i32; y (T, H) bf16
    pool (R, H) f16; row_scale (R) f32; row_weight (R) f32; row_meta (R, 2) i32; route_rows (T, K) i32; h (R, I) f16
    counters u32 (96): exit ticket, two banks of {claim, staged, fc2 done}; ready u32 (2, ready_words);
    pool_ready u32 (2, pool_ready_words); epoch u64; expected_returns u64 (ranks); error u64 (8)
    peers u64 (ranks): bases of the shared spaces; the regions behind them, at the same offsets on every rank: abort,
    header, size cells and payload tags, return counters, index rows, payload and its scales, routing weights, result
    rows and scales
    (trtllm_megamoe/regions.py has shapes; wire format by token * K + slot)
Weight records
    codes [m64 tile 2][k64 half 2][thread 128][4 x u32], then e4m3 scales [tile 2][warp 4][g 8][8 k16][row g, row g+8].
    A u32 holds one thread's 8 codes of an m64k16 fragment in a GF(2)-linear order (`ptx.decode_fragment` inverts it).
    fc1: rows g / g+8 of a 16-row block are gate / up of channel 8 * block + g; fc2: logical rows 2g, 2g+1. Rows and
    columns beyond the matrix are zero records.
Warp roles (1 CTA per SM)
    math   2 warpgroups: stage tokens, then per tile wait, decode, wgmma, epilogue; at the end the top-k sum
    W      scheduler table, claims, weight copies        T   token loads, the only warp that waits for a tile's tokens
    R      releases of finished tiles                    Z   clears the next launch's counters
    D      4 warps, only with several ranks: size cells out as soon as routes are counted (CTA 0) and in (all, with W,
           T, R, Z); once the rank has staged, payload tags out (CTA 0, one warp) and in (all), then rows of peers into
           the pool while tiles run
Pipelines (producer -> consumer, arrivals)
    wfull[stage]  W -> math: 1 and two records                           wempty[stage] math -> W: one per math warp
    tfull[stage]  T -> math: 1 and a token box                           tempty[stage] math -> T: one per math warp
    ifull[slot]   W -> math, T, R: 1                                     iempty[slot]  T, R -> W: 2
    done[slot]    math -> R: one per math warp
Synchronisation contract, every kernel
    object           writer                                        reader                              reset
    h                math: st, arrive on done;                     T: ld.acquire.gpu >= row tiles,     stream
                     R: fence.proxy.async, red.release.gpu ready   fence.proxy.async, TMA
    claim            W: atom.relaxed.gpu                           (the value is all there is)         other bank, by Z
    staged, ready,   as here                                       as here                             other bank, by Z
    pool_ready,
    fc2 done
    exit ticket,     last warp out: atom.acq_rel.gpu; the last     next launch: plain ld               the last CTA
    epoch, expected  CTA stores them
    x, ids, weights  previous kernel of the stream                 plain ld                            stream
    error, abort     first failure: exch, st; then st.release.sys  every wait: ld.acquire.sys;         host
                     to every rank's abort word                    a CTA's thread 0 at entry: plain ld
One rank
    pool, row_*      math: st, fence.proxy.async, CTA barrier,     T: ld.acquire.gpu,                  stream
                     one red.release.gpu on `staged`               fence.proxy.async, TMA
    results          math: st, arrive on done;                     math: ld.acquire.gpu, ld            stream
                     R: red.release.gpu on `fc2 done`
Several ranks
    payload, index   math: st, CTA barrier, one red.release.gpu    peers' D: plain ld after their      own next launch
    rows, weights    on `staged`; CTA 0's D: ld.acquire.gpu        payload tags (never ld.nc)
    size cells,      CTA 0's D: fence.acq_rel.sys and              every CTA: ld.acquire.sys until     never: tag of the
    launch facts     st.relaxed.sys in each storing thread         the tag is this launch's            launch, two banks
    payload tags     one warp of CTA 0's D: fence.acq_rel.sys      every CTA's D: ld.acquire.sys       never: they grow
                     and st.relaxed.sys in each storing lane       >= this launch, barrier of D
    pool, row_*      D: st, syncwarp, red.release.gpu on           fc1, T: ld.acquire.gpu >= pieces,   stream
                     pool_ready                                    fence.proxy.async, TMA;
                                                                   fc2: through `ready`
    results          math: st to the token owner, arrive on done;  owner: ld.acquire.sys >= sum of     never: cumulative
                     R: red.release.sys on its return counter      all routes sent, CTA barrier, ld
Provenance
    Written for this project; the main loop, the tile stream and the protocol follow our own measured prototypes
    (docs/engineering-notes-hopper.md). Pulling payload by the expert owner with pushed indices, swap-AB and one ordered
    stream of tiles are ideas of DeepGEMM's mega kernel and of NVIDIA's fused MoE examples.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.typing import AddressSpace

from .. import ptx, timeline
from ..common import release, routing, stamps, wire
from ..common.sites import FAULT_PUBLISH, FAULT_PULL, FAULT_STAGED, SITE_FC2
from ..common.tiles import (
    BANK_WORDS,
    END,
    EXIT_WORD,
    FC1,
    FC2_DONE,
    FIRST_BANK,
    STAGED,
    TABLE_BARRIER,
    TableOffsets,
    clear_bank,
    lay_out_segments,
    order_experts,
)
from ..common.units import CONTROL_BYTES, DISPATCH_WARPS
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
from ..launch import RANK_OPERANDS
from . import epilogue, exchange, mainloop, scheduler, staging
from .config import K_STEP, POOL_BLOCK_ROWS, KernelConfig, fc1_steps, fc2_steps
from .exchange import PRODUCER_BARRIER, STAGED_BARRIER, ExchangeOffsets


class Sm90MegaMoeNvfp4Kernel:
    """The kernel of one :class:`KernelConfig`; call it inside `cute.compile`."""

    def __init__(self, config: KernelConfig) -> None:
        self.cfg = config

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        w1: Int64,
        w2: Int64,
        scales: Int64,
        x: Int64,
        ids: Int64,
        route_weights: Int64,
        num_tokens: Int64,
        y: Int64,
        pool: Int64,
        row_scale: Int64,
        row_weight: Int64,
        row_meta: Int64,
        route_rows: Int64,
        h: Int64,
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
        rank_operands: Int64,
        local_stride: Int64,
        timestamps: Int64,
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
        ctas_per_rank: Int32,
        grid: Int32,
        stream,
    ):
        """One launch. `anchor` is any device tensor (it names the device); all else is an address or a number."""
        cfg = self.cfg
        layer, tile = cfg.layer, cfg.tile
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
        views = []
        for base, width in ((pool, layer.hidden_size), (h, layer.intermediate_size)):
            pointer = cute.make_ptr(Float16, base, AddressSpace.gmem, assumed_align=128)
            shape, stride = (pool_rows, width), (width, 1)
            if const_expr(cfg.all_ranks):
                shape, stride = (*shape, layer.ep_size), (*stride, local_stride // 2)
            views.append(cute.make_tensor(pointer, cute.make_layout(shape, stride=stride)))
        maps = []
        for n in tile.token_widths:
            box = (n, K_STEP * cfg.steps_per_stage)
            one = cute.tile_to_shape(atom, box, order=(0, 1))
            maps.append(one)
            for view in views:
                maps += list(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, one, box))

        @cute.struct
        class Storage:
            wfull: cute.struct.MemRange[Int64, cfg.weight_stages]
            wempty: cute.struct.MemRange[Int64, cfg.weight_stages]
            tfull: cute.struct.MemRange[Int64, cfg.token_stages]
            tempty: cute.struct.MemRange[Int64, cfg.token_stages]
            ifull: cute.struct.MemRange[Int64, cfg.ring_slots]
            iempty: cute.struct.MemRange[Int64, cfg.ring_slots]
            done: cute.struct.MemRange[Int64, cfg.ring_slots]
            stamps: cute.struct.MemRange[Int64, stamps.SHARED_BYTES // 8]
            info: cute.struct.Align[cute.struct.MemRange[Int32, cfg.ring_slots * 8], 16]
            control: cute.struct.Align[cute.struct.MemRange[Int32, CONTROL_BYTES // 4], 16]
            noted: cute.struct.Align[cute.struct.MemRange[Int32, staging.NOTED_WORDS], 16]
            rows: cute.struct.Align[cute.struct.MemRange[Int32, cfg.ring_slots * tile.widest * cfg.row_words], 16]
            table: cute.struct.Align[cute.struct.MemRange[Int32, cfg.table_words], 16]
            exchange: cute.struct.Align[cute.struct.MemRange[Int32, max(cfg.exchange_words, 4)], 16]
            staging: cute.struct.Align[cute.struct.MemRange[Uint8, tile.math_warpgroups * cfg.staging_bytes], 128]
            tokens: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.token_stages * cfg.token_stage_bytes], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.weight_stages * cfg.weight_stage_bytes], 128]

        self.storage = Storage
        self.kernel(
            w1,
            w2,
            scales,
            tuple(maps),
            x,
            ids,
            route_weights,
            num_tokens,
            y,
            pool,
            row_scale,
            row_weight,
            row_meta,
            route_rows,
            h,
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
            rank_operands,
            local_stride,
            timestamps,
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
            ctas_per_rank,
        ).launch(grid=[grid, 1, 1], block=[cfg.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        w1: Int64,
        w2: Int64,
        scales: Int64,
        maps: tuple,
        x: Int64,
        ids: Int64,
        route_weights: Int64,
        num_tokens: Int64,
        y: Int64,
        pool: Int64,
        row_scale: Int64,
        row_weight: Int64,
        row_meta: Int64,
        route_rows: Int64,
        h: Int64,
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
        rank_operands: Int64,
        local_stride: Int64,
        timestamps: Int64,
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
        ctas_per_rank: Int32,
    ):
        """The device side: set up, count routes, then the roles."""
        cfg = self.cfg
        layer, tile = cfg.layer, cfg.tile
        math_warps = const_expr(tile.math_warpgroups * 4)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        map_rank = Int32(0)
        if const_expr(cfg.all_ranks):
            map_rank = bidx // ctas_per_rank
            bidx, gdim = bidx - map_rank * ctas_per_rank, ctas_per_rank
            rank = rank + map_rank
            row = rank_operands + Int64(map_rank) * (8 * len(RANK_OPERANDS))
            x, ids, route_weights, num_tokens = (ptx.ldg64(row + 8 * i) for i in range(4))
            y, w1, w2, scales = (ptx.ldg64(row + 8 * i) for i in range(4, 8))
            shift = Int64(map_rank) * local_stride
            row_scale, row_weight, row_meta = row_scale + shift, row_weight + shift, row_meta + shift
            pool, h, counters, ready = pool + shift, h + shift, counters + shift, ready + shift
            pool_ready, epoch, expected_returns = pool_ready + shift, epoch + shift, expected_returns + shift
            error = error + Int64(map_rank) * 64
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        memory = cutlass.utils.SmemAllocator().allocate(self.storage)
        wfull, wempty = memory.wfull.data_ptr(), memory.wempty.data_ptr()
        tfull, tempty = memory.tfull.data_ptr(), memory.tempty.data_ptr()
        ifull, iempty, done = memory.ifull.data_ptr(), memory.iempty.data_ptr(), memory.done.data_ptr()
        bars = (wfull, wempty, tfull, tempty, ifull, iempty, done)
        info = Int32(memory.info.data_ptr().toint())
        table, rows_at = Int32(memory.table.data_ptr().toint()), Int32(memory.rows.data_ptr().toint())
        noted, control = Int32(memory.noted.data_ptr().toint()), Int32(memory.control.data_ptr().toint())
        staging_at, weights_at = Int32(memory.staging.data_ptr().toint()), Int32(memory.weights.data_ptr().toint())
        ex = Int32(memory.exchange.data_ptr().toint())
        stamps_at = Int32(memory.stamps.data_ptr().toint())
        if const_expr(cfg.timestamps):
            if tidx == 0:
                stamps.enter(stamps_at, timestamps, map_rank * gdim + bidx)
        tokens_at = memory.tokens.data_ptr().toint()
        at = const_expr(TableOffsets(cfg.table_experts))
        counts, cursors = table + at.rows, table + at.cursors
        bases = ex
        if const_expr(cfg.exchange):
            ex_at = const_expr(ExchangeOffsets(cfg))
            counts, cursors, bases = ex + ex_at.counts, ex + ex_at.cursors, ex + ex_at.peers

        if warp == 0:
            for i in cutlass.range_constexpr(len(tile.token_widths)):
                cpasync.prefetch_descriptor(maps[5 * i + 1])
                cpasync.prefetch_descriptor(maps[5 * i + 3])
        if tidx == 0:
            for i in cutlass.range_constexpr(cfg.weight_stages):
                cute.arch.mbarrier_init(wfull + i, 1)
                cute.arch.mbarrier_init(wempty + i, math_warps)
            for i in cutlass.range_constexpr(cfg.token_stages):
                cute.arch.mbarrier_init(tfull + i, 1)
                cute.arch.mbarrier_init(tempty + i, math_warps)
            for i in cutlass.range_constexpr(cfg.ring_slots):
                cute.arch.mbarrier_init(ifull + i, 1)
                cute.arch.mbarrier_init(iempty + i, 2)
                cute.arch.mbarrier_init(done + i, math_warps)
        abort = abort_at
        if const_expr(cfg.exchange):
            abort = ptx.ldg64(peers + Int64(rank) * 8) + abort_at
        # One round trip for all three. The abort word may go up at any time: what thread 0 has seen holds for the CTA.
        tokens, finished, aborted = ptx.ldg32(num_tokens), ptx.ldg64(epoch), ptx.ldg32(abort)
        if tidx == 0:  # what is needed later; registers are too precious for it
            ptx.sts64(control + LAUNCH, finished)
            ptx.sts32(control + TOKENS, tokens)
            ptx.sts32(control + RANK, rank)
            ptx.sts64(control + ERROR, error)
            ptx.sts64(control + ABORT, abort)
            ptx.sts64(control + TIMEOUT, timeout_ns)
            ptx.sts64(control + PEERS, peers)
            ptx.sts64(control + ABORT_AT, abort_at)
            ptx.sts32(control + GIVEN_UP, aborted)
            ptx.sts32(control + CTAS, gdim)
            staging.clear_maxima(noted)
        i = tidx
        while i < const_expr(cfg.route_table_experts if cfg.exchange else cfg.table_experts):
            ptx.sts32(counts + i * 4, 0)
            ptx.sts32(cursors + i * 4, 0)
            i = i + cfg.threads
        if const_expr(cfg.exchange):
            i = tidx
            while i < const_expr(cfg.table_experts):  # experts that only pad the table have no rows
                ptx.sts32(table + at.rows + i * 4, 0)
                i = i + cfg.threads
            exchange.load_peers(cfg, ex, peers, tidx)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        aborted = ptx.lds32(control + GIVEN_UP)
        if aborted == 0 and dry == 0:
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
            wanted = Int32(1) if own_tokens > 0 and warp < math_warps else Int32(0)
            first = staging.load_token(cfg, x, first_token, wanted, warp, lane)  # while routes are counted
            routing.count_routes(
                layer.num_experts,
                cfg.threads,
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
                routing.lay_out_pool(cfg.table_experts, POOL_BLOCK_ROWS, counts, table + at.first_row, cursors, lane)
            cute.arch.sync_threads()
            if const_expr(cfg.timestamps):
                if tidx == 0:
                    stamps.event(stamps_at, timeline.COUNTED)
            if warp >= math_warps:
                cute.arch.setmaxregister_decrease(cfg.producer_registers)
                bank_index = ptx.lds32(control + LAUNCH) & 1
                bank = counters + Int64(FIRST_BANK + bank_index * BANK_WORDS) * 4
                ready_bank = ready + Int64(bank_index * ready_words) * 4
                pool_bank = pool_ready + Int64(bank_index * pool_ready_words) * 4
                # Thread numbers are read again in each branch: kept over all of it, they would be spilled.
                producer = ptx.thread_index() - math_warps * 32
                role_lane = producer % 32
                if const_expr(cfg.exchange):
                    if bidx == 0 and warp >= math_warps + 4 and fault_step != FAULT_PUBLISH:
                        exchange.publish(
                            cfg,
                            ex,
                            control,
                            cells_at,
                            header_at,
                            scales + layer.num_local_experts * 16 + 8,
                            producer - 128,
                        )
                        if const_expr(cfg.timestamps):
                            if producer == 128:
                                stamps.event(stamps_at, timeline.PUBLISHED)
                    cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=128 + 32 * DISPATCH_WARPS)
                    exchange.receive_cells(cfg, ex, table, control, cells_at, producer)
                    if const_expr(cfg.timestamps):
                        if producer == 0:
                            stamps.event(stamps_at, timeline.CELLS)
                blocks = Int32(0)
                if warp < math_warps + 4:
                    blocks, live = order_experts(
                        layer.num_local_experts,
                        cfg.table_experts,
                        tile.widest,
                        TABLE_BARRIER,
                        table,
                        producer,
                    )
                    if const_expr(cfg.exchange):  # dispatch may begin
                        exchange.share_table(cfg, ex, blocks, live, producer)
                        cute.arch.barrier_arrive(
                            barrier_id=PRODUCER_BARRIER, number_of_threads=128 + 32 * DISPATCH_WARPS
                        )
                    lay_out_segments(
                        cfg.table_experts,
                        cfg.fc1_row_tiles,
                        cfg.fc2_row_tiles,
                        TABLE_BARRIER,
                        table,
                        lag,
                        blocks,
                        live,
                        producer,
                    )
                elif const_expr(cfg.exchange):
                    if bidx == 0 and warp == math_warps + 4:
                        exchange.offer_payload(cfg, ex, control, bank + STAGED * 4, staging_ctas, cells_at, role_lane)
                        if const_expr(cfg.timestamps):
                            if role_lane == 0:
                                stamps.event(stamps_at, timeline.OFFERED)
                    exchange.receive_payload(
                        cfg,
                        ex,
                        control,
                        cells_at,
                        index_at,
                        index_row_words,
                        warp - (math_warps + 4),
                        role_lane,
                    )
                    cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=128 + 32 * DISPATCH_WARPS)
                if const_expr(cfg.timestamps):
                    if producer == 0:
                        stamps.event(stamps_at, timeline.TABLE)
                if warp < math_warps + 4:
                    self.single_warps(
                        bars,
                        stamps_at,
                        table,
                        blocks,
                        info,
                        rows_at,
                        weights_at,
                        tokens_at,
                        maps,
                        map_rank,
                        control,
                        ex,
                        w1,
                        w2,
                        row_meta,
                        row_scale,
                        row_weight,
                        bank,
                        ready_bank,
                        pool_bank,
                        counters + Int64(FIRST_BANK + (1 - bank_index) * BANK_WORDS) * 4,
                        ready + Int64((1 - bank_index) * ready_words) * 4,
                        ready_words,
                        pool_ready + Int64((1 - bank_index) * pool_ready_words) * 4,
                        pool_ready_words,
                        returns_at,
                        header_at,
                        fault_step,
                        staging_ctas,
                        bidx,
                        gdim,
                        warp - math_warps,
                        role_lane,
                    )
                elif const_expr(cfg.exchange):
                    if fault_step != FAULT_PULL:
                        exchange.pull(
                            cfg,
                            ex,
                            table,
                            control,
                            pool,
                            row_meta,
                            row_scale,
                            row_weight,
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
                            warp - (math_warps + 4),
                            role_lane,
                        )
                    if const_expr(cfg.timestamps):
                        if ptx.thread_index() == math_warps * 32 + 128:
                            stamps.event(stamps_at, timeline.PULLED)
            else:
                cute.arch.setmaxregister_increase(cfg.math_registers)
                first_route, own_routes = first_token * layer.top_k, own_tokens * layer.top_k
                target = (pool,)
                if const_expr(cfg.exchange):
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
                        layer.num_local_experts,
                        layer.weigh_before_requant,
                        tile.math_warpgroups * 128,
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
                        layer.top_k,
                        noted + staging.MAXIMA * 4,
                    )
                staging.stage_tokens(
                    cfg, x, first, target, route_rows, noted, scales, row_scale, first_token, own_tokens, warp, lane
                )
                if const_expr(not cfg.exchange):
                    ptx.fence_proxy_async()
                cute.arch.barrier(barrier_id=staging.MATH_BARRIER, number_of_threads=math_warps * 32)
                if const_expr(cfg.exchange):
                    if bidx == 0:
                        cute.arch.barrier_arrive(barrier_id=STAGED_BARRIER, number_of_threads=cfg.offer_barrier_threads)
                if tidx == 0 and own_tokens > 0 and (bidx > 0 or const_expr(not cfg.exchange)):
                    at_bank = FIRST_BANK + (ptx.lds32(control + LAUNCH) & 1) * BANK_WORDS
                    ptx.flag_add_release_gpu(counters + Int64(at_bank + STAGED) * 4, 1)
                if const_expr(cfg.timestamps):
                    if tidx == 0:
                        stamps.event(stamps_at, timeline.STAGED)
                fc2_tiles = self.math(
                    bars,
                    stamps_at,
                    info,
                    rows_at,
                    staging_at,
                    weights_at,
                    Int32(tokens_at),
                    scales,
                    h,
                    bases,
                    results_at,
                    result_scales_at,
                    warp,
                )
                last_thread = ptx.thread_index()
                if const_expr(cfg.timestamps):
                    if last_thread == 0:
                        stamps.event(stamps_at, timeline.TILES_DONE)
                launch = ptx.lds32(control + LAUNCH)
                tokens = ptx.lds32(control + TOKENS)
                ctas = ptx.lds32(control + CTAS)
                items = tokens * wire.items_per_token(layer)
                first_item = Int32(Int64(items) * Int64(bidx) // Int64(ctas))
                own_items = Int32(Int64(items) * Int64(bidx + 1) // Int64(ctas)) - first_item
                results, result_scales = results_at, result_scales_at
                if const_expr(cfg.exchange):
                    own = ptx.lds64(bases + ptx.lds32(control + RANK) * 8)
                    results, result_scales = own + results_at, own + result_scales_at
                    if warp == 0 and (own_items > 0 or bidx == 0):
                        exchange.wait_for_own_rows(cfg, ex, control, returns_at, expected_returns, last_thread % 32)
                    cute.arch.barrier(barrier_id=staging.MATH_BARRIER, number_of_threads=math_warps * 32)
                elif own_items > 0:
                    if last_thread % 32 == 0:
                        done_counter = counters + Int64(FIRST_BANK + (launch & 1) * BANK_WORDS + FC2_DONE) * 4
                        wait_at_least(done_counter, fc2_tiles, control, 1, SITE_FC2, 0)
                    cute.arch.sync_warp()
                if const_expr(cfg.timestamps):
                    if last_thread == 0:
                        stamps.event(stamps_at, timeline.RETURNED)
                if own_items > 0:
                    wire.sum_routes(
                        layer,
                        math_warps,
                        ids,
                        ids_are_64,
                        route_weights,
                        results,
                        result_scales,
                        y,
                        first_item,
                        own_items,
                        warp,
                        last_thread % 32,
                    )
                if last_thread == 0:
                    if ptx.flag_fetch_add_acq_rel_gpu(counters + EXIT_WORD * 4, 1) == ptx.lds32(control + CTAS) - 1:
                        ptx.stg32(counters + EXIT_WORD * 4, 0)
                        if ptx.flag_load_acquire_sys(ptx.lds64(control + ABORT)) == 0:
                            if const_expr(cfg.exchange):
                                exchange.advance_expected(cfg, ex, expected_returns)
                            ptx.stg64(epoch, ptx.lds64(control + LAUNCH) + 1)
                        else:
                            record_departure(control)
                    if const_expr(cfg.timestamps):
                        stamps.leave(stamps_at)
        elif dry == 0 and tidx == 0:  # every CTA: others of this rank may have entered just before the abort
            record_departure(control)

    @cute.jit
    def single_warps(
        self,
        bars,
        stamps_at: Int32,
        table: Int32,
        blocks,
        info: Int32,
        rows_at: Int32,
        weights_at: Int32,
        tokens_at: Int32,
        maps: tuple,
        map_rank,
        control: Int32,
        ex: Int32,
        w1: Int64,
        w2: Int64,
        row_meta: Int64,
        row_scale: Int64,
        row_weight: Int64,
        bank: Int64,
        ready_bank: Int64,
        pool_bank: Int64,
        other_bank: Int64,
        other_ready: Int64,
        ready_words,
        other_pool: Int64,
        pool_ready_words,
        returns_at: Int64,
        header_at: Int64,
        fault_step,
        staging_ctas,
        bidx,
        gdim,
        role,
        lane,
    ):
        """W, T, R and Z."""
        cfg = self.cfg
        if role == 0:
            scheduler.weight_warp(cfg, bars, table, blocks, info, weights_at, w1, w2, bank, bidx, gdim, lane)
        elif role == 1:
            scheduler.token_warp(
                cfg,
                bars,
                info,
                rows_at,
                tokens_at,
                maps,
                table,
                control,
                row_meta,
                row_scale,
                row_weight,
                bank,
                ready_bank,
                pool_bank,
                staging_ctas,
                exchange.pieces_per_row(cfg) if cfg.exchange else 0,
                map_rank,
                lane,
                stamps_at,
            )
        elif role == 2:
            _wfull, _wempty, _tfull, _tempty, ifull, iempty, done = bars
            release.release_warp(
                cfg,
                cfg.ring_slots,
                cute.arch.mbarrier_wait,
                cute.arch.mbarrier_arrive,
                ifull,
                iempty,
                done,
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
            if const_expr(cfg.timestamps):
                if lane == 0:
                    stamps.event(stamps_at, timeline.ANNOUNCED)
        else:
            if const_expr(cfg.exchange):
                if bidx == 0 and lane < cfg.layer.ep_size:
                    exchange.compare_headers(cfg, ex, control, header_at, lane)
            clear_bank(other_bank, other_ready, ready_words, other_pool, pool_ready_words, bidx, gdim, lane)

    @cute.jit
    def math(
        self,
        bars,
        stamps_at: Int32,
        info: Int32,
        rows_at: Int32,
        staging_at: Int32,
        weights_at: Int32,
        tokens_at: Int32,
        scales: Int64,
        h: Int64,
        bases: Int32,
        results: Int64,
        result_scales: Int64,
        warp,
    ):
        """The math warps' tile loop; returns the number of fc2 tiles of the whole launch."""
        cfg = self.cfg
        layer, tile = cfg.layer, cfg.tile
        ifull, done = bars[4], bars[6]
        m64 = const_expr(tile.m64_per_warpgroup)
        swiglu = const_expr(ptx.make_swiglu(layer.swiglu_alpha, layer.swiglu_beta))
        fc1_epilogue = const_expr(epilogue.fc1_nvfp4 if layer.activation_mode == "nvfp4" else epilogue.fc1_bf16)
        wg = warp // 4
        warp4 = warp % 4
        codes0, scales0, descriptor0 = mainloop.operand_addresses(
            cfg, weights_at, tokens_at, wg, ptx.thread_index() % 128
        )
        my_staging = staging_at + wg * cfg.staging_bytes
        buffers = [cute.make_rmem_tensor(cute.make_layout(16), Int32) for _ in range(2)]
        weight_stage, weight_phase = Int32(0), Int32(0)
        token_stage, token_phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        kind = Int32(FC1)
        fc2_tiles = Int32(0)
        while kind != END:
            cute.arch.mbarrier_wait(ifull + slot, slot_phase)
            entry = info + slot * release.INFO_BYTES
            kind = ptx.lds32(entry)
            fc2_tiles = ptx.lds32(entry + 4)
            if const_expr(cfg.timestamps):
                if kind != END and ptx.thread_index() == 0:
                    stamps.tile_begins(stamps_at)
            if kind != END:
                expert, row_tile = ptx.lds32(entry + 4), ptx.lds32(entry + 8)
                row0, valid = ptx.lds32(entry + 12), ptx.lds32(entry + 16)
                width = ptx.lds32(entry + 24)
                t128 = ptx.thread_index() % 128  # of this tile: see the producers' branch
                lane = t128 % 32
                steps = Int32(fc1_steps(layer)) if kind == FC1 else Int32(fc2_steps(layer))
                expert_scales = ptx.ldg128f(scales + Int64(expert) * 16)
                tile_rows = rows_at + slot * (tile.widest * 4 * cfg.row_words)
                tile_weights = tile_rows + tile.widest * 4
                for w in cutlass.range_constexpr(len(tile.token_widths)):
                    n = const_expr(tile.token_widths[w])
                    if width == w or const_expr(len(tile.token_widths) == 1):
                        accs = [cute.make_rmem_tensor(cute.make_layout(n // 2), Float32) for _ in range(m64)]
                        weight_stage, weight_phase, token_stage, token_phase = mainloop.multiply_tile(
                            cfg,
                            w,
                            accs,
                            buffers,
                            bars,
                            codes0,
                            scales0,
                            descriptor0,
                            steps,
                            weight_stage,
                            weight_phase,
                            token_stage,
                            token_phase,
                            lane,
                        )
                        if kind == FC1:
                            channel0 = row_tile * (tile.rows // 2) + wg * 32 * m64
                            h_tile = h + Int64(row0) * (layer.intermediate_size * 2)
                            for m in cutlass.range_constexpr(m64):
                                fc1_epilogue(
                                    cfg,
                                    swiglu,
                                    n,
                                    accs[m],
                                    m,
                                    expert_scales,
                                    my_staging,
                                    tile_rows,
                                    tile_weights,
                                    h_tile,
                                    channel0,
                                    valid,
                                    1 + wg,
                                    t128,
                                    lane,
                                    warp4,
                                )
                        else:
                            column0 = row_tile * tile.rows + wg * 64 * m64
                            if const_expr(layer.combine_format == "bf16"):
                                epilogue.fc2_direct(
                                    cfg, n, accs, expert_scales, tile_rows, bases, results, column0, valid
                                )
                            else:
                                for m in cutlass.range_constexpr(m64):
                                    epilogue.fc2_encoded(
                                        cfg,
                                        n,
                                        accs[m],
                                        m,
                                        expert_scales,
                                        my_staging,
                                        tile_rows,
                                        bases,
                                        results,
                                        result_scales,
                                        column0,
                                        valid,
                                        1 + wg,
                                        t128,
                                        lane,
                                        warp4,
                                    )
                cute.arch.sync_warp()
                if ptx.thread_index() % 32 == 0:
                    cute.arch.mbarrier_arrive(done + slot)
                if const_expr(cfg.timestamps):
                    if ptx.thread_index() == 0:
                        stamps.tile_ends(stamps_at, kind)
            slot = slot + 1
            if slot == cfg.ring_slots:
                slot = Int32(0)
                slot_phase = slot_phase ^ 1
        return fc2_tiles
