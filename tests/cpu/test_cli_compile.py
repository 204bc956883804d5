# SPDX-License-Identifier: Apache-2.0
"""`compile` without the DSL: what it needs, what it refuses, and that a filled cache needs nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.helpers.cli import invoke
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.cli import compile as compile_cli
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import hopper
from trtllm_megamoe.kernels.selection import environment, tuning_target
from trtllm_megamoe.kernels.tactics import tactic_of, tile_of
from trtllm_megamoe.presets import PRESETS
from trtllm_megamoe.tuning.table import TacticTable
from trtllm_megamoe.tuning.tuner import TunedBucket
from vendored_kernels import compile as kernel_compile
from vendored_kernels.sm90.config import TILES

SMALL = ("--max-tokens-per-rank", "8", "--activations", "bf16")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that a stand-in compiler fills: a file per kernel instead of an object."""

    def fake(arch: str, configs: list[hopper.KernelConfig], out_dir: Path) -> list[Path]:
        paths = [out_dir / f"{arch}-{config.tile.name}.so" for config in configs]
        for path, config in zip(paths, configs, strict=True):
            path.write_bytes(b"object of " + repr(config.layer).encode())
        return paths

    monkeypatch.setattr(kernel_compile, "compile_configs", fake)
    return tmp_path / "cache"


def test_compile_twice_builds_each_kernel_once(cache_dir: Path) -> None:
    first = invoke("compile", "--preset", "deepseek-v4-pro", "--out", cache_dir, "--max-tokens-per-rank", 8192)
    assert first.exit_code == 0, first.output
    assert "compiled" in first.output and "cached" not in first.output
    names = [entry.name for _, entry in ObjectCache(cache_dir).entries()]
    assert len(names) == len(set(names)) > 2
    assert {name.split("-")[7] for name in names} == {"nvfp4", "bf16"}
    second = invoke("compile", "--preset", "deepseek-v4-pro", "--out", cache_dir, "--max-tokens-per-rank", 8192)
    assert "compiled" not in second.output.replace("kernels", "") and "cached" in second.output


def test_compile_filled_cache_serves_the_engine_without_the_dsl(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("compile", "--preset", "qwen3-235b", "--out", cache_dir, *SMALL).exit_code == 0

    def refuse(*_: object) -> None:
        raise kernel_compile.KernelCompileError("compiling needs the CuTe DSL")

    monkeypatch.setattr(kernel_compile, "compile_configs", refuse)
    assert invoke("compile", "--preset", "qwen3-235b", "--out", cache_dir, *SMALL).exit_code == 0
    missing = invoke("compile", "--preset", "kimi-k2", "--out", cache_dir, *SMALL)
    assert missing.exit_code == 2
    assert "needs the CuTe DSL" in missing.output and "cache import" in missing.output


class FakeBar:
    """Stands for tqdm: what was asked of it, and how far it came."""

    made: ClassVar[list[FakeBar]] = []

    def __init__(self, items: Sequence[object] = (), *, total: int | None = None, **options: object) -> None:
        self.items, self.total, self.options = items, len(items) if total is None else total, options
        self.done, self.lines = 0, list[str]()
        self.made.append(self)

    def __iter__(self) -> Iterator[object]:
        for item in self.items:
            yield item
            self.update(1)

    @classmethod
    def write(cls, line: str) -> None:
        cls.made[-1].lines.append(line)

    def update(self, n: int) -> None:
        self.done += n

    def close(self) -> None: ...


@pytest.mark.parametrize("request_", [("--preset", "qwen3-235b", *SMALL), ("--selftest", "--quick", "--num-sms", 8)])
def test_compile_shows_how_far_it_is_and_logs_how_long_each_kernel_took(
    request_: tuple[object, ...], cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bar over all kernels, hidden where stderr is no terminal; times go to the log wherever a kernel is built."""
    monkeypatch.setattr(FakeBar, "made", [])
    monkeypatch.setattr(compile_cli, "tqdm", FakeBar)
    with caplog.at_level(logging.INFO, "trtllm_megamoe"):
        result = invoke("compile", "--out", cache_dir, *request_)
    assert result.exit_code == 0, result.output
    (bar,) = FakeBar.made
    assert bar.total == bar.done >= 1 and f"{bar.total} kernels" in result.output
    assert bar.options["disable"] is None, "tqdm then looks whether stderr is a terminal"
    built = re.findall(r"built (sm_90a-\S+) in \d+\.\d s", caplog.text)
    assert set(built) == {entry.name for _, entry in ObjectCache(cache_dir).entries()} and built
    assert re.search(rf"{bar.total} kernels for sm_90a in \d+\.\d s", caplog.text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "exactly one of --preset, --checkpoint and --selftest"),
        (("--preset", "kimi-k2", "--ep-size", "7"), "not divisible by ep_size 7"),
        (("--preset", "kimi-k3"), "kimi-k3"),
    ],
)
def test_compile_bad_request_is_exit_2_with_the_reason(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = invoke("compile", "--out", tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_kernel_objects_depend_on_everything_that_is_compiled_in() -> None:
    """Two layers that differ in any compiled-in fact never share an object."""
    base = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16, "top_k": 4, "max_tokens_per_rank": 8}
    changes: list[dict[str, object]] = [
        {},
        {"hidden_size": 512},
        {"intermediate_size": 144},
        {"num_experts": 8},
        {"top_k": 2},
        {"combine_format": "fp8"},
        {"score_placement": "before_requant"},
        {"swiglu_limit": 7.0},
        {"swiglu_alpha": 1.702},
        {"swiglu_beta": 1.0},
    ]
    specs = [hopper.layer_spec(MegaMoeConfig.create(**(base | change)), 1, ActivationMode.BF16) for change in changes]
    specs.append(hopper.layer_spec(MegaMoeConfig.create(**base), 1, ActivationMode.NVFP4))
    assert len(set(specs)) == len(specs)


def test_compile_for_tuning_covers_every_candidate_of_the_share(cache_dir: Path) -> None:
    share = ("--share-of-ep", 8, "--preset", "qwen3-235b", "--out", cache_dir, "--max-tokens-per-rank", 64)
    assert invoke("compile", *share, "--activations", "bf16").exit_code == 0
    heuristic = [entry.name for _, entry in ObjectCache(cache_dir).entries()]
    assert invoke("compile", *share, "--activations", "bf16", "--for-tuning").exit_code == 0
    names = [entry.name for _, entry in ObjectCache(cache_dir).entries()]
    assert {name.split("-")[1] for name in heuristic} == {"h8", "h16", "h64"}, "4, 8 or 16, and 32 rows an expert"
    assert len(heuristic) == 3 and set(heuristic) < set(names)
    assert {name.split("-")[1] for name in names} == set(TILES)
    assert all("-e16-" in name for name in names)


def test_compile_follows_the_tactic_table(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PRESETS["qwen3-235b"].layer_config(max_tokens_per_rank=8)
    _, facts = tuning_target(config, ActivationMode.BF16, 8, 132)
    odd = replace(tactic_of(TILES["n16"], 3), max_stages=5)
    table = tmp_path / "tactics.json"
    TacticTable(environment("NVIDIA H200", 132)).put(facts, [TunedBucket(8, odd, 1.0, 2.0, 5)]).save(table)
    monkeypatch.setenv("TRTLLM_MEGAMOE_TACTICS", str(table))
    assert invoke("compile", "--preset", "qwen3-235b", "--out", cache_dir, *SMALL).exit_code == 0
    names = [entry.name for _, entry in ObjectCache(cache_dir).entries()]
    assert {name.split("-")[1] for name in names} == {"h8", tile_of(odd).name}
