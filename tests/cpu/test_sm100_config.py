# SPDX-License-Identifier: Apache-2.0
"""The Blackwell kernel's host side: legality, budgets, index functions against a restatement, keys, and the lint."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.check_blackwell import check_sass, config_of, expected_counts, lint_ptx
from trtllm_megamoe.presets import PRESETS
from trtllm_megamoe.weights.layout_sm100 import pack_scale_atoms
from vendored_kernels import registry
from vendored_kernels.common.layer import KernelConfigError, LayerSpec
from vendored_kernels.sm100.config import (
    ADDRESSES,
    ATOM_BYTES,
    ATOM_ROWS,
    EPILOGUE_TOKENS,
    MAX_REGISTERS,
    MAX_SHARED_BYTES,
    MIN_STAGES,
    NUMBERS,
    PAIR_TOKEN_BLOCKS,
    REGISTER_FILE,
    THREADS,
    TILES,
    TMEM_COLUMNS,
    KernelConfig,
    TileConfig,
    choose_tile,
    pool_rows_bound,
    scale_atoms,
    scale_block,
    scale_column,
    scale_word,
)

LAYER = LayerSpec(1024, 512, 13, 6, "nvfp4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 40}, "hidden_size 40 must be a positive multiple of 32"),
        ({"intermediate_size": 48}, "intermediate_size 48 must be a multiple of 32"),
        ({"activation_mode": "bf16"}, "activation_mode 'bf16' must be 'nvfp4'"),
        ({"ep_size": 17}, "ep_size 17 must be in 1..16"),
        ({"top_k": 17}, "top_k 17"),
    ],
)
def test_layer_illegal_field_is_refused_with_the_rule(change: dict[str, object], words: str) -> None:
    with pytest.raises(KernelConfigError, match=words):
        KernelConfig(dataclasses.replace(LAYER, **change), TILES["b64"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"tokens": 16}, {"tokens": 96}, {"tokens": 512}, {"max_stages": 2}, {"ctas": 3}, {"ctas": 0}]
)
def test_tile_illegal_field_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(KernelConfigError, match=next(iter(change))):
        dataclasses.replace(TILES["b64"], **change).check()  # type: ignore[arg-type]


def test_tile_of_a_pair_takes_blocks_from_64_tokens() -> None:
    for tokens in PAIR_TOKEN_BLOCKS:
        TileConfig("pair", tokens, ctas=2).check()
    with pytest.raises(KernelConfigError, match="tokens 32 with 2 CTA"):
        TileConfig("pair", 32, ctas=2).check()


@settings(deadline=None, max_examples=60)
@given(
    hidden=st.integers(1, 256).map(lambda n: 32 * n),
    inter=st.integers(1, 128).map(lambda n: 32 * n),
    experts=st.integers(1, 256),
    wire=st.sampled_from(["bf16", "fp8", "fp4"]),
)
def test_shipped_tiles_any_legal_layer_fit_the_chip(hidden: int, inter: int, experts: int, wire: str) -> None:
    layer = LayerSpec(hidden, inter, experts, 8, "nvfp4", wire)
    for tile in TILES.values():
        config = KernelConfig(layer, tile)
        assert config.stages >= MIN_STAGES
        assert config.shared_bytes <= MAX_SHARED_BYTES
        for tiles, rows in ((config.fc1_row_tiles, 2 * inter), (config.fc2_row_tiles, hidden)):
            assert tiles % tile.ctas == 0 and rows <= 128 * tiles < rows + 128 * tile.ctas
        assert config.fc1_k_tiles * 256 >= hidden and config.fc2_k_tiles * 256 >= inter
    assert MAX_REGISTERS * THREADS <= REGISTER_FILE


@pytest.mark.parametrize("name", sorted(TILES))
def test_tmem_plan_nothing_overlaps_but_the_declared_accumulators(name: str) -> None:
    config = KernelConfig(LAYER, TILES[name])
    tokens = config.tile.tokens
    first, second = range(0, tokens), range(config.accumulator_stride, config.accumulator_stride + tokens)
    scales = range(config.weight_scale_column, config.tmem_used)
    shared = set(first) & set(second)
    assert bool(shared) == config.accumulators_overlap == (tokens == 256)
    assert not set(scales) & (set(first) | set(second))
    assert len(scales) == config.scale_buffers * (16 + 16 * config.token_scale_blocks)
    assert config.tmem_used <= config.tmem_allocated <= TMEM_COLUMNS
    # The accumulator goes back once its shared columns are drained: passes up to that one cover them, from either end.
    drained = (config.release_pass + 1) * EPILOGUE_TOKENS
    assert drained >= (len(shared) if shared else tokens)
    assert config.scale_buffers <= config.stages


@pytest.mark.parametrize("tokens", PAIR_TOKEN_BLOCKS)
def test_pair_loads_half_the_tokens_in_each_cta_and_has_room_for_more_stages(tokens: int) -> None:
    alone, pair = (KernelConfig(LAYER, TileConfig("tile", tokens, ctas=ctas)) for ctas in (1, 2))
    assert 2 * pair.token_code_bytes == alone.token_code_bytes == tokens * 128
    assert (pair.weight_bytes, pair.token_scale_bytes) == (alone.weight_bytes, alone.token_scale_bytes)
    assert pair.stages > alone.stages
    assert pair.mma_rows == 2 * alone.mma_rows == 256


@pytest.mark.parametrize(
    ("hidden", "inter", "row_tiles", "empty"),
    [
        (7168, 3072, (48, 56), False),
        (4096, 1536, (24, 32), False),
        (2880, 2880, (46, 24), True),
        (96, 32, (2, 2), True),
    ],
)
def test_pair_row_tiles_come_in_twos_and_an_odd_last_one_has_an_empty_partner(
    hidden: int, inter: int, row_tiles: tuple[int, int], empty: bool
) -> None:
    layer = dataclasses.replace(LAYER, hidden_size=hidden, intermediate_size=inter)
    pair, alone = KernelConfig(layer, TILES["b256x2"]), KernelConfig(layer, TILES["b256"])
    assert (pair.fc1_row_tiles, pair.fc2_row_tiles) == row_tiles
    assert pair.has_empty_tiles is empty and not alone.has_empty_tiles
    assert (pair.fc1_filled_tiles, pair.fc2_filled_tiles) == (alone.fc1_row_tiles, alone.fc2_row_tiles)


def test_scale_functions_agree_with_the_weight_layout() -> None:
    """scale_word against atoms packed by reshape, for every row and atom of a matrix with a tail."""
    rows, columns = 640, 44
    matrix = torch.arange(rows * columns, dtype=torch.int32).reshape(1, rows, columns)
    low, high = (torch.empty(1, rows * columns, dtype=torch.uint8) for _ in range(2))
    pack_scale_atoms((matrix % 256).to(torch.uint8), low)
    pack_scale_atoms((matrix // 256).to(torch.uint8), high)
    packed = (high.int() * 256 + low.int()).reshape(-1, 4)
    atoms = scale_atoms(16 * columns)
    for row in range(rows):
        for atom in range(atoms):
            at = scale_word(row, atom, atoms)
            assert packed[at].tolist() == matrix[0, row, 4 * atom : 4 * atom + 4].tolist()
            block, column = scale_block(row), scale_column(row)
            assert at == (block * atoms + atom) * ATOM_BYTES // 4 + row % 32 * 4 + column


def test_scale_word_far_rows_do_not_wrap() -> None:
    row, atom, atoms = 3_000_000, 111, 112
    assert scale_word(row, atom, atoms) * 4 == (row // 128 * atoms + atom) * 512 + row % 32 * 16 + row % 128 // 32 * 4
    assert scale_word(row, atom, atoms) * 4 > 2**30


@given(st.lists(st.integers(0, 700), min_size=1, max_size=64))
@settings(deadline=None, max_examples=60)
def test_pool_bound_any_counts_and_any_token_block_fit(counts: list[int]) -> None:
    for tile in TILES.values():
        step = KernelConfig(LAYER, tile).pool_block_rows
        rows = sum(-(-c // step) * step for c in counts)
        bound = pool_rows_bound(sum(counts), len(counts))
        assert rows <= bound and bound % ATOM_ROWS == 0


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_choose_tile_more_tokens_never_choose_narrower_blocks(preset: str) -> None:
    shape = PRESETS[preset]
    layer = LayerSpec(shape.hidden_size, shape.intermediate_size, shape.num_experts // 8, shape.top_k, "nvfp4")
    chosen = [choose_tile(layer, tokens) for tokens in (0, 1, 8, 64, 256, 1024, 8192)]
    blocks = [tile.tokens for tile in chosen]
    assert blocks == sorted(blocks) and blocks[0] == 32 and blocks[-1] == 256
    assert [tile.ctas for tile in chosen] == [2 if tokens == 256 else 1 for tokens in blocks]
    for tile in chosen:
        KernelConfig(layer, tile)  # legal


def test_choose_tile_one_cta_alone_is_no_pair() -> None:
    assert choose_tile(LAYER, 8192, 1) == TILES["b256"] and choose_tile(LAYER, 8192, 2) == TILES["b256x2"]


def test_key_every_fact_and_architecture_changes_it() -> None:
    base = KernelConfig(LAYER, TILES["b32"])
    keys = {registry.kernel_key(base, arch) for arch in ("sm_100a", "sm_103a")}
    for change in ({"hidden_size": 1056}, {"combine_format": "fp8"}, {"swiglu_limit": 7.0}, {"top_k": 5}):
        layer = dataclasses.replace(LAYER, **change)  # type: ignore[arg-type]
        keys.add(registry.kernel_key(KernelConfig(layer, TILES["b32"]), "sm_100a"))
    keys.add(registry.kernel_key(KernelConfig(LAYER, TILES["b64"]), "sm_100a"))
    keys.add(registry.kernel_key(KernelConfig(LAYER, TileConfig("b32", 32, 5)), "sm_100a"))
    keys |= {registry.kernel_key(KernelConfig(LAYER, TileConfig("b128", 128, ctas=n)), "sm_100a") for n in (1, 2)}
    assert len(keys) == 10
    assert registry.source_digest("sm_100a") != registry.source_digest("sm_90a")


def test_argument_names_are_unique() -> None:
    names = (*ADDRESSES, *NUMBERS)
    assert len(set(names)) == len(names)


DATA = Path(__file__).parent.parent / "data" / "ptx"
PTX = DATA / "sm100_b32.ptx"
FACTS = {"arch": "sm_100a", **KernelConfig(LayerSpec(800, 96, 3, 3, "nvfp4"), TileConfig("b32s5", 32, 5)).facts()}


@pytest.mark.parametrize("build", ["sm100_b32", "sm100_ranks2", "sm100_pair", "sm100_pair_ranks2"])
def test_lint_of_a_real_kernel_has_no_fault_and_every_rule_can_fail(build: str) -> None:
    text, facts = (DATA / f"{build}.ptx").read_text(), json.loads((DATA / f"{build}.json").read_text())
    assert lint_ptx(text, facts) == []
    lines = text.splitlines()
    for pattern in expected_counts(config_of(facts)):
        first = next(i for i, line in enumerate(lines) if re.match(pattern, line.strip()))
        assert lint_ptx("\n".join(lines[:first] + lines[first + 1 :]), facts), pattern


def test_lint_takes_no_single_kernel_for_a_pair_and_no_pair_for_a_single_one() -> None:
    single, pair = ((DATA / f"sm100_{name}.ptx").read_text() for name in ("b64", "pair"))
    single_facts, pair_facts = (json.loads((DATA / f"sm100_{name}.json").read_text()) for name in ("b64", "pair"))
    assert any("must not appear" in fault for fault in lint_ptx(single, pair_facts))
    assert any("must not appear" in fault for fault in lint_ptx(pair, single_facts))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kind::mxf4nvf4", "kind::mxf8f6f4"),
        (".block16", ".block32"),
        ("ld.acquire.gpu", "ld.relaxed.gpu"),
        ("red.release.gpu", "red.release.cta"),
        ("tcgen05.wait::ld", "nop; tcgen05.wait::ld"),
        (".target sm_100a", ".target sm_103a"),
    ],
)
def test_lint_of_a_changed_kernel_finds_it(old: str, new: str) -> None:
    text = PTX.read_text()
    assert old in text
    assert lint_ptx(text.replace(old, new), FACTS)


def test_check_sass_reports_spills_registers_and_missing_opcodes() -> None:
    sound = ["UTCOMMA.4X"] * 4 + ["UTCCP.T.S.4"] * 8 + ["UTCBAR"] * 2 + ["LDTM.x32"]
    assert check_sass(sound, "REG:168 STACK:0 LOCAL:0", FACTS) == []
    assert check_sass(sound, "REG:176 STACK:0 LOCAL:0", FACTS)
    assert check_sass(sound, "REG:168 STACK:8 LOCAL:0", FACTS)
    assert check_sass([*sound, "STL [R1], R2"], "REG:168 STACK:0 LOCAL:0", FACTS)
    assert check_sass(sound[1:], "REG:168 STACK:0 LOCAL:0", FACTS)
    pair = {**FACTS, "tile": {"name": "pair", "tokens": 64, "ctas": 2}}
    assert check_sass(sound, "REG:168 STACK:0 LOCAL:0", pair)
    both = ["UTCOMMA.2CTA.4X"] * 4 + ["UTCCP.T.S.2CTA.4"] * 8 + ["UTCBAR.2CTA.MULTICAST"] * 2 + ["LDTM.x32"]
    assert check_sass(both, "REG:168 STACK:0 LOCAL:0", pair) == []
