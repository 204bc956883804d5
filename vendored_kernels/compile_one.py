# SPDX-License-Identifier: Apache-2.0
"""Compiles one kernel to one object: `python -m vendored_kernels.compile_one`, a JSON request on standard input.

Run as its own process by `compile.py`, because the DSL takes its target from the environment and a compiler abort must
not take the caller along. The request: {arch, layer, tile, out_dir, keep}. Needs the DSL and a C compiler, no GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = """
#include <stdio.h>
/* The host code calls this with the binding's setter and a CUDA error code when a launch fails; the DSL's own version
   lives in a library that machines which only run kernels do not have. Without it the binding has no error to raise. */
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*set)(const char *, const char **, int), int code) {
  char number[16];
  const char *parts[] = {"a CUDA launch failed with error code ", number};
  snprintf(number, sizeof number, "%d", code);
  if (set) set("RuntimeError", parts, 2);
}
"""


def c_compiler() -> list[str]:
    """A C compiler that links shared objects: $CC, cc, gcc, clang or the ziglang wheel."""
    if os.environ.get("CC"):
        return os.environ["CC"].split()
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    try:
        import ziglang  # noqa: F401
    except ImportError:
        raise SystemExit(
            "no C compiler to link kernel objects: install gcc or clang, set CC, or pip install ziglang"
        ) from None
    return [sys.executable, "-m", "ziglang", "cc"]


def _hopper(request: dict) -> tuple:
    """Configuration, kernel, and its numbers of 64-bit and 32-bit arguments."""
    from vendored_kernels.common.layer import LayerSpec
    from vendored_kernels.launch import ADDRESSES, NUMBERS
    from vendored_kernels.sm90.config import KernelConfig, TileConfig
    from vendored_kernels.sm90.kernel import Sm90MegaMoeNvfp4Kernel

    tile = {**request["tile"], "token_widths": tuple(request["tile"]["token_widths"])}
    config = KernelConfig(
        LayerSpec(**request["layer"]), TileConfig(**tile), request["all_ranks"], request["timestamps"]
    )
    return config, Sm90MegaMoeNvfp4Kernel(config), len(ADDRESSES), len(NUMBERS)


def _blackwell(request: dict) -> tuple:
    """The same for sm_100a and sm_103a."""
    from vendored_kernels.common.layer import LayerSpec
    from vendored_kernels.sm100.config import ADDRESSES, NUMBERS, KernelConfig, TileConfig
    from vendored_kernels.sm100.kernel import Sm100MegaMoeNvfp4Kernel

    config = KernelConfig(LayerSpec(**request["layer"]), TileConfig(**request["tile"]))
    return config, Sm100MegaMoeNvfp4Kernel(config), len(ADDRESSES), len(NUMBERS)


def compile_object(request: dict) -> None:
    """Trace, compile, link, and move the finished files into place."""
    os.environ["CUTE_DSL_ARCH"] = request["arch"]
    out_dir = Path(request["out_dir"])
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir) as scratch:
        work = Path(scratch)
        os.environ["CUTE_DSL_KEEP"] = "ptx,cubin"
        os.environ["CUTE_DSL_DUMP_DIR"] = scratch

        import cutlass
        import cutlass.cute as cute
        from cutlass import Int32, Int64, Uint8
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from vendored_kernels import registry

        config, kernel, num_addresses, num_numbers = (_hopper if request["arch"] == "sm_90a" else _blackwell)(request)
        key = registry.kernel_key(config, request["arch"])
        symbol = key.replace("-", "_")
        anchor = make_fake_compact_tensor(Uint8, (cute.sym_int(),), assumed_align=16)
        compiled = cute.compile(
            kernel,
            anchor,
            *[Int64(0)] * num_addresses,
            *[Int32(0)] * num_numbers,
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )
        compiled.export_to_c(str(work / "kernel.o"), function_name=symbol)
        (work / "stub.c").write_text(STUB)
        packages = Path(cutlass.__path__[0]).parent.parent
        runtime = packages / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
        link = [
            *c_compiler(),
            "-shared",
            "-fPIC",
            "-s",
            "-o",
            str(work / f"{key}.so"),
            str(work / "kernel.o"),
            str(work / "stub.c"),
            str(runtime),
            "-lstdc++",
        ]
        subprocess.run(link, check=True)
        (work / f"{key}.json").write_text(json.dumps(registry.kernel_facts(config, request["arch"]), indent=1) + "\n")
        if request["keep"]:
            for suffix in ("ptx", "cubin"):
                (found,) = work.glob(f"*.{suffix}")
                os.replace(found, out_dir / f"{key}.{suffix}")
        os.replace(work / f"{key}.json", out_dir / f"{key}.json")
        os.replace(work / f"{key}.so", out_dir / f"{key}.so")


if __name__ == "__main__":
    compile_object(json.load(sys.stdin))
