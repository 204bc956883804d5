# SPDX-License-Identifier: Apache-2.0
"""The small Hopper kernels whose PTX is kept in tests/data/ptx: what they are, and how that text is renewed.

Run as `python -m tools.ptxsim.kept OBJECTS_DIR` where the DSL is installed: compiles what the directory lacks and
writes PTX and facts. The objects stay there; a GPU that runs them runs what the interpreter reads.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from vendored_kernels import registry
from vendored_kernels.launch import ADDRESSES, NUMBERS
from vendored_kernels.sm90.config import KernelConfig, LayerSpec, TileConfig

ARCH = "sm_90a"
DATA = Path(__file__).parent.parent.parent / "tests" / "data" / "ptx"
TILE = TileConfig("t8", (8,), 128, 2, 232, 40)

KEPT: dict[str, KernelConfig] = {
    "sm90_nvfp4": KernelConfig(LayerSpec(128, 64, 3, 2, "nvfp4"), TILE),
    "sm90_bf16": KernelConfig(LayerSpec(128, 64, 3, 2, "bf16"), TILE),
    "sm90_ranks2": KernelConfig(LayerSpec(128, 64, 2, 2, "bf16", ep_size=2), TILE),
    "sm90_ranks3": KernelConfig(LayerSpec(128, 64, 1, 2, "nvfp4", ep_size=3), TILE),
}
"""Name of the files -> kernel."""


def parameters(config: KernelConfig) -> list[str]:
    """The kernel's parameters in order: the launch's, with a tensor map and its rows for each width and buffer."""
    buffers = ("pool", "pool_rows", "h", "h_rows")
    maps = [f"map{i}_{name}" for i in range(len(config.tile.token_widths)) for name in buffers]
    numbers = [name for name in NUMBERS if name not in ("pool_rows", "grid")]
    return [*ADDRESSES[:3], *maps, *ADDRESSES[3:], *numbers]


def facts(config: KernelConfig) -> dict[str, Any]:
    """What lies beside the PTX."""
    key = registry.kernel_key(config, ARCH)
    return {"arch": ARCH, "dsl": registry.DSL_VERSION, "key": key, **config.facts(), "arguments": parameters(config)}


def plain(text: str) -> str:
    """PTX without comments and blank lines, its kernel named `kernel`."""
    found = re.search(r"\.entry\s+(\S+?)\(", text)
    if found is None:
        raise ValueError("no kernel in this PTX")
    text = text.replace(found[1], "kernel")
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line.strip()) + "\n"


def renew(objects: Path, jobs: int = 2) -> None:
    """Compile all of them into `objects` and write tests/data/ptx."""
    from vendored_kernels.compile import compile_configs

    compile_configs(ARCH, list(KEPT.values()), objects, jobs=jobs, keep_intermediates=True)
    for name, config in KEPT.items():
        text = registry.object_path(config, ARCH, objects).with_suffix(".ptx").read_text()
        (DATA / f"{name}.ptx").write_text(plain(text))
        (DATA / f"{name}.json").write_text(json.dumps(facts(config), indent=1) + "\n")
        print(f"{name}: {registry.kernel_key(config, ARCH)}")


if __name__ == "__main__":
    renew(Path(sys.argv[1]))
