# SPDX-License-Identifier: Apache-2.0
"""The small kernels whose PTX is kept in tests/data/ptx: what they are, and how that text is renewed.

Run as `python -m tools.ptxsim.kept OBJECTS_DIR [NAME...]` where the DSL is installed: compiles what the directory lacks
and writes PTX and facts. The objects stay there; a GPU that runs them runs what the interpreter reads.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vendored_kernels import launch, registry
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import KernelConfig, TileConfig
from vendored_kernels.sm100 import config as sm100

ARCH = "sm_90a"
BLACKWELL_ARCH = "sm_100a"
DATA = Path(__file__).parent.parent.parent / "tests" / "data" / "ptx"
TILE = TileConfig("t8", (8,), 128, 2, 232, 40)

KEPT: dict[str, KernelConfig] = {
    "sm90_nvfp4": KernelConfig(LayerSpec(128, 64, 3, 2, "nvfp4"), TILE),
    "sm90_bf16": KernelConfig(LayerSpec(128, 64, 3, 2, "bf16"), TILE),
    "sm90_wide": KernelConfig(LayerSpec(2080, 64, 2, 2, "bf16"), TILE),
    "sm90_ranks2": KernelConfig(LayerSpec(128, 64, 2, 2, "bf16", ep_size=2), TILE),
    "sm90_ranks3": KernelConfig(LayerSpec(128, 64, 1, 2, "nvfp4", ep_size=3), TILE),
}
"""Name of the files -> Hopper kernel."""


def _blackwell(
    sizes: tuple[int, int, int, int], wire: str, tokens: int, stages: int, ctas: int = 1, **options: Any
) -> sm100.KernelConfig:
    """`sizes`: H, I, local experts, top-k."""
    layer = LayerSpec(*sizes, "nvfp4", wire, **options)
    name = f"b{tokens}{'x2' if ctas == 2 else ''}s{stages}"
    return sm100.KernelConfig(layer, sm100.TileConfig(name, tokens, stages, ctas))


KEPT_BLACKWELL: dict[str, sm100.KernelConfig] = {
    "sm100_b32": _blackwell((800, 96, 3, 3), "bf16", 32, 5),
    "sm100_b64": _blackwell((416, 160, 4, 2), "fp8", 64, 3, swiglu_limit=6.5),
    "sm100_b128": _blackwell((288, 96, 3, 2), "fp4", 128, 3, weigh_before_requant=True),
    "sm100_b256": _blackwell((672, 64, 2, 2), "bf16", 256, 3, weigh_before_requant=True, swiglu_limit=3.0),
    "sm100_ranks2": _blackwell((352, 96, 2, 2), "fp8", 32, 5, ep_size=2),
    "sm100_ranks2_wide": _blackwell((2080, 32, 2, 2), "bf16", 128, 3, ep_size=2, swiglu_limit=6.5),
    "sm100_pair": _blackwell((800, 160, 2, 2), "fp8", 64, 5, 2, swiglu_limit=6.5),
    "sm100_pair_ranks2": _blackwell((352, 96, 2, 2), "fp4", 128, 3, 2, ep_size=2, weigh_before_requant=True),
    "sm100_ranks3": _blackwell((288, 96, 1, 2), "fp4", 64, 3, ep_size=3, weigh_before_requant=True),
}
"""Name of the files -> Blackwell kernel; few pipeline stages, so that small problems fill them."""


def parameters(config: registry.KernelConfig) -> list[str]:
    """The kernel's parameters in order: the launch's, tensor maps and their sizes in place of their addresses."""
    if isinstance(config, sm100.KernelConfig):
        return blackwell_parameters()
    assert isinstance(config, KernelConfig)
    buffers = ("pool", "pool_rows", "h", "h_rows")
    maps = [f"map{i}_{name}" for i in range(len(config.tile.token_widths)) for name in buffers]
    numbers = [name for name in launch.NUMBERS if name not in ("pool_rows", "grid")]
    return [*launch.ADDRESSES[:3], *maps, *launch.ADDRESSES[3:], *numbers]


def blackwell_parameters() -> list[str]:
    """The same for Blackwell: the MMA, then codes and scales of weights and tokens, fc1's and fc2's."""
    maps = ["mma"]
    for weights, tokens in (("w1", "pool"), ("w2", "h")):
        maps += [f"map_{weights}", f"map_{tokens}", "pool_rows"]
        maps += [f"map_{weights}_scales", f"map_{tokens}_scales", "pool_blocks"]
    in_maps = ("w1_codes", "w1_scales", "w2_codes", "w2_scales", "pool_rows", "grid")
    return maps + [name for name in (*sm100.ADDRESSES, *sm100.NUMBERS) if name not in in_maps]


def facts(config: registry.KernelConfig, arch: str) -> dict[str, Any]:
    """What lies beside the PTX."""
    key = registry.kernel_key(config, arch)
    return {"arch": arch, "dsl": registry.DSL_VERSION, "key": key, **config.facts(), "arguments": parameters(config)}


def plain(text: str) -> str:
    """PTX without comments and blank lines, its kernel named `kernel`."""
    found = re.search(r"\.entry\s+(\S+?)\(", text)
    if found is None:
        raise ValueError("no kernel in this PTX")
    text = text.replace(found[1], "kernel")
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line.strip()) + "\n"


def renew(objects: Path, names: Iterable[str] = (), jobs: int = 2) -> None:
    """Compile all of them, or those named, into `objects` and write tests/data/ptx."""
    from vendored_kernels.compile import compile_configs

    chosen = list(names) or [*KEPT, *KEPT_BLACKWELL]
    families: tuple[tuple[str, dict[str, Any]], ...] = ((ARCH, KEPT), (BLACKWELL_ARCH, KEPT_BLACKWELL))
    for arch, kept in families:
        wanted = {name: kept[name] for name in chosen if name in kept}
        compile_configs(arch, list(wanted.values()), objects, jobs=jobs, keep_intermediates=True)
        for name, config in wanted.items():
            text = registry.object_path(config, arch, objects).with_suffix(".ptx").read_text()
            (DATA / f"{name}.ptx").write_text(plain(text))
            (DATA / f"{name}.json").write_text(json.dumps(facts(config, arch), indent=1) + "\n")
            print(f"{name}: {registry.kernel_key(config, arch)}")


if __name__ == "__main__":
    renew(Path(sys.argv[1]), sys.argv[2:])
