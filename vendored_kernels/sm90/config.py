# SPDX-License-Identifier: Apache-2.0
"""What one compiled Hopper kernel is: layer options, tile configuration, legality, shared-memory and register budgets.

Pure Python without the DSL; called by the compiler, the registry, the host's tactic choice and the tests. It must not
know tensors or devices.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ..common.layer import KernelConfigError, LayerSpec
from ..common.units import DISPATCH_WARPS, READY_ROWS, RETURN_COLUMNS, exchange_words

K_STEP = 128
"""Reduction elements of one weight record."""

RECORD_ROWS = 128
"""Rows of one weight record; a whole tile is two records, a half tile one."""

CODE_BYTES = RECORD_ROWS * K_STEP // 2
RECORD_BYTES = CODE_BYTES + RECORD_ROWS * K_STEP // 16
"""8192 bytes of codes, then 1024 of scales."""

FEW_TOKENS_WIDTH = 32
"""Tile widths up to this count as narrow: such tiles are short, so more of them must be on their way."""

POOL_BLOCK_ROWS = READY_ROWS
"""Experts start at multiples of this many pool rows."""

MAX_SHARED_BYTES = 232448
REGISTER_FILE = 65536

MIN_STAGES = 3
"""Stages of each ring below which loads stop hiding behind the tensor cores."""

PASS_TOKENS = 64
"""Tokens an epilogue takes through its staging buffer at a time."""

STRIP_COLUMNS = 256
"""Columns of a token that a warp stages at a time: 16 bytes a lane. The math warps take a token's strips in turns."""

MAX_STRIPS = 8
"""Strips of a token in one warp's registers, twice: of the token that is stored and of the next one."""

MAX_TOKEN_WIDTHS = 4

STAGE_WEIGHT_BYTES = 2 * RECORD_BYTES
"""A weight stage is two records: both halves of a whole tile's step, or two steps of a half tile."""

WEIGHTS_IN_FLIGHT_BYTES = 110_000
"""Weight bytes per multiprocessor that hide the latency of HBM."""


