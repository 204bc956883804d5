# SPDX-License-Identifier: Apache-2.0
"""What one compiled Blackwell kernel is: layer, tile, legality, shared-memory, TMEM and register plan, index functions.

Pure Python without the DSL; the kernel, the compiler, the checks and the tests read the same numbers here. The kernel
has never run on hardware: limits below are those of the architecture's manuals.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ..common.layer import KernelConfigError, LayerSpec
from ..common.units import CONTROL_BYTES, DISPATCH_WARPS, RETURN_COLUMNS, SINGLE_WARPS, exchange_words
from ..launch import CALL, LAYOUT_NUMBERS, ROUTE_FACTS, WORKSPACE

ARCHITECTURES = ("sm_100a", "sm_103a")

TILE_ROWS = 128
"""Weight rows of a CTA's tile: the M side of its MMA, or half of that of a pair's."""

K_STAGE = 256
"""Reduction elements of a stage; the tail of K is zero-filled by TMA, codes and scales."""

K_ATOM = 64
"""Reduction elements of one scale atom and of one MMA instruction."""

ATOM_ROWS = 128
ATOM_BYTES = 512
"""A scale atom: 128 rows x 4 blocks of 16."""

RING_SLOTS = 4
"""Tiles handed from the weight warp to the others but not yet finished by all."""

EPILOGUE_WARPS = 4
"""Warps that read TMEM: one per quarter of its lanes."""

STAGING_WARPS = 8
"""Warps that stage tokens and sum routes: the epilogue warps and as many helpers, which then pull rows of peers."""
assert STAGING_WARPS == EPILOGUE_WARPS + DISPATCH_WARPS

THREADS = 32 * (STAGING_WARPS + SINGLE_WARPS)
"""All warps: 0-3 epilogue, 4-7 helpers, 8 MMA, 9 weights, 10 tokens, 11 releases."""

PIECE_COLUMNS = 2048
"""Columns of a token row that one warp pulls at a time, its loads all in flight; the unit of `pool_ready`."""

MAX_SHARED_BYTES = 232448
TMEM_COLUMNS = 512
REGISTER_FILE = 65536
MAX_REGISTERS = REGISTER_FILE // THREADS // 8 * 8
MIN_STAGES = 3

EPILOGUE_TOKENS = 32
"""Tokens an epilogue takes from TMEM and through its buffer at a time."""

TRANSPOSE_PITCH = 80
"""Bytes of one token in a warp's transpose buffer: 16 fp32 channels and 16 bytes against bank conflicts."""

TOKEN_BLOCKS = (32, 64, 128, 256)
"""Legal token blocks: 32 because a TMEM scale column holds 32 tokens, above them powers of two up to the MMA's N."""

PAIR_TOKEN_BLOCKS = TOKEN_BLOCKS[1:]
"""Those of CTA pairs: with fewer tokens there is next to nothing that a second CTA could save loading."""


# ------------------------------------------------------------------------------------------------- index functions
# Each takes Python ints in host code and tests, DSL integers in the kernel.
def scale_block(row):
    """128-row block of scale atoms that holds a row."""
    return row // ATOM_ROWS


def scale_column(row):
    """TMEM column inside an atom (4 of them) that holds a row's four scales; the lane is row % 32."""
    return (row % ATOM_ROWS) // 32


