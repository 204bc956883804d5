# SPDX-License-Identifier: Apache-2.0
"""The region table: every byte of a rank's workspace, named once (design D7).

The CPU engine, the kernels' launch wrappers, `explain` and the tests all read offsets from here; nothing else computes
one. Everything is a pure function of :class:`Geometry`, in Python integers (no 32-bit overflow is possible).

A rank owns two allocations: `shared` (peers map it) and `local`. Only regions marked `zero_at_start` must hold zeros
before the first launch, and only then (R6); all other bytes may hold anything, before every launch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode, CombineFormat, round_up

Space = Literal["shared", "local"]

REGION_ALIGN_BYTES = 256
"""Alignment of every region: TMA wants 128, one cache sector pair more keeps counters of two regions apart."""

TOKEN_BLOCK_ROWS = 32
"""Pool rows of one `pool_ready` counter; experts start at multiples of it."""

SCALE_ATOM_ROWS, SCALE_ATOM_COLUMNS, SCALE_ATOM_BYTES = 128, 64, 512
"""A Blackwell scale atom: so many rows and columns of NVFP4 codes share so many bytes of e4m3 scales."""

PoolLayout = Literal["f16", "sm_100"]
"""What kernels keep token rows as: f16 values, or packed NVFP4 codes with their scales in atoms (experts then start at
multiples of up to SCALE_ATOM_ROWS rows)."""

COUNT_BITS = 24
"""A size cell is a u64 {epoch: upper 40 bits, count: lower 24}: it never wraps and zero is a fine start value."""

LAUNCH_COUNTER_WORDS = 96
"""A kernel's own counters: an exit ticket, then two banks of {claim, staged, finished fc2 tiles}."""

NARROWEST_TOKEN_TILE = 8
"""Token blocks of fc1 output are at least this wide; it bounds the ready counters."""

COUNTER_BANKS = 2
"""Size cells are banked by epoch parity: a source may publish launch n+1 before the owner has read launch n."""

HEADER_WORDS = ("generation", "layout digest", "facts of even launches", "facts of odd launches", *["unused"] * 4)
"""Words of `header`, u64 below 2^63: the first two are written at allocation, a launch's facts before its cells."""