def fc1_records(layer: LayerSpec) -> int:
    """128-row records of the interleaved gate and up rows."""
    return -(-2 * layer.intermediate_size // RECORD_ROWS)


def fc2_records(layer: LayerSpec) -> int:
    """128-row records of the down rows."""
    return -(-layer.hidden_size // RECORD_ROWS)


def fc1_steps(layer: LayerSpec) -> int:
    """128-wide reduction steps of fc1."""
    return -(-layer.hidden_size // K_STEP)


def fc2_steps(layer: LayerSpec) -> int:
    """128-wide reduction steps of fc2."""
    return -(-layer.intermediate_size // K_STEP)


@dataclass(frozen=True)
class TileConfig:
    """How a kernel cuts the work.

    Attributes:
        name: what users and caches call it.
        token_widths: ascending tile widths N; a tile takes the smallest that holds its tokens.
        rows: weight rows of a tile: 256, or 128 (half tiles; a stage then holds two reduction steps).
        math_warpgroups: 2; a whole tile gives each two m64 tiles, a half tile one. (Four were tried: with several token
            widths the compiler then runs out of registers and serialises wgmma.)
        math_registers, producer_registers: setmaxnreg of the two kinds of warps, where there are no dispatch warps (see
            `KernelConfig`).
        max_stages: upper bound of both pipelines' stages; the shared memory decides the numbers below it.
    """

    name: str
    token_widths: tuple[int, ...]
    rows: int
    math_warpgroups: int
    math_registers: int
    producer_registers: int
    max_stages: int = 9

    @property
    def widest(self) -> int:
        """Tokens of a full token block."""
        return self.token_widths[-1]

    @property
    def m64_per_warpgroup(self) -> int:
        """m64 tiles whose accumulators one warpgroup holds."""
        return self.rows // (64 * self.math_warpgroups)

    def check(self) -> None:
        """Raise :class:`KernelConfigError` with every broken rule."""
        faults = []
        widths = self.token_widths
        if not 1 <= len(widths) <= MAX_TOKEN_WIDTHS or list(widths) != sorted(set(widths)):
            faults.append(f"token_widths {widths} must be 1 to {MAX_TOKEN_WIDTHS} ascending numbers")
        if any(n % 8 or not 8 <= n <= 128 for n in widths):
            faults.append(f"token_widths {widths} must be multiples of 8 in 8..128")
        if self.rows not in (128, 256) or self.math_warpgroups != 2:
            faults.append(f"rows {self.rows} must be 128 or 256, math_warpgroups {self.math_warpgroups} must be 2")
        if self.max_stages < MIN_STAGES:
            faults.append(f"max_stages {self.max_stages} must be at least {MIN_STAGES}")
        if self.math_registers % 8 or self.producer_registers % 8:
            faults.append("register counts must be multiples of 8")
        if faults:
            raise KernelConfigError(f"tile configuration {self.name!r}: " + "; ".join(faults))


@dataclass(frozen=True)
class KernelConfig:
    """One compiled kernel: a layer and a tile configuration, with everything that follows from them.

    Attributes:
        layer, tile: see there.
        all_ranks: one launch runs every rank of the layer (on one GPU: for the sanitizer and for measuring).
        timestamps: the kernel writes when each of its CTAs was where (`vendored_kernels/timeline.py`); for measuring.
        weight_stages, token_stages: what fits of both rings.
    """

    layer: LayerSpec
    tile: TileConfig
    all_ranks: bool = False
    timestamps: bool = False
    weight_stages: int = field(init=False)
    token_stages: int = field(init=False)

    def __post_init__(self) -> None:
        self.layer.check()
        self.tile.check()
        if self.staged_strips > MAX_STRIPS:
            most = MAX_STRIPS * STRIP_COLUMNS * self.tile.math_warpgroups * 4
            raise KernelConfigError(
                f"layer: hidden_size {self.layer.hidden_size} must be at most {most}, what the registers of "
                f"{self.tile.math_warpgroups} math warpgroups hold of a token"
            )
        asked = 128 * self.math_registers * self.tile.math_warpgroups
        asked += self.producer_registers * (self.threads - 128 * self.tile.math_warpgroups)
        if asked > self.launch_registers * self.threads:  # an oversubscribed setmaxnreg hangs the GPU
            raise KernelConfigError(
                f"tile configuration {self.tile.name!r}: setmaxnreg asks for {asked} registers, "
                f"the launch owns {self.launch_registers * self.threads}"
            )
        weights, tokens = self._choose_stages()
        object.__setattr__(self, "weight_stages", weights)
        object.__setattr__(self, "token_stages", tokens)

    def _choose_stages(self) -> tuple[int, int]:
        """Weights come from HBM and want about 110 KB in flight; tokens come from L2 and need three stages."""
        room = MAX_SHARED_BYTES - self.fixed_shared_bytes
        weights = tokens = MIN_STAGES
        if weights * self.weight_stage_bytes + tokens * self.token_stage_bytes > room:
            name = self.tile.name
            raise KernelConfigError(f"tile configuration {name!r}: {MIN_STAGES} stages of each ring do not fit")
        while True:
            used = weights * self.weight_stage_bytes + tokens * self.token_stage_bytes
            more_weights = used + self.weight_stage_bytes <= room and weights < self.tile.max_stages
            more_tokens = used + self.token_stage_bytes <= room and tokens < min(weights, self.tile.max_stages)
            if more_weights and (weights * self.weight_stage_bytes < WEIGHTS_IN_FLIGHT_BYTES or not more_tokens):
                weights += 1
            elif more_tokens:
                tokens += 1
            else:
                return weights, tokens

    # ----------------------------------------------------------------------------------------------------- threads
    @property
    def exchange(self) -> bool:
        """Whether tokens go through `payload` and are pulled by dispatch warps."""
        return self.layer.ep_size > 1

    @property
    def threads(self) -> int:
        """Threads per CTA: math warpgroups, four single-purpose warps, dispatch warps where there is an exchange."""
        return self.tile.math_warpgroups * 128 + 128 + (32 * DISPATCH_WARPS if self.exchange else 0)

    @property
    def staging_threads(self) -> int:
        """Threads that place routes and stage tokens: the math warps."""
        return self.tile.math_warpgroups * 128

    @property
    def offer_barrier_threads(self) -> int:
        """Threads that meet before CTA 0 offers its payload: those that stage and one dispatch warp."""
        return self.staging_threads + 32

    @property
    def launch_registers(self) -> int:
        """Registers per thread the compiler may use before setmaxnreg: the register file shared by all threads."""
        return REGISTER_FILE // self.threads // 8 * 8

    @property
    def producer_registers(self) -> int:
        """setmaxnreg of all other warps; beside dispatch warps they make do with fewer."""
        return min(self.tile.producer_registers, 32) if self.exchange else self.tile.producer_registers

    @property
    def math_registers(self) -> int:
        """setmaxnreg of the math warps: the tile's, or what the other warps leave of the launch's."""
        others = self.threads // 128 - self.tile.math_warpgroups
        left = self.launch_registers * self.threads // 128 - others * self.producer_registers
        left = left // self.tile.math_warpgroups // 8 * 8
        return min(self.tile.math_registers, left) if self.exchange else self.tile.math_registers

    @property
    def staged_strips(self) -> int:
        """Strips of a token that each math warp stages."""
        return -(-self.layer.hidden_size // (STRIP_COLUMNS * self.tile.math_warpgroups * 4))

    # ------------------------------------------------------------------------------------------------ shared memory
    @property
    def steps_per_stage(self) -> int:
        """Reduction steps of a stage."""
        return 2 if self.tile.rows == RECORD_ROWS else 1

    @property
    def weight_stage_bytes(self) -> int:
        """Bytes of a weight stage."""
        return STAGE_WEIGHT_BYTES

    @property
    def token_stage_bytes(self) -> int:
        """Bytes of a token stage: room for the widest tile."""
        return self.steps_per_stage * self.tile.widest * K_STEP * 2

    @property
    def table_experts(self) -> int:
        """Expert slots of the scheduler's tables."""
        return -(-self.layer.num_local_experts // 32) * 32

    @property
    def table_words(self) -> int:
        """32-bit words of the scheduler's tables (see scheduler.py)."""
        return 12 * self.table_experts + 16

    @property
    def route_table_experts(self) -> int:
        """Expert slots of the tables that count this rank's routes: all experts of the layer."""
        return -(-self.layer.num_experts // 32) * 32

    @property
    def exchange_words(self) -> int:
        """32-bit words of the exchange's tables (see exchange.py); 0 without one."""
        return exchange_words(self.layer.ep_size, self.layer.num_local_experts, self.route_table_experts)

    @property
    def ring_slots(self) -> int:
        """Tiles handed from the scheduler warp to the others but not yet finished by all.

        From the claim of a tile to its release pass about 4 us, a small tile takes less than 1.
        """
        return 8 if self.tile.widest <= FEW_TOKENS_WIDTH else 4

    @property
    def pass_tokens(self) -> int:
        """Tokens per pass through an epilogue's staging buffer."""
        return min(self.tile.widest, PASS_TOKENS)

    @property
    def fc1_pitch(self) -> int:
        """Bytes of one token in the fc1 staging buffer: 32 channels and 16 bytes against bank conflicts."""
        return 32 * (4 if self.layer.activation_mode == "nvfp4" else 2) + 16

    @property
    def fc2_pitch(self) -> int:
        """Bytes of one token in the fc2 staging buffer: 64 bf16 columns and padding; 0 for direct stores."""
        return 0 if self.layer.combine_format == "bf16" else 64 * 2 + 16

    @property
    def staging_bytes(self) -> int:
        """Staging bytes of one warpgroup."""
        return self.pass_tokens * max(self.fc1_pitch, self.fc2_pitch)

    @property
    def row_words(self) -> int:
        """Per-token words next to each ring slot: route or row scale, and routing weight where it is needed."""
        return 2 if self.layer.weigh_before_requant else 1

    @property
    def fixed_shared_bytes(self) -> int:
        """Shared memory besides the stages, alignment slack included."""
        barriers = 8 * (4 * self.tile.max_stages + 3 * self.ring_slots)
        rows = self.ring_slots * self.tile.widest * 4 * self.row_words
        tables = (self.table_words + self.exchange_words) * 4 + self.ring_slots * 32 + 512
        return 1024 + 512 + barriers + rows + tables + self.tile.math_warpgroups * self.staging_bytes

    @property
    def shared_bytes(self) -> int:
        """All of it; the compiled kernel must not need more."""
        rings = self.weight_stages * self.weight_stage_bytes + self.token_stages * self.token_stage_bytes
        return self.fixed_shared_bytes + rings

    # ------------------------------------------------------------------------------------------------------- tiles
    @property
    def token_block(self) -> int:
        """Tokens of a full token block."""
        return self.tile.widest

    @property
    def pool_block_rows(self) -> int:
        """Experts start at multiples of this many pool rows."""
        return POOL_BLOCK_ROWS

    @property
    def return_pieces(self) -> int:
        """Pieces of a result row in a full fc2 tile, the unit of the return counters."""
        return self.tile.rows // RETURN_COLUMNS

    @property
    def fc1_row_tiles(self) -> int:
        """Row tiles of fc1 per expert."""
        return -(-fc1_records(self.layer) * RECORD_ROWS // self.tile.rows)

    @property
    def fc2_row_tiles(self) -> int:
        """Row tiles of fc2 per expert."""
        return -(-fc2_records(self.layer) * RECORD_ROWS // self.tile.rows)

    def facts(self) -> dict:
        """Everything that distinguishes one compiled kernel from another, JSON-ready."""
        return {
            "layer": asdict(self.layer),
            "tile": asdict(self.tile),
            "all_ranks": self.all_ranks,
            "timestamps": self.timestamps,
        }


# Registers: the launch owns 168 * 384 of them; 232 * 256 + 40 * 128 is all of that.
TILES: dict[str, TileConfig] = {
    tile.name: tile
    for tile in (
        TileConfig("n8", (8, 16, 24), 256, 2, 232, 40),
        TileConfig("n16", (16, 24, 32), 256, 2, 232, 40),
        TileConfig("n64", (32, 64, 96), 256, 2, 232, 40),
        TileConfig("n128", (32, 64, 128), 256, 2, 232, 40),
        TileConfig("h8", (8, 16, 24), 128, 2, 232, 40),
        TileConfig("h16", (16, 24, 32), 128, 2, 232, 40),
        TileConfig("h64", (32, 64, 80), 128, 2, 232, 40),
    )
}

FEW_WAVES = 3.0
"""Below so many waves of whole fc1 tiles, half tiles waste less of the last wave."""


def choose_tile(layer: LayerSpec, num_tokens: int, num_sms: int = 132) -> TileConfig:
    """The tile configuration for a bucket of `num_tokens` tokens, from the mean rows of an expert; pure.

    Args:
        layer: the layer.
        num_tokens: the bucket's largest T per rank.
        num_sms: multiprocessors of the GPU.
    """
    mean = num_tokens * layer.top_k / layer.num_local_experts  # every rank sends as many as it receives
    waves = layer.num_local_experts * fc1_records(layer) / 2 / num_sms
    half = waves < FEW_WAVES
    if mean <= 6:
        return TILES["h8" if half else "n8"]
    if mean <= 24:
        return TILES["h16" if half else "n16"]
    if mean <= 64 and half:
        return TILES["h64"]
    if mean <= 96:
        return TILES["n64"]
    return TILES["n128"]


def fc1_lag(layer: LayerSpec, tile: TileConfig, num_sms: int = 132) -> int:
    """fc1 tiles between the end of an expert's fc1 and its fc2: three per multiprocessor hides every wait."""
    del layer, tile
    return 3 * num_sms
