# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel's host side: legality, budgets, tile choice, keys, and the lint that guards its memory order."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.check_kernels import WINDOW, expected_wgmma, lint_ptx
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.contract import MAX_HIDDEN_SIZE, judge
from trtllm_megamoe.presets import PRESETS
from vendored_kernels import launch, registry
from vendored_kernels.common.layer import KernelConfigError, LayerSpec
from vendored_kernels.common.units import HELD_INDICES
from vendored_kernels.launch import ADDRESSES, NUMBERS, Launch
from vendored_kernels.sm90.config import MAX_SHARED_BYTES, REGISTER_FILE, TILES, KernelConfig, TileConfig, choose_tile

LAYER = LayerSpec(1024, 512, 13, 6, "nvfp4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 40}, "hidden_size 40 must be a positive multiple of 32"),
        ({"intermediate_size": 24}, "intermediate_size 24 must be a positive multiple of 16"),
        ({"num_local_experts": 257}, "num_local_experts 257"),
        ({"top_k": 17}, "top_k 17"),
        ({"activation_mode": "fp8"}, "activation_mode 'fp8'"),
        ({"combine_format": "int8"}, "combine_format 'int8'"),
        ({"swiglu_limit": 0.0}, "swiglu_limit 0.0"),
    ],
)
def test_layer_illegal_field_is_refused_with_the_rule(change: dict[str, object], words: str) -> None:
    with pytest.raises(KernelConfigError, match=words):
        KernelConfig(dataclasses.replace(LAYER, **change), TILES["n16"])  # type: ignore[arg-type]


def test_layer_several_faults_are_all_named() -> None:
    with pytest.raises(KernelConfigError, match=r"hidden_size 1.*top_k 0"):
        dataclasses.replace(LAYER, hidden_size=1, top_k=0).check()


def test_layer_wider_than_the_registers_hold_is_refused_by_every_tile_and_by_the_contract() -> None:
    for tile in TILES.values():
        KernelConfig(dataclasses.replace(LAYER, hidden_size=MAX_HIDDEN_SIZE), tile)
        with pytest.raises(KernelConfigError, match=f"hidden_size 16416 must be at most {MAX_HIDDEN_SIZE}"):
            KernelConfig(dataclasses.replace(LAYER, hidden_size=16416), tile)
    config = MegaMoeConfig(
        hidden_size=16416, intermediate_size=512, num_experts=16, top_k=6, max_tokens_per_rank=8, activations="bf16"
    )
    verdict = judge(config, 2)
    assert not verdict.is_eligible and f"at most {MAX_HIDDEN_SIZE}" in verdict.describe()


def test_tile_oversubscribed_registers_are_refused() -> None:
    """setmaxnreg beyond what the launch owns hangs the GPU."""
    with pytest.raises(KernelConfigError, match="setmaxnreg asks for"):
        KernelConfig(LAYER, TileConfig("too-many", (16,), 256, 2, 240, 40))


@pytest.mark.parametrize("widths", [(), (16, 8), (8, 8), (8, 16, 24, 32, 40), (12,), (136,)])
def test_tile_illegal_widths_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(KernelConfigError, match="token_widths"):
        TileConfig("bad", widths, 256, 2, 232, 40).check()


