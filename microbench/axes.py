# SPDX-License-Identifier: Apache-2.0
"""The axes of a sweep: one at a time around a default point, as command lines. Pure; used by the sweep.

What matters most comes first, for a sweep whose time runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROWS = "1,4,16,64,256,1024"
FEWER_ROWS = "1,16,64,256,1024"
TOKENS = "1,8,64,512,2048,8192"
FEWER_TOKENS = "64,512,8192"
_DEFAULT_PRESET = "deepseek-v4-pro"
_WITH_RIVALS = (_DEFAULT_PRESET, "deepseek-v3", "qwen3-235b")
_PRESETS = (*_WITH_RIVALS, "deepseek-v4-flash", "gpt-oss-120b")

REPEAT = "repeat"
"""The same command as an earlier axis, later in the same run: how far two runs of one command agree."""

SHARES = 8
"""A GPU holds the experts of one rank of so many."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its name, and the arguments of `python -m microbench` that differ from the default point's."""

    name: str
    arguments: tuple[str, ...]

    @property
    def is_run(self) -> bool:
        """Whether it is a run of the layer; else another command that begins with its name."""
        return self.arguments[0].startswith("-")


def one_gpu() -> list[Axis]:
    """The default point is DeepSeek-V4-Pro, a share of EP 8, uniform routing, 16-bit activations, bf16 wire, bursts."""
    # the small layers are rotated in pairs: one of them would partly stay in L2
    pairs = {"qwen3-235b": ("--layers", "2"), "gpt-oss-120b": ("--layers", "2")}

    def at(name: str, rows: str, *more: str, preset: str = _DEFAULT_PRESET) -> Axis:
        where = ("--preset", preset, "--share-of-ep", str(SHARES), "--rows-per-expert", rows)
        return Axis(name, (*where, *pairs.get(preset, ()), *more))

    def ranks(name: str, tokens: str, *more: str) -> Axis:
        where = ("--preset", "qwen3-235b", "--virtual-ranks", "8", "--tokens-per-rank", tokens)
        return Axis(name, (*where, *more))

    return [
        *(at(f"rows-{preset}", ROWS, "--rivals", preset=preset) for preset in _WITH_RIVALS),
        *(at(f"zipf-{preset}", FEWER_ROWS, "--routing", "zipf", "--rivals", preset=preset) for preset in _WITH_RIVALS),
        *(at(f"rows-{preset}", ROWS, preset=preset) for preset in _PRESETS if preset not in _WITH_RIVALS),
        *(at(f"nvfp4-{preset}", FEWER_ROWS, "--activations", "nvfp4", preset=preset) for preset in _PRESETS),
        at("routings", "16,64,256", "--routing", "random,zipf,hot-expert"),
        at(REPEAT, ROWS, "--rivals"),
        at("wires", "16,64,1024", "--combine-format", "fp8,fp4"),
        at("phases", "1,16,256", "--phases"),
        at("lockstep", "1,16,64,256", "--mode", "lockstep"),
        at("eager", "1,16,64", "--eager"),
        ranks("virtual-ranks", "1,8,64", "--routing", "uniform,hot-rank,zero-rank"),
        ranks("virtual-ranks-wires", "8,64", "--combine-format", "fp8,fp4"),
        ranks("virtual-ranks-phases", "8,64", "--phases"),
    ]


def several_gpus(ranks: int) -> list[Axis]:
    """Every GPU with its share of an EP 8 layer; the unfused chain beside it where the activations are its own."""

    def at(name: str, preset: str, tokens: str, *more: str) -> Axis:
        where = ("--preset", preset, "--scale-experts", str(max(1, SHARES // ranks)), "--tokens-per-rank", tokens)
        return Axis(name, (*where, "--iters", "12", "--warmup", "3", *more))

    presets = (_DEFAULT_PRESET, "deepseek-v3", "deepseek-v4-flash")
    both = ("--mode", "burst,lockstep")
    return [
        *(at(f"tokens-{preset}", preset, TOKENS, *both, "--rivals") for preset in presets),
        Axis("links", ("links",)),
        at("phases", "deepseek-v3", "1,64,2048", "--phases"),
        *(at(f"nvfp4-{preset}", preset, TOKENS, "--activations", "nvfp4", *both) for preset in presets),
        *(at(f"wires-{preset}", preset, FEWER_TOKENS, "--combine-format", "fp8,fp4", *both) for preset in presets),
        at("routings", _DEFAULT_PRESET, "64,512,2048", "--routing", "zipf,hot-rank,zero-rank"),
        at(REPEAT, _DEFAULT_PRESET, TOKENS, *both, "--rivals"),
    ]


_DEFAULTS = ("--mode", "burst", "--activations", "bf16", "--iters", "30", "--warmup", "5")


_SMALL = {"--rows-per-expert": "1,2", "--tokens-per-rank": "1,3"}
_SMALL_MORE = ("--scale-channels", "64", "--iters", "2", "--warmup", "0")


def command_of(axis: Axis, engine: str, extra: Sequence[str], *, is_small: bool = False) -> list[str]:
    """Arguments of `python -m microbench` for one axis.

    Args:
        extra: Put at the end.
        is_small: A rehearsal: few rows and narrow layers, so that a CPU gets through.
    """
    if not axis.is_run:
        return [*axis.arguments, "--engine", engine]
    only_gpu = ("--eager", *(("--phases",) if engine == "cpu" else ()))
    arguments = [argument for argument in axis.arguments if argument not in only_gpu]
    if is_small:
        arguments = [_SMALL.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)]
    defaults = [
        word
        for name, value in zip(_DEFAULTS[::2], _DEFAULTS[1::2], strict=True)
        if name not in arguments
        for word in (name, value)
    ]
    is_graph = engine == "cuda" and "--eager" not in axis.arguments
    more = [*(["--cuda-graph"] if is_graph else []), *(_SMALL_MORE if is_small else ())]
    more += ["--timeout", "30"] if engine == "cuda" else []  # a wait on a GPU that is longer than this is a fault
    return ["--engine", engine, *arguments, *defaults, *more, *extra]