HEADER_GENERATION, HEADER_LAYOUT, HEADER_FACTS = 0, 1, 2
"""Index of each; the facts of launch n are word HEADER_FACTS + n % COUNTER_BANKS."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The facts that fix every offset; identical on all ranks."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    ep_size: int
    combine_format: CombineFormat
    activations: Literal["auto", "nvfp4", "bf16"]
    pool_layout: PoolLayout = "f16"

    @classmethod
    def from_config(cls, config: MegaMoeConfig, ep_size: int, pool_layout: PoolLayout = "f16") -> Geometry:
        """Take the layout facts of a layer's configuration; `pool_layout` is the engine's."""
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.top_k,
            config.max_tokens_per_rank,
            ep_size,
            config.combine_format,
            config.activations,
            pool_layout,
        )

    @property
    def num_local_experts(self) -> int:
        """L = E / R."""
        return self.num_experts // self.ep_size

    @property
    def routes_per_rank(self) -> int:
        """Most routes one rank can send: T * K (masked ones included)."""
        return self.max_tokens_per_rank * self.top_k

    @property
    def max_pool_rows(self) -> int:
        """Rows the pool must hold under the WORST routing, block padding included.

        Every route of every rank may hit this rank, even one expert of it (a token may name an expert K times), so
        the bound is R*T*K routes and not R*T*min(K, L). An expert with c > 0 rows occupies round_up(c, B), at most
        c + B - 1 rows, and at most min(L, routes) experts are non-empty. B is the largest that any kernel uses.
        """
        block = TOKEN_BLOCK_ROWS if self.pool_layout == "f16" else SCALE_ATOM_ROWS
        routes = self.ep_size * self.routes_per_rank
        return round_up(routes + min(self.num_local_experts, routes) * (block - 1), block)

    @property
    def max_token_blocks(self) -> int:
        """Token blocks of the narrowest tile under the worst routing: every non-empty expert may end with a part."""
        routes = self.ep_size * self.routes_per_rank
        return -(-routes // NARROWEST_TOKEN_TILE) + min(self.num_local_experts, routes)

    @property
    def payload_row_bytes(self) -> int:
        """Stride of one staged token row: packed NVFP4 codes, or 16-bit values; `auto` reserves the larger."""
        return self.hidden_size // 2 if self.activations == ActivationMode.NVFP4.value else 2 * self.hidden_size

    @property
    def payload_scale_row_bytes(self) -> int:
        """Stride of one staged token's scales: H/16 e4m3 bytes, or one fp32 2^-p; padded to 16."""
        return round_up(max(self.hidden_size // 16, 4), 16)


@dataclass(frozen=True, slots=True)
class Region:
    """One named piece of a workspace: byte offset from the space's base, bytes, and who uses it how."""

    name: str
    space: Space
    offset_bytes: int
    num_bytes: int
    zero_at_start: bool
    dtype: str
    shape: tuple[int, ...]
    purpose: str

    @property
    def end_bytes(self) -> int:
        """First byte behind the region."""
        return self.offset_bytes + self.num_bytes


_ZERO_AT_START = frozenset(
    {
        "header",
        "abort",
        "size_cells",
        "payload_tags",
        "return_counters",
        "epoch",
        "expected_returns",
        "error_record",
        "launch_counters",
        "fc1_ready",
        "pool_ready",
    }
)

_CONTINUES = frozenset({"payload_tags"})
"""Regions that begin where the one before them ends: kernels take both from one address."""

_Entry = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape and purpose of a region."""

_DTYPE_BYTES = {"u8": 1, "i32": 4, "u32": 4, "f32": 4, "f16": 2, "u64": 8}


class RegionTable:
    """All regions of a geometry, back to back in each space; aligned to REGION_ALIGN_BYTES unless it continues one."""

    def __init__(self, geometry: Geometry) -> None:
        check_limits(geometry)
        self.geometry = geometry
        self._regions: dict[str, Region] = {}
        self._cursor: dict[Space, int] = {"shared": 0, "local": 0}
        self._lay_out_shared(geometry)
        self._lay_out_local(geometry)

    def __getitem__(self, name: str) -> Region:
        return self._regions[name]

    def regions(self, space: Space | None = None) -> list[Region]:
        """Regions in layout order, of one space or of both."""
        return [r for r in self._regions.values() if space in (None, r.space)]

    def total_bytes(self, space: Space) -> int:
        """Bytes to allocate for a space."""
        return self._cursor[space]

    def _add(self, space: Space, name: str, dtype: str, shape: tuple[int, ...], purpose: str) -> None:
        num_bytes = _DTYPE_BYTES[dtype]
        for extent in shape:
            num_bytes *= extent
        offset = list(self._regions.values())[-1].end_bytes if name in _CONTINUES else self._cursor[space]
        zero_at_start = name in _ZERO_AT_START
        self._regions[name] = Region(name, space, offset, num_bytes, zero_at_start, dtype, shape, purpose)
        self._cursor[space] = round_up(offset + num_bytes, REGION_ALIGN_BYTES)

    def _lay_out_shared(self, g: Geometry) -> None:
        r, el, k, t = g.ep_size, g.num_local_experts, g.top_k, g.max_tokens_per_rank
        fmt, h = g.combine_format, g.hidden_size
        for name, dtype, shape, purpose in (
            ("header", "u64", (len(HEADER_WORDS),), "allocation, layout, launch facts; owner writes, peers compare"),
            ("abort", "u32", (1,), "non-zero: some rank failed and every wait ends; any rank writes"),
            (
                "size_cells",
                "u64",
                (COUNTER_BANKS, r, el),
                "{epoch, count} per source and local expert; the source writes",
            ),
            ("payload_tags", "u64", (r,), "launch whose payload and index rows are out, per source; the source writes"),
            ("return_counters", "u64", (r,), "rows returned so far, per expert owner; cumulative, the owner writes"),
            ("index_rows", "i32", (r, t * k), "per source: its routes (token * K + slot) to this rank, by expert"),
            ("payload", "u8", (t, g.payload_row_bytes), "this rank's token rows, staged for peers to pull"),
            (
                "payload_scales",
                "u8",
                (t, g.payload_scale_row_bytes),
                "block scales, or one fp32 2^-p, of each staged row",
            ),
            ("route_weights", "f32", (t, k), "routing weights; pulled under score placement before_requant"),
            ("result_data", "u8", (t * k, fmt.data_row_bytes(h)), "returned rows in wire format, by token * K + slot"),
            (
                "result_scales",
                "u8",
                (t * k, fmt.scale_row_bytes(h)),
                "block scales of the returned rows (none for bf16)",
            ),
        ):
            self._add("shared", name, dtype, shape, purpose)

    def _lay_out_local(self, g: Geometry) -> None:
        rows = g.max_pool_rows
        if g.pool_layout == "f16":
            rows_in, rows_between = _f16_rows(g)
        else:
            rows_in, rows_between = _atom_rows(g)
        for name, dtype, shape, purpose in (
            ("epoch", "u64", (1,), "number of finished launches; the running launch is epoch + 1"),
            ("expected_returns", "u64", (g.ep_size,), "rows sent out so far, per expert owner; cumulative"),
            ("error_record", "u64", (8,), "first failure: {set, rank, site, index, epoch, expected, seen, 0}"),
            *rows_in,
            ("pool_weight", "f32", (rows,), "routing weight of a pulled row under before_requant"),
            ("pool_meta", "i32", (rows, 2), "{source rank, route} of each pool row"),
            *rows_between,
            ("launch_counters", "u32", (LAUNCH_COUNTER_WORDS,), "kernel: exit ticket and two banks of tile counters"),
            ("fc1_ready", "u32", (COUNTER_BANKS, g.max_token_blocks), "kernel: finished fc1 row tiles per token block"),
            (
                "pool_ready",
                "u32",
                (COUNTER_BANKS, rows // TOKEN_BLOCK_ROWS),
                "kernel: pulled row pieces per 32-row block of the pool",
            ),
            ("route_rows", "i32", (g.max_tokens_per_rank, g.top_k), "kernel: pool row of each own route, -1 if masked"),
        ):
            self._add("local", name, dtype, shape, purpose)


def _f16_rows(g: Geometry) -> tuple[list[_Entry], list[_Entry]]:
    """Regions of token rows and of fc1 output rows where both are f16."""
    rows = g.max_pool_rows
    pool = [
        ("pool", "f16", (rows, g.hidden_size), "pulled token rows in expert order, decoded to f16"),
        ("pool_row_scale", "f32", (rows,), "2^-p of a pulled row in bf16 activation mode, else 1"),
    ]
    return pool, [
        ("fc1_out", "f16", (rows, g.intermediate_size), "fc1 output after SwiGLU and requantisation, f16 values")
    ]


def _atom_rows(g: Geometry) -> tuple[list[_Entry], list[_Entry]]:
    """The same as packed NVFP4: two codes a byte, and atoms of 128 rows x 64 columns."""
    rows = g.max_pool_rows
    blocks = rows // SCALE_ATOM_ROWS
    out = []
    for name, scales, columns, what in (
        ("pool", "pool_scales", g.hidden_size, "pulled token rows in expert order"),
        ("fc1_out", "fc1_scales", g.intermediate_size, "fc1 output after SwiGLU and requantisation"),
    ):
        atoms = -(-columns // SCALE_ATOM_COLUMNS)
        out.append(
            [
                (name, "u8", (rows, columns // 2), f"{what}: packed e2m1"),
                (scales, "u8", (blocks, atoms, SCALE_ATOM_BYTES), f"{what}: e4m3 scales in atom order"),
            ]
        )
    return out[0], out[1]


def layout_digest(table: RegionTable) -> int:
    """Non-zero digest, below 2^63, of everything that fixes an offset: the geometry and every region of both spaces."""
    text = repr((table.geometry, [(r.name, r.space, r.offset_bytes, r.num_bytes) for r in table.regions()]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1 | 1


def header_words(table: RegionTable, generation: int) -> tuple[int, ...]:
    """The header of a fresh allocation: a peer that holds an older or differently laid out one sees other words."""
    words = [0] * len(HEADER_WORDS)
    words[HEADER_GENERATION], words[HEADER_LAYOUT] = generation, layout_digest(table)
    return tuple(words)


def launch_facts(layer_index: int, weights_digest: int) -> int:
    """Word that ranks compare in every launch: which of the workspace's layers, and its weights' shared facts.

    It needs a bank per parity of the launch number, like size cells: a rank may write launch n+1's while a peer to
    which it sent no rows has yet to compare launch n's. Launch n+2 needs that peer's cells of n+1, so two suffice.

    Args:
        layer_index: Order of construction on the workspace, from 0; the same on all ranks.
        weights_digest: 32-bit digest of what all ranks must have loaded alike.
    """
    return (layer_index + 1) << 32 | weights_digest


def check_limits(geometry: Geometry) -> None:
    """Refuse a geometry whose counts do not fit the protocol's fields; names the field, the number and the limit.

    Divisibility is judged by contract.judge before a geometry is laid out.
    """
    g = geometry
    faults = []
    if g.routes_per_rank >= 1 << COUNT_BITS:
        faults.append(
            f"max_tokens_per_rank * top_k = {g.routes_per_rank} does not fit a size cell "
            f"(must be below {1 << COUNT_BITS})"
        )
    if g.max_pool_rows >= 1 << 31:
        faults.append(f"the worst routing needs {g.max_pool_rows} pool rows (must be below {1 << 31})")
    if faults:
        raise MegaMoeConfigError("illegal layer geometry: " + "; ".join(faults))