@settings(deadline=None, max_examples=60)
@given(
    hidden=st.integers(1, 256).map(lambda n: 32 * n),
    inter=st.integers(1, 256).map(lambda n: 16 * n),
    experts=st.integers(1, 512),
    top_k=st.integers(1, 16),
    mode=st.sampled_from(["nvfp4", "bf16"]),
    wire=st.sampled_from(["bf16", "fp8", "fp4"]),
    before=st.booleans(),
    ranks=st.sampled_from([1, 2, 8, 16]),
)
def test_shipped_tiles_any_legal_layer_fit_the_chip(
    hidden: int, inter: int, experts: int, top_k: int, mode: str, wire: str, before: bool, ranks: int
) -> None:
    experts = max(experts // ranks, 1)  # of one rank; a layer has up to 512, and one rank at most 256
    layer = LayerSpec(hidden, inter, min(experts, 256), top_k, mode, wire, before, ep_size=ranks)
    for tile in TILES.values():
        config = KernelConfig(layer, tile)
        assert config.shared_bytes <= MAX_SHARED_BYTES
        assert min(config.weight_stages, config.token_stages) >= 3
        others = config.threads - 128 * tile.math_warpgroups
        registers = 128 * tile.math_warpgroups * config.math_registers + others * config.producer_registers
        assert registers <= config.launch_registers * config.threads <= REGISTER_FILE
        assert config.fc1_row_tiles * tile.rows >= 2 * inter
        assert config.fc2_row_tiles * tile.rows >= hidden
        assert config.weight_stage_bytes % 128 == 0 and config.token_stage_bytes % 1024 == 0


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("mode", ["nvfp4", "bf16"])
def test_choose_tile_more_tokens_never_choose_narrower_blocks(preset: str, mode: str) -> None:
    shape = PRESETS[preset]
    layer = LayerSpec(shape.hidden_size, shape.intermediate_size, shape.num_experts // 8, shape.top_k, mode)
    widest = [choose_tile(layer, tokens).widest for tokens in (0, 1, 8, 64, 256, 1024, 8192)]
    assert widest == sorted(widest)
    assert choose_tile(layer, 1) == choose_tile(layer, 1)
    KernelConfig(layer, choose_tile(layer, 1))  # legal


def test_choose_tile_few_waves_take_half_tiles() -> None:
    qwen = LayerSpec(4096, 1536, 16, 8, "bf16")
    assert choose_tile(qwen, 32).rows == 128
    v4_pro = LayerSpec(7168, 3072, 48, 6, "bf16")
    assert choose_tile(v4_pro, 128).rows == 256


def test_key_every_fact_changes_it() -> None:
    base = KernelConfig(LAYER, TILES["n16"])
    others = [
        KernelConfig(dataclasses.replace(LAYER, **change), TILES["n16"])  # type: ignore[arg-type]
        for change in (
            {"hidden_size": 1056},
            {"activation_mode": "bf16"},
            {"combine_format": "fp8"},
            {"swiglu_limit": 7.0},
            {"swiglu_alpha": 1.5},
            {"weigh_before_requant": True},
            {"top_k": 5},
            {"ep_size": 2},
        )
    ]
    others += [KernelConfig(LAYER, TILES["n8"]), KernelConfig(LAYER, TILES["n16"], all_ranks=True)]
    keys = {registry.kernel_key(config, "sm_90a") for config in (base, *others)}
    assert len(keys) == 1 + len(others)
    assert registry.kernel_key(base, "sm_90a") == registry.kernel_key(KernelConfig(LAYER, TILES["n16"]), "sm_90a")


def test_load_missing_object_names_kernel_and_command(tmp_path: Path) -> None:
    with pytest.raises(registry.KernelNotCompiledError, match=r"hidden 1024.*tile n16.*trtllm_megamoe compile"):
        registry.load_kernel(KernelConfig(LAYER, TILES["n16"]), "sm_90a", tmp_path)


def test_launch_unknown_argument_is_refused() -> None:
    with pytest.raises(KeyError, match="wieght"):
        Launch(lambda *args: None, None, {"wieght": 1})


def test_launch_arguments_keep_the_compiled_order() -> None:
    """The object's signature is positional: a name in two places would silently shift every argument behind it."""
    names = (*ADDRESSES, *NUMBERS)
    assert len(set(names)) == len(names)
    source = (Path(launch.__file__).parent / "sm90" / "kernel.py").read_text(encoding="utf-8")
    signature = source.split("def __call__(", 1)[1].split("stream,", 1)[0]
    assert re.findall(r"(\w+): Int(?:32|64),", signature) == list(names)


def test_expected_wgmma_matches_the_main_loop() -> None:
    facts = KernelConfig(LAYER, TILES["n16"]).facts()
    assert expected_wgmma(facts) == 48  # 8 k16 steps, 2 m64 tiles, 3 widths
    assert expected_wgmma(KernelConfig(LAYER, TILES["h16"]).facts()) == 48  # 8 k16, 1 m64, 2 steps, 3 widths


def _sound_ptx(exchange: bool = False) -> str:
    """The order-relevant skeleton of a kernel's PTX."""
    wait = ["ld.acquire.gpu.global.b32 %r1, [%rd1];", "ld.acquire.sys.global.b32 %r2, [%rd2];"]
    wait += ["st.release.sys.global.b32 [%rd2], 1;", "ld.acquire.gpu.global.b32 %r1, [%rd1];"]
    other_work = ["add.s32 %r9, %r9, 1;"] * WINDOW
    token = [*wait, *wait, "fence.proxy.async;", "cp.async.bulk.tensor.2d [%r3];", *other_work]
    release = ["fence.proxy.async;", "red.release.gpu.global.add.u32 [%rd3], 1;"]
    release += ["red.release.gpu.global.add.u32 [%rd4], 1;"]
    if exchange:
        publish = ["fence.acq_rel.sys;", "st.relaxed.sys.global.b64 [%rd7], %rd8;"]
        far = ["ld.acquire.sys.global.b64 %rd9, [%rd1];", "st.release.sys.global.b32 [%rd2], 1;"]
        far += ["ld.acquire.sys.global.b64 %rd9, [%rd1];", "ld.acquire.sys.global.b32 %r2, [%rd2];"]
        offer = [*wait, "fence.acq_rel.sys;", "st.relaxed.sys.global.b64 [%rd7], %rd8;", *far]
        headers = ["st.release.sys.global.b32 [%rd2], 1;"] * 3
        pull = ["red.release.gpu.global.add.u32 [%rd3], 1;", *other_work]
        give_back = ["red.release.sys.global.add.u64 [%rd3], %rd4;"]
        block = ["fence.proxy.async;", "red.release.gpu.global.add.u32 [%rd3], 1;", *other_work]
        staged = ["bar.sync 9, 256;", "red.release.gpu.global.add.u32 [%rd5], 1;", *far]
        leave = ["atom.acq_rel.gpu.global.add.u32 %r4, [%rd6], 1;", *["ld.acquire.sys.global.b32 %r2, [%rd2];"] * 3]
        return "\n".join([*publish, *far, *offer, *headers, *token, *block, *give_back, *pull, *staged, *leave])
    math_warps = ["fence.proxy.async;", "bar.sync 9, 256;", "red.release.gpu.global.add.u32 [%rd5], 1;", *wait]
    leave = ["atom.acq_rel.gpu.global.add.u32 %r4, [%rd6], 1;", *["ld.acquire.sys.global.b32 %r2, [%rd2];"] * 3]
    return "\n".join([*token, *release, *other_work, *math_warps, *leave])


@pytest.mark.parametrize("exchange", [False, True])
def test_lint_sound_ptx_has_no_fault(exchange: bool) -> None:
    assert lint_ptx(_sound_ptx(exchange), exchange) == []


@pytest.mark.parametrize("exchange", [False, True])
def test_lint_any_order_instruction_removed_is_a_fault(exchange: bool) -> None:
    lines = _sound_ptx(exchange).splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("bar", "cp.", "add.")):
            continue
        assert lint_ptx("\n".join(lines[:number] + lines[number + 1 :]), exchange), (
            f"line {number} {line!r} may be missing"
        )


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ld.acquire.gpu", "ld.relaxed.gpu"),
        ("red.release.gpu", "red.relaxed.gpu"),
        ("st.release.sys", "st.release.gpu"),
        ("ld.acquire.sys", "ld.acquire.gpu"),
        ("atom.acq_rel.gpu", "atom.relaxed.gpu"),
    ],
)
def test_lint_weaker_order_or_scope_is_a_fault(old: str, new: str, exchange: bool) -> None:
    assert lint_ptx(_sound_ptx(exchange).replace(old, new), exchange)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ld.acquire.sys.global.b64", "ld.acquire.gpu.global.b64"),
        ("red.release.sys", "red.relaxed.sys"),
        ("red.release.sys", "red.release.gpu"),
        ("st.relaxed.sys", "st.relaxed.gpu"),
        ("fence.acq_rel.sys", "fence.acq_rel.gpu"),
    ],
)
def test_lint_weaker_order_between_ranks_is_a_fault(old: str, new: str) -> None:
    assert lint_ptx(_sound_ptx(True).replace(old, new), True)


