# SPDX-License-Identifier: Apache-2.0
"""What one compiled Hopper kernel is: layer options, tile configuration, legality, shared-memory and register budgets.

Pure Python without the DSL; called by the compiler, the registry, the host's tactic choice and the tests. It must not
know tensors or devices.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

K_STEP = 128
"""Reduction elements of one weight record."""

RECORD_ROWS = 128
"""Rows of one weight record; a whole tile is two records, a half tile one."""

CODE_BYTES = RECORD_ROWS * K_STEP // 2
RECORD_BYTES = CODE_BYTES + RECORD_ROWS * K_STEP // 16
"""8192 bytes of codes, then 1024 of scales."""

RING_SLOTS = 4
"""Tiles handed from the scheduler warp to the others but not yet finished by all."""

POOL_BLOCK_ROWS = 32
"""Experts start at multiples of this many pool rows."""

MAX_LOCAL_EXPERTS = 256
MAX_TOP_K = 16
MAX_SHARED_BYTES = 232448
REGISTER_FILE = 65536

PASS_TOKENS = 64
"""Tokens an epilogue takes through its staging buffer at a time."""

MAX_TOKEN_WIDTHS = 4

ACTIVATION_MODES = ("nvfp4", "bf16")
COMBINE_FORMATS = ("bf16", "fp8", "fp4")


class KernelConfigError(ValueError):
    """A shape, option or tile configuration that this kernel does not support; the text names the rule."""


@dataclass(frozen=True)
class LayerSpec:
    """The layer's facts that are compiled into a kernel.

    Attributes:
        hidden_size, intermediate_size: H (multiple of 32) and I (multiple of 16).
        num_local_experts: experts of this rank, at most 256.
        top_k: routes per token, at most 16.
        activation_mode: "nvfp4" or "bf16" (docs/numerics.md 4.1, 4.2).
        combine_format: "bf16", "fp8" or "fp4": encoding of a route's result row.
        weigh_before_requant: multiply the routing weight before the requantisation, not in the top-k sum.
        swiglu_limit: clamp bound or None.
        swiglu_alpha, swiglu_beta: h = g * sigmoid(alpha * g) * (u + beta).
    """

    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    top_k: int
    activation_mode: str
    combine_format: str = "bf16"
    weigh_before_requant: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0

    def check(self) -> None:
        """Raise :class:`KernelConfigError` with every broken rule."""
        faults = []
        if self.hidden_size <= 0 or self.hidden_size % 32:
            faults.append(f"hidden_size {self.hidden_size} must be a positive multiple of 32")
        if self.intermediate_size <= 0 or self.intermediate_size % 16:
            faults.append(f"intermediate_size {self.intermediate_size} must be a positive multiple of 16")
        if not 1 <= self.num_local_experts <= MAX_LOCAL_EXPERTS:
            faults.append(f"num_local_experts {self.num_local_experts} must be in 1..{MAX_LOCAL_EXPERTS}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            faults.append(f"top_k {self.top_k} must be in 1..{MAX_TOP_K}")
        if self.activation_mode not in ACTIVATION_MODES:
            faults.append(f"activation_mode {self.activation_mode!r} must be one of {ACTIVATION_MODES}")
        if self.combine_format not in COMBINE_FORMATS:
            faults.append(f"combine_format {self.combine_format!r} must be one of {COMBINE_FORMATS}")
        if self.swiglu_limit is not None and not 0 < self.swiglu_limit:
            faults.append(f"swiglu_limit {self.swiglu_limit} must be > 0 or None")
        if faults:
            raise KernelConfigError("sm_90a kernel: " + "; ".join(faults))

    @property
    def clamp(self) -> float | None:
        """The clamp bound, None where it cannot bind."""
        limit = self.swiglu_limit
        return None if limit is None or limit == float("inf") else limit

    @property
    def fc1_records(self) -> int:
        """128-row records of the interleaved gate and up rows."""
        return -(-2 * self.intermediate_size // RECORD_ROWS)

    @property
    def fc2_records(self) -> int:
        """128-row records of the down rows."""
        return -(-self.hidden_size // RECORD_ROWS)

    @property
    def fc1_steps(self) -> int:
        """128-wide reduction steps of fc1."""
        return -(-self.hidden_size // K_STEP)

    @property
    def fc2_steps(self) -> int:
        """128-wide reduction steps of fc2."""
        return -(-self.intermediate_size // K_STEP)

    @property
    def data_row_bytes(self) -> int:
        """Bytes of one route's result row, data plane."""
        h = self.hidden_size
        return {"bf16": 2 * h, "fp8": h, "fp4": h // 2}[self.combine_format]

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of one route's result row, scale plane (0 for bf16)."""
        h = self.hidden_size
        raw = {"bf16": 0, "fp8": h // 32, "fp4": h // 8}[self.combine_format]
        return -(-raw // 16) * 16


@dataclass(frozen=True)
class TileConfig:
    """How a kernel cuts the work.

    Attributes:
        name: what users and caches call it.
        token_widths: ascending tile widths N; a tile takes the smallest that holds its tokens.
        rows: weight rows of a tile: 256, or 128 (half tiles; a stage then holds two reduction steps).
        math_warpgroups: 2, or 4 (for N <= 64). Whole tiles give each 2 or 1 m64 tiles. Half tiles give each of 2 one
            m64 tile; 4 split the reduction between two pairs, whose sums are added at the end.
        math_registers, producer_registers: setmaxnreg of the two kinds of warps.
        max_stages: upper bound of pipeline stages; the shared memory decides the number below it.
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
    def threads(self) -> int:
        """Threads per CTA: the math warpgroups and four single-purpose warps."""
        return self.math_warpgroups * 128 + 128

    @property
    def m64_per_warpgroup(self) -> int:
        """m64 tiles whose accumulators one warpgroup holds."""
        return 1 if self.rows == 128 else 4 // self.math_warpgroups

    @property
    def split_k(self) -> bool:
        """Whether two warpgroup pairs share a half tile's reduction."""
        return self.rows == 128 and self.math_warpgroups == 4

    @property
    def launch_registers(self) -> int:
        """Registers per thread the compiler may use before setmaxnreg: the register file shared by all threads."""
        return REGISTER_FILE // self.threads // 8 * 8

    def check(self) -> None:
        """Raise :class:`KernelConfigError` with every broken rule."""
        faults = []
        widths = self.token_widths
        if not 1 <= len(widths) <= MAX_TOKEN_WIDTHS or list(widths) != sorted(set(widths)):
            faults.append(f"token_widths {widths} must be 1 to {MAX_TOKEN_WIDTHS} ascending numbers")
        if any(n % 8 or not 8 <= n <= 128 for n in widths):
            faults.append(f"token_widths {widths} must be multiples of 8 in 8..128")
        if self.rows not in (128, 256) or self.math_warpgroups not in (2, 4):
            faults.append(f"rows {self.rows} must be 128 or 256, math_warpgroups {self.math_warpgroups} 2 or 4")
        if widths and widths[-1] > 64 and self.math_warpgroups == 4:
            faults.append("token widths above 64 need 2 math warpgroups: the accumulators do not fit otherwise")
        pool = self.launch_registers * self.threads
        asked = self.math_registers * self.math_warpgroups * 128 + self.producer_registers * 128
        if asked > pool:  # an oversubscribed setmaxnreg hangs the GPU
            faults.append(f"setmaxnreg asks for {asked} registers, the launch owns {pool}")
        if self.math_registers % 8 or self.producer_registers % 8:
            faults.append("register counts must be multiples of 8")
        if faults:
            raise KernelConfigError(f"tile configuration {self.name!r}: " + "; ".join(faults))


@dataclass(frozen=True)
class KernelConfig:
    """One compiled kernel: a layer and a tile configuration, with everything that follows from them."""

    layer: LayerSpec
    tile: TileConfig
    steps_per_stage: tuple[int, ...] = field(init=False)
    stage_bytes: int = field(init=False)
    stages: int = field(init=False)

    def __post_init__(self) -> None:
        self.layer.check()
        self.tile.check()
        t = self.tile
        half = t.rows == 128
        step = t.rows // RECORD_ROWS * RECORD_BYTES
        one = (2 if half else 1) * (step + t.widest * K_STEP * 2)
        # Narrow widths take two steps a stage where they fit the room that the widest needs for one.
        steps = tuple(
            2 if half or (n != t.widest and 2 * (step + n * K_STEP * 2) <= one) else 1 for n in t.token_widths
        )
        object.__setattr__(self, "steps_per_stage", steps)
        object.__setattr__(self, "stage_bytes", one)
        stages = min(t.max_stages, (MAX_SHARED_BYTES - self.fixed_shared_bytes) // one)
        if stages < 3:
            raise KernelConfigError(f"tile configuration {t.name!r}: {stages} stages of {one} bytes fit, 3 are needed")
        object.__setattr__(self, "stages", stages)

    # ------------------------------------------------------------------------------------------------ shared memory
    @property
    def table_experts(self) -> int:
        """Expert slots of the scheduler's tables."""
        return -(-self.layer.num_local_experts // 32) * 32

    @property
    def table_words(self) -> int:
        """32-bit words of the scheduler's tables (see scheduler.py)."""
        return 12 * self.table_experts + 16

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
    def epilogue_warpgroups(self) -> int:
        """Warpgroups with an epilogue (half tiles: the first pair)."""
        return 2 if self.tile.split_k else self.tile.math_warpgroups

    @property
    def sum_floats(self) -> int:
        """Partial sums a thread hands over per pass in half tiles."""
        return min(self.tile.widest // 2, 8)

    @property
    def sum_bytes(self) -> int:
        """Exchange buffer of half tiles."""
        return 2 * self.sum_floats * 512 if self.tile.split_k else 0

    @property
    def row_words(self) -> int:
        """Per-token words next to each ring slot: route or row scale, and routing weight where it is needed."""
        return 2 if self.layer.weigh_before_requant else 1

    @property
    def fixed_shared_bytes(self) -> int:
        """Shared memory besides the stages, alignment slack included."""
        barriers = 8 * (2 * 16 + 3 * RING_SLOTS)
        rows = RING_SLOTS * self.tile.widest * 4 * self.row_words
        tables = self.table_words * 4 + RING_SLOTS * 32 + 512
        return 1024 + 512 + barriers + rows + tables + self.epilogue_warpgroups * self.staging_bytes + self.sum_bytes

    @property
    def shared_bytes(self) -> int:
        """All of it; the compiled kernel must not need more."""
        return self.fixed_shared_bytes + self.stages * self.stage_bytes

    # ------------------------------------------------------------------------------------------------------- tiles
    @property
    def fc1_row_tiles(self) -> int:
        """Row tiles of fc1 per expert."""
        return -(-self.layer.fc1_records * RECORD_ROWS // self.tile.rows)

    @property
    def fc2_row_tiles(self) -> int:
        """Row tiles of fc2 per expert."""
        return -(-self.layer.fc2_records * RECORD_ROWS // self.tile.rows)

    def facts(self) -> dict:
        """Everything that distinguishes one compiled kernel from another, JSON-ready."""
        return {"layer": asdict(self.layer), "tile": asdict(self.tile)}


# Registers: the launch owns 96 * 640 or 168 * 384 of them; every line below uses at most that.
TILES: dict[str, TileConfig] = {
    tile.name: tile
    for tile in (
        TileConfig("n8", (8, 16, 24), 256, 2, 232, 40),
        TileConfig("n16", (16, 24, 32), 256, 2, 232, 40),
        TileConfig("n64", (32, 64, 80, 96), 256, 2, 224, 56),
        TileConfig("n128", (32, 64, 128), 256, 2, 232, 40),
        TileConfig("h8", (8, 16, 24), 128, 2, 232, 40),
        TileConfig("h16", (16, 24, 32), 128, 2, 232, 40),
        TileConfig("h64", (32, 64, 80), 128, 2, 232, 40),
        TileConfig("n16q", (16, 24, 32), 256, 4, 112, 32),
        TileConfig("h16q", (16, 24, 32), 128, 4, 112, 32),
        TileConfig("h64q", (32, 48, 64), 128, 4, 112, 32),
    )
}

FEW_WAVES = 3.0
"""Below so many waves of whole fc1 tiles, half tiles waste less of the last wave."""


def choose_tile(layer: LayerSpec, num_tokens: int, num_sms: int = 132) -> TileConfig:
    """The tile configuration for a bucket of `num_tokens` tokens, from the mean rows of an expert; pure.

    Args:
        layer: the layer; its `num_local_experts` must be all experts the tokens can name (EP = 1).
        num_tokens: the bucket's largest T.
        num_sms: multiprocessors of the GPU.
    """
    mean = num_tokens * layer.top_k / layer.num_local_experts
    waves = layer.num_local_experts * layer.fc1_records / 2 / num_sms
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