def scale_word(row, atom, atoms):
    """u32 index of the four scales of (row, K atom) in a buffer [row block][atom] with `atoms` atoms a block."""
    return (row // ATOM_ROWS * atoms + atom) * (ATOM_BYTES // 4) + (row % 32) * 4 + (row % ATOM_ROWS) // 32


def scale_atoms(reduction: int) -> int:
    """K atoms of a reduction dimension."""
    return -(-reduction // K_ATOM)


def pool_rows_bound(routes: int, num_local_experts: int) -> int:
    """Pool rows that hold any routing of `routes` routes with any token block: experts start at multiples of 128."""
    padded = routes + min(num_local_experts, routes) * (ATOM_ROWS - 1)
    return -(-padded // ATOM_ROWS) * ATOM_ROWS


@dataclass(frozen=True)
class TileConfig:
    """How a kernel cuts the work.

    Attributes:
        name: what users and caches call it.
        tokens: token block, the N side of the MMA; one of `TOKEN_BLOCKS`, of a pair one of `PAIR_TOKEN_BLOCKS`.
        max_stages: upper bound of the pipeline's stages; shared memory decides below it.
        ctas: 1, or 2 for pairs: two CTAs of a cluster share one MMA of twice the rows, and each loads half the tokens.
    """

    name: str
    tokens: int
    max_stages: int = 12
    ctas: int = 1

    def check(self) -> None:
        """Raise :class:`KernelConfigError` with every broken rule."""
        faults = []
        blocks = PAIR_TOKEN_BLOCKS if self.ctas == 2 else TOKEN_BLOCKS
        if self.ctas not in (1, 2):
            faults.append(f"ctas {self.ctas} must be 1 or 2")
        if self.tokens not in blocks:
            faults.append(f"tokens {self.tokens} with {self.ctas} CTA(s) a tile must be one of {blocks}")
        if self.max_stages < MIN_STAGES:
            faults.append(f"max_stages {self.max_stages} must be at least {MIN_STAGES}")
        if faults:
            raise KernelConfigError(f"tile configuration {self.name!r}: " + "; ".join(faults))


def check_layer(layer: LayerSpec) -> None:
    """Raise :class:`KernelConfigError` with every rule of this kernel that a layer breaks, beside the common ones."""
    layer.check()
    faults = []
    if layer.activation_mode != "nvfp4":
        faults.append(f"activation_mode {layer.activation_mode!r} must be 'nvfp4': the tensor cores take FP4 x FP4")
    if layer.intermediate_size % 32:
        faults.append(f"intermediate_size {layer.intermediate_size} must be a multiple of 32 (TMA rows of 16 bytes)")
    if faults:
        raise KernelConfigError("Blackwell kernel: " + "; ".join(faults))


@dataclass(frozen=True)
class KernelConfig:
    """One compiled kernel: a layer and a tile configuration, with everything that follows from them."""

    layer: LayerSpec
    tile: TileConfig
    stages: int = field(init=False)

    def __post_init__(self) -> None:
        check_layer(self.layer)
        self.tile.check()
        room = (MAX_SHARED_BYTES - self.fixed_shared_bytes) // self.stage_bytes
        stages = min(self.tile.max_stages, room)
        if stages < MIN_STAGES:
            raise KernelConfigError(f"tile configuration {self.tile.name!r}: {MIN_STAGES} stages do not fit")
        object.__setattr__(self, "stages", stages)

    # ----------------------------------------------------------------------------------------------------- exchange
    @property
    def exchange(self) -> bool:
        """Whether tokens go through `payload` and are pulled by the helper warps."""
        return self.layer.ep_size > 1

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return THREADS

    @property
    def staging_threads(self) -> int:
        """Threads that place routes and stage tokens."""
        return 32 * STAGING_WARPS

    @property
    def offer_barrier_threads(self) -> int:
        """None: the warp that offers has staged itself, and met the others after it."""
        return 0

    @property
    def token_block(self) -> int:
        """Tokens of a full token block."""
        return self.tile.tokens

    @property
    def return_pieces(self) -> int:
        """Pieces of a result row in an fc2 tile, the unit of the return counters."""
        return TILE_ROWS // RETURN_COLUMNS

    @property
    def row_pieces(self) -> int:
        """Pieces of a pulled row, arrivals per row on `pool_ready`; 0 where this rank stages all tokens itself."""
        return -(-self.layer.hidden_size // PIECE_COLUMNS) if self.exchange else 0

    @property
    def route_table_experts(self) -> int:
        """Expert slots of the tables that count this rank's routes: all experts of the layer."""
        return -(-self.layer.num_experts // 32) * 32

    @property
    def exchange_words(self) -> int:
        """32-bit words of the exchange's tables (common/exchange.py); 0 without one."""
        return exchange_words(self.layer.ep_size, self.layer.num_local_experts, self.route_table_experts)

    # -------------------------------------------------------------------------------------------------------- tiles
    @property
    def pair(self) -> bool:
        """Whether two CTAs of a cluster work on one tile."""
        return self.tile.ctas == 2

    @property
    def mma_rows(self) -> int:
        """Weight rows of an MMA: those of all its CTAs."""
        return TILE_ROWS * self.tile.ctas

    @property
    def fc1_filled_tiles(self) -> int:
        """Row tiles that hold rows of fc1, per expert: gate and up interleaved by 16 rows, 64 channels a tile."""
        return -(-2 * self.layer.intermediate_size // TILE_ROWS)

    @property
    def fc2_filled_tiles(self) -> int:
        """Row tiles that hold rows of fc2, per expert."""
        return -(-self.layer.hidden_size // TILE_ROWS)

    @property
    def fc1_row_tiles(self) -> int:
        """Row tiles of fc1 per expert, one a CTA, in whole pairs: one whose rows are dropped may be the last."""
        return -(-self.fc1_filled_tiles // self.tile.ctas) * self.tile.ctas

    @property
    def fc2_row_tiles(self) -> int:
        """The same of fc2."""
        return -(-self.fc2_filled_tiles // self.tile.ctas) * self.tile.ctas

    @property
    def has_empty_tiles(self) -> bool:
        """Whether some pair's second tile holds no rows."""
        return self.fc1_row_tiles > self.fc1_filled_tiles or self.fc2_row_tiles > self.fc2_filled_tiles

    @property
    def fc1_k_tiles(self) -> int:
        """Stages of one fc1 tile."""
        return -(-self.layer.hidden_size // K_STAGE)

    @property
    def fc2_k_tiles(self) -> int:
        """Stages of one fc2 tile."""
        return -(-self.layer.intermediate_size // K_STAGE)

    @property
    def table_experts(self) -> int:
        """Expert slots of the scheduler's tables."""
        return -(-self.layer.num_local_experts // 32) * 32

    @property
    def table_words(self) -> int:
        """32-bit words of the scheduler's tables (common/tiles.py)."""
        return 12 * self.table_experts + 16

    @property
    def pool_block_rows(self) -> int:
        """Experts start at multiples of this many pool rows, so that no token block crosses a scale atom."""
        return min(self.tile.tokens, ATOM_ROWS)

    # ------------------------------------------------------------------------------------------------ shared memory
    @property
    def token_scale_blocks(self) -> int:
        """128-row scale blocks that a token block touches."""
        return -(-self.tile.tokens // ATOM_ROWS)

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weight warp loads per stage: codes and scales."""
        return TILE_ROWS * K_STAGE // 2 + self.weight_scale_bytes

    @property
    def weight_scale_bytes(self) -> int:
        """Scale bytes of a stage's weights."""
        return K_STAGE // K_ATOM * ATOM_BYTES

    @property
    def token_code_bytes(self) -> int:
        """Code bytes of a stage's tokens in one CTA: of all of them, or of its half of a pair's."""
        return self.tile.tokens // self.tile.ctas * K_STAGE // 2

    @property
    def token_bytes(self) -> int:
        """Bytes that the token warp loads per stage: codes, and scales of whole 128-row blocks, never shared."""
        return self.token_code_bytes + self.token_scale_bytes

    @property
    def token_scale_bytes(self) -> int:
        """Scale bytes of a stage's tokens."""
        return self.token_scale_blocks * K_STAGE // K_ATOM * ATOM_BYTES

    @property
    def stage_bytes(self) -> int:
        """All bytes of a stage."""
        return self.weight_bytes + self.token_bytes

    @property
    def epilogue_bytes(self) -> int:
        """The epilogue's buffer: fc1 transposes, codes and scales; fc2 keeps bf16 rows of 128 columns."""
        fc1 = EPILOGUE_TOKENS * (EPILOGUE_WARPS * TRANSPOSE_PITCH + TILE_ROWS // 4 + 4)
        fc2 = EPILOGUE_TOKENS * TILE_ROWS * 2
        return max(fc1, fc2)

    @property
    def row_words(self) -> int:
        """Per-token words beside each ring slot: the route, or the routing weight under `before_requant`."""
        return 1

    @property
    def num_barriers(self) -> int:
        """mbarriers: full and empty per stage, two pairs for accumulators, four per ring slot."""
        return 2 * self.stages + 4 + 4 * RING_SLOTS

    @property
    def fixed_shared_bytes(self) -> int:
        """Shared memory besides the stages, alignment slack included."""
        barriers = 8 * (2 * self.tile.max_stages + 4 + 4 * RING_SLOTS)
        rows = RING_SLOTS * self.tile.tokens * 4 * self.row_words
        tables = (self.table_words + self.exchange_words) * 4 + CONTROL_BYTES + RING_SLOTS * 32
        return 1024 + 512 + barriers + rows + tables + self.epilogue_bytes

    @property
    def shared_bytes(self) -> int:
        """All of it; the compiled kernel must not need more."""
        return self.fixed_shared_bytes + self.stages * self.stage_bytes

    # --------------------------------------------------------------------------------------------------------- TMEM
    @property
    def scale_buffers(self) -> int:
        """Scale buffers in TMEM: the manual orders no scale copy behind an earlier MMA, so each waits for its buffer.

        Not more than stages: the wait tells two uses of a stage apart by parity.
        """
        return min(4 if self.tile.tokens <= 128 else 2, self.stages)

    @property
    def scale_buffer_columns(self) -> int:
        """TMEM columns of one stage's scales: 4 per K atom for weights, as many per 128 tokens."""
        return 4 * (K_STAGE // K_ATOM) * (1 + self.token_scale_blocks)

    @property
    def scale_columns(self) -> int:
        """TMEM columns of all scale buffers."""
        return self.scale_buffers * self.scale_buffer_columns

    @property
    def accumulators_overlap(self) -> bool:
        """Whether two accumulators and the scales exceed TMEM, so that the accumulators share columns."""
        return 2 * self.tile.tokens + self.scale_columns > TMEM_COLUMNS

    @property
    def accumulator_stride(self) -> int:
        """Columns from the first accumulator to the second."""
        if self.accumulators_overlap:
            return TMEM_COLUMNS - self.scale_columns - self.tile.tokens
        return self.tile.tokens

    @property
    def accumulator_pairs(self) -> int:
        """full/empty barrier pairs of the accumulators."""
        return 1 if self.accumulators_overlap else 2

    @property
    def weight_scale_column(self) -> int:
        """First TMEM column of the weights' scales in the first buffer, behind both accumulators."""
        return self.accumulator_stride + self.tile.tokens

    @property
    def token_scale_column(self) -> int:
        """First TMEM column of the tokens' scales in the first buffer."""
        return self.weight_scale_column + 4 * (K_STAGE // K_ATOM)

    @property
    def tmem_used(self) -> int:
        """Columns in use."""
        return self.weight_scale_column + self.scale_columns

    @property
    def tmem_allocated(self) -> int:
        """Columns allocated: a power of two."""
        return next(c for c in (32, 64, 128, 256, 512) if c >= self.tmem_used)

    @property
    def passes(self) -> int:
        """Epilogue passes of a tile."""
        return self.tile.tokens // EPILOGUE_TOKENS

    @property
    def release_pass(self) -> int:
        """Pass after whose TMEM load the accumulator goes back to the MMA warp.

        Overlapping accumulators: the shared columns are drained first, so the next tile may start behind them.
        """
        if not self.accumulators_overlap:
            return self.passes - 1
        shared = self.tile.tokens - self.accumulator_stride
        return -(-shared // EPILOGUE_TOKENS) - 1

    def facts(self) -> dict:
        """Everything that distinguishes one compiled kernel from another, JSON-ready."""
        return {"layer": asdict(self.layer), "tile": asdict(self.tile)}


TILES: dict[str, TileConfig] = {
    tile.name: tile
    for tile in (
        *(TileConfig(f"b{n}", n) for n in TOKEN_BLOCKS),
        *(TileConfig(f"b{n}x2", n, ctas=2) for n in (128, 256)),
    )
}
"""`b` and the token block; `x2`: a pair's."""


def choose_tile(layer: LayerSpec, num_tokens: int, num_ctas: int = 2) -> TileConfig:
    """The tile for a bucket of `num_tokens` tokens per rank, from the mean rows of an expert; never measured.

    Pairs where token blocks are widest: below, weights are most of what is loaded, and every CTA loads its own.
    `num_ctas`: CTAs of a launch; one alone has no partner.
    """
    mean = num_tokens * layer.top_k / layer.num_local_experts  # every rank sends as many as it receives
    widest = "b256x2" if num_ctas > 1 else "b256"
    return next((TILES[f"b{n}"] for n in TOKEN_BLOCKS[:-1] if mean <= 0.75 * n), TILES[widest])


def fc1_lag(num_sms: int) -> int:
    """fc1 tiles between the end of an expert's fc1 and its fc2; the value that hides every wait on Hopper."""
    return 3 * num_sms


ADDRESSES = (
    *("w1_codes", "w1_scales", "w2_codes", "w2_scales", *CALL),
    *("pool", "pool_scales", *ROUTE_FACTS, "h", "h_scales", *WORKSPACE),
)
"""64-bit arguments (operands in kernel.py; `launch.py` explains those of every kernel)."""

NUMBERS = (*LAYOUT_NUMBERS, "grid")
"""32-bit arguments: those of every kernel, and the CTAs of the launch, an even number of them for pairs."""