@pytest.mark.parametrize("word", ["tanh.approx.f32 %f1, %f2;", "ld.global.nc.b32 %r1, [%rd1];"])
def test_lint_forbidden_instruction_is_a_fault(word: str) -> None:
    assert lint_ptx(_sound_ptx() + "\n" + word, False)


@settings(deadline=None, max_examples=60)
@given(ranks=st.integers(2, 16), local=st.integers(1, 32))
def test_exchange_tables_do_not_overlap_and_fit_their_words(ranks: int, local: int) -> None:
    """The kernel's table offsets, read from its source (the module itself needs the DSL)."""
    source = (Path(launch.__file__).parent / "common" / "exchange.py").read_text(encoding="utf-8")
    body = source.split("class ExchangeOffsets:", 1)[1].split("\n\n\n", 1)[0]
    config = KernelConfig(dataclasses.replace(LAYER, ep_size=ranks, num_local_experts=local), TILES["n8"])
    space: dict[str, object] = {}
    exec("class Offsets:" + body, space)
    at = space["Offsets"](config)  # type: ignore[operator]
    experts = 4 * config.route_table_experts
    sizes = {"peers": 8 * ranks, "sent": 4 * ranks, "lost": 4, "blocks": 4, "live": 4, "missing": 4, "counts": experts}
    sizes |= {"cursors": experts, "first": 4 * local * (ranks + 1), "start": 4 * ranks * local}
    sizes |= {"held": 4 * HELD_INDICES * ranks}
    assert set(sizes) == set(vars(at))
    ranges = sorted((getattr(at, name), getattr(at, name) + size, name) for name, size in sizes.items())
    for (_, end, name), (start, _, following) in itertools.pairwise(ranges):
        assert end <= start, f"{name} reaches into {following}"
    assert ranges[-1][1] <= 4 * config.exchange_words
