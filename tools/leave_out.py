# SPDX-License-Identifier: Apache-2.0
"""What each stage of the Hopper kernel costs: the kernel with one stage left out, timed beside the whole one.

    python tools/leave_out.py compile DIR          needs the DSL, no GPU
    python tools/leave_out.py run DIR --out FILE   needs a GPU, no DSL

Every variant is the kernel's sources with a few lines replaced in a copy. Its results are wrong; only its time counts.
Barriers, counters and flags stay, so it ends like the whole kernel. Stages overlap: leaving out one that hides behind
another costs nothing, and the differences do not add up to the whole.

So that times stay comparable, every variant runs on what the whole kernel has just left in the same workspace (rows,
scales, and the rings in shared memory, which a launch does not clear). Still different, besides the clock that less
work allows: rows that nobody has staged, or results that nobody has stored, come from HBM instead of L2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from tools.gpu_suite import bench, cases
from tools.gpu_suite.layer import GpuLayer
from tools.run_gpu_suite import environment
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.launch import ADDRESSES, NUMBERS, Launch
from vendored_kernels.registry import _load_module, source_digest
from vendored_kernels.sm90.config import CODE_BYTES, KernelConfig, choose_tile

ROOT = Path(__file__).parent.parent
ARCH = "sm_90a"
WHOLE = "whole"
POINTS = (("v4-pro", 64), ("v4-pro", 256), ("dsv3", 64), ("dsv3", 256), ("qwen3-235b", 64))
"""Shape and rows per expert; each at the tile configuration that `choose_tile` picks, bf16 activations."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old`, which must stand once in `file` (below vendored_kernels/sm90)."""

    file: str
    old: str
    new: str

    def apply(self, directory: Path) -> None:
        """Change the file in `directory`."""
        path = directory / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: expected once, found {text.count(self.old)} times:\n{self.old}")
        path.write_text(text.replace(self.old, self.new))


_FC1_MATH = """\
        for c0, c1 in _runs((p1 - p0) // 8):
            packed = []
            for c in cutlass.range_constexpr(p0 // 8 + c0, p0 // 8 + c1):
                row_scales = ptx.lds_pair_f(rows_at + (c * 8 + (lane % 4) * 2) * 4)
                if const_expr(cfg.layer.weigh_before_requant):
                    weights = ptx.lds_pair_f(weights_at + (c * 8 + (lane % 4) * 2) * 4)
                values = []
                for i in cutlass.range_constexpr(2):
                    gate = ptx.mul_rn(ptx.mul_rn(acc[4 * c + i], row_scales[i]), alpha_gate)
                    up = ptx.mul_rn(ptx.mul_rn(acc[4 * c + 2 + i], row_scales[i]), alpha_up)
                    value = _activate(cfg, swiglu, gate, up)
                    if const_expr(cfg.layer.weigh_before_requant):
                        value = ptx.mul_rn(value, weights[i])
                    values.append(value)
                low, high = ptx.unpack_bf16(ptx.pack_bf16(values[0], values[1]))
                packed.append(ptx.pack_f16_saturating(ptx.mul_rn(low, factor), ptx.mul_rn(high, factor)))
            ptx.stsm_transposed(mine + c0 * 8 * pitch, packed)
"""

VARIANTS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    WHOLE: ("the kernel as it is", ()),
    "decode": (
        "packed codes and scales go to wgmma as they are, loads from shared memory stay",
        (
            Edit(
                "mainloop.py",
                "o = ptx.decode_fragment(qs[m][f // 4][f % 4], sc[m][f // 2], f % 2 == 1)",
                "o = sc[m] if jj == 3 else qs[m][kg]",
            ),
        ),
    ),
    "wgmma": (
        "no wgmma but empty commit groups; decoded words are xored into an accumulator (2 instructions per 4 words)",
        (
            Edit(  # from memory, or else the epilogues would work on known zeros
                "mainloop.py",
                "        accs[a].fill(0.0)\n",
                "        for i in cutlass.range_constexpr(n // 8):\n"
                "            start = ptx.lds128f(codes0 + (a * (n // 8) + i) * 16)\n"
                "            for v in cutlass.range_constexpr(4):\n"
                "                accs[a][i * 4 + v] = start[v]\n",
            ),
            Edit(
                "mainloop.py",
                """                        out = ptx.wgmma_f16(
                            n,
                            [accs[m][i] for i in range(n // 2)],
                            [a_regs[jj * 4 + v] for v in range(4)],
                            descriptor + (sub * n * 16 + kg * n * 8 + jj * 2),
                        )
                        for i in cutlass.range_constexpr(n // 2):
                            accs[m][i] = out[i]
""",
                """                        word = ptx.as_bits(accs[m][jj])
                        for v in cutlass.range_constexpr(4):
                            word = word ^ a_regs[jj * 4 + v]
                        accs[m][jj] = ptx.as_float(word)
""",
            ),
        ),
    ),
    "fc1 math": (
        "no row scales, SwiGLU, requantisation and transposition; what lay in the staging buffer is stored",
        (Edit("epilogue.py", _FC1_MATH, "        if valid > 4096:\n" + textwrap.indent(_FC1_MATH, "    ")),),
    ),
    "fc2 stores": (
        "nothing of an fc2 tile is scaled, rounded or stored",
        (Edit("epilogue.py", "if token + i < valid:", "if token + i < valid - 4096:"),),
    ),
    "staging": (
        "tokens are neither read nor written to the pool; their rows are placed and announced",
        (
            Edit("kernel.py", "Int32(1) if own_tokens > 0 and warp", "Int32(1) if own_tokens > 1 << 20 and warp"),
            Edit("staging.py", "range(own_tokens, unroll=1)", "range(own_tokens - (1 << 20), unroll=1)"),
        ),
    ),
    "top-k sum": (
        "no sum; every CTA still waits for the last fc2 tile",
        (
            Edit(
                "kernel.py",
                "if own_items > 0:\n                    wire.sum_routes(",
                "if own_items > 1 << 30:\n                    wire.sum_routes(",
            ),
        ),
    ),
    "weight loads": (
        "no weights from memory; W arrives on every stage",
        (
            Edit(
                "scheduler.py",
                "mbarrier_arrive_and_expect_tx(full + stage, 2 * RECORD_BYTES)",
                "mbarrier_arrive(full + stage)",
            ),
            Edit(
                "scheduler.py",
                "            if lane < 2:\n                step =",
                "            if lane > 32:\n                step =",
            ),
        ),
    ),
    "token loads": (
        "no tokens from memory; T waits as always and arrives on every stage",
        (
            Edit(
                "scheduler.py",
                "                    cute.copy(atom, tg[(None, k)], ts[(None, stage)], tma_bar_ptr=full + stage)\n",
                "",
            ),
            Edit(
                "scheduler.py",
                "mbarrier_arrive_and_expect_tx(full + stage, n * K_STEP * 2 * per_stage)",
                "mbarrier_arrive(full + stage)",
            ),
        ),
    ),
}
"""Name: what is left out, and how; by conditions that never hold where that is enough: registers stay as they are."""


def patched_copy(variant: str, root: Path) -> None:
    """The package of one variant below `root`."""
    shutil.copytree(
        ROOT / "vendored_kernels", root / "vendored_kernels", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for edit in VARIANTS[variant][1]:
        edit.apply(root / "vendored_kernels" / "sm90")


def directory_name(variant: str) -> str:
    """Where a variant's objects lie."""
    return variant.replace(" ", "-")


# ------------------------------------------------------------------------------------------------------------- compile
def config_of(shape: str, rows: int) -> KernelConfig:
    """The kernel of a point."""
    spec = bench.spec_of(shape, "bf16")
    return KernelConfig(spec, choose_tile(spec, rows * spec.num_local_experts // spec.top_k))


def compile_variants(out: Path, names: list[str], jobs: int) -> None:
    """All kernels of the named variants, what the machine code looks like, and the index that `run` reads."""
    from tools.check_kernels import check_sass, find_cuobjdump, sass_lines
    from vendored_kernels.compile import check_compiler

    check_compiler()
    cuobjdump = find_cuobjdump()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=jobs) as pool:
        for name in names:
            patched_copy(name, Path(scratch) / directory_name(name))

        def build(job: tuple[str, str, int]) -> dict[str, Any]:
            name, shape, rows = job
            config = config_of(shape, rows)
            facts = _compile_one(Path(scratch) / directory_name(name), config, out / directory_name(name))
            described = json.loads(facts.read_text())
            faults = check_sass(*sass_lines(facts.with_suffix(".cubin"), cuobjdump), described)
            print(f"{name}, {shape} {rows}, {config.tile.name}: {'; '.join(faults) or 'ok'}", flush=True)
            point = {"variant": name, "shape": shape, "rows": rows, "tile": config.tile.name}
            return {**point, "key": facts.stem, "sources": described["sources"][:24], "faults": faults}

        kernels = list(pool.map(build, [(name, *point) for name in names for point in POINTS]))
    index = out / "index.json"
    others = json.loads(index.read_text())["kernels"] if index.exists() else []
    others = [kernel for kernel in others if kernel["variant"] not in names]
    report = {"sources": source_digest(ARCH)[:24], "arguments": [*ADDRESSES, *NUMBERS], "kernels": others + kernels}
    index.write_text(json.dumps(report, indent=1) + "\n")


def _compile_one(root: Path, config: KernelConfig, out: Path) -> Path:
    """One object from the package below `root`; returns its facts file."""
    with tempfile.TemporaryDirectory() as alone:  # its name follows from the patched sources: take what appears
        done = subprocess.run(
            [sys.executable, "-m", "vendored_kernels.compile_one"],
            input=json.dumps({**config.facts(), "arch": ARCH, "out_dir": alone, "keep": True}),
            capture_output=True,
            text=True,
            cwd=root,
            env={**os.environ, "CUTE_DSL_ARCH": ARCH, "PYTHONPATH": str(root)},
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError("\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]))
        out.mkdir(parents=True, exist_ok=True)
        (facts,) = Path(alone).glob("*.json")
        for file in facts.parent.glob(f"{facts.stem}.*"):
            shutil.move(str(file), out / file.name)
    return out / facts.name


# ----------------------------------------------------------------------------------------------------------------- run
class VariantLayer(GpuLayer):
    """A layer whose kernel is one entry of the index, whatever the kernel's sources are by now."""

    def __init__(self, entry: dict[str, Any], names: list[str], directory: Path, spec: LayerSpec, **parts: Any) -> None:
        super().__init__(spec, {}, cache_dir=directory, scales=scales_for(spec, entry["variant"]), **parts)
        self.set_tokens(self.max_tokens)
        key = entry["key"]
        function = _load_module(str(directory / directory_name(entry["variant"]) / f"{key}.so"))[key.replace("-", "_")]
        fixed = self.arguments(entry["tile"]) | {"grid": self.num_ctas}
        self._launches[entry["tile"]] = Launch(function, self.spaces["local"][:256], fixed, names)


def scales_for(spec: LayerSpec, variant: str) -> torch.Tensor:
    """The benchmark's scale table; codes that nobody decodes are numbers about 2^12 times as large."""
    table = bench.random_scales(spec)
    if variant == "decode":
        table[:-1, :3] /= 2**12
    return table


def finite_records(spec: LayerSpec) -> dict[str, torch.Tensor]:
    """The benchmark's records, but no word reads as NaN or infinity in f16: on those, wgmma would take less power."""
    packed = bench.random_records(spec)
    for buffer in packed.values():
        buffer[..., 1:CODE_BYTES:2] &= 0xBF
    return packed


def run(directory: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of each point: every variant, and the whole kernel before and after them."""
    index = json.loads((directory / "index.json").read_text())
    packed: list[dict[str, torch.Tensor]] = []
    before = None
    for shape, rows in POINTS:
        spec = bench.spec_of(shape, "bf16")
        if shape != before:
            packed.clear()
            torch.cuda.empty_cache()
            packed += [finite_records(spec) for _ in range(bench.num_weight_sets(shape))]
            before = shape
        entries = {e["variant"]: e for e in index["kernels"] if (e["shape"], e["rows"]) == (shape, rows)}
        yield _time_point(directory, index["arguments"], entries, spec, rows, packed)


def _time_point(
    directory: Path,
    names: list[str],
    entries: dict[str, dict[str, Any]],
    spec: LayerSpec,
    rows: int,
    packed: list[dict[str, torch.Tensor]],
) -> list[dict[str, Any]]:
    ids = bench.route_ids(spec, "uniform", rows)
    count = ids.shape[0]
    x, w = cases.tokens(spec, count, 3), cases.weights(spec, ids, 4)
    y = torch.empty(count, spec.hidden_size, dtype=torch.bfloat16, device="cuda")
    estimate_ms = bench.floor_ms(spec, bench.expert_counts(spec, ids)) * 1.2 + 0.01
    tile = entries[WHOLE]["tile"]
    whole = [VariantLayer(entries[WHOLE], names, directory, spec, max_tokens=count, packed=p) for p in packed]
    results = []
    for name in [WHOLE, *(name for name in VARIANTS if name in entries and name != WHOLE), WHOLE]:
        layers = [
            VariantLayer(entries[name], names, directory, spec, max_tokens=count, packed=layer.packed, **layer.spaces)
            for layer in whole
        ]

        def enqueue(i: int, layers: list[VariantLayer] = layers) -> None:
            layers[i % len(layers)].enqueue(tile, x, ids, w, y)

        for layer in whole:  # what a variant does not write is what the whole kernel has left
            layer.enqueue(tile, x, ids, w, y)
        measured = bench.measure(enqueue, estimate_ms)
        clocks = measured["clocks"] or {}
        results.append(
            {
                **{key: entries[name][key] for key in ("shape", "rows", "tile", "variant", "faults")},
                **{f"{kind}_us": round(measured[f"{kind}_ms"] * 1e3, 2) for kind in ("burst", "sustained")},
                **{key: clocks.get(key) for key in ("sm_mhz", "power_w")},  # of the sustained replays
                "ok": not any(layer.error_record()["set"] for layer in layers),
            }
        )
    for kind in ("burst", "sustained"):
        base = (results[0][f"{kind}_us"] + results[-1][f"{kind}_us"]) / 2
        for row in results:
            row[f"{kind}_minus_whole_us"] = round(row[f"{kind}_us"] - base, 2)
    return results


def print_point(rows: list[dict[str, Any]]) -> None:
    """One point as a table."""
    print(f"{rows[0]['shape']}, {rows[0]['rows']} rows, {rows[0]['tile']}: us, difference to the whole kernel")
    for row in rows:
        times = "".join(f"{row[f'{k}_us']:10.1f} {row[f'{k}_minus_whole_us']:+8.1f}" for k in ("burst", "sustained"))
        clock = f"{row['sm_mhz'] or 0:6.0f} MHz {row['power_w'] or 0:4.0f} W"
        print(f"  {row['variant']:14}{times}{clock}{'' if row['ok'] else '  FAILED'}", flush=True)


def main() -> int:
    """Compile or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("compile", "run"))
    parser.add_argument("directory", type=Path, help="of the objects")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="compile: these only, the others' objects stay")
    parser.add_argument("--jobs", type=int, default=2, help="compile: kernels at a time")
    parser.add_argument("--out", type=Path, help="run: JSON report")
    arguments = parser.parse_args()
    if arguments.action == "compile":
        compile_variants(arguments.directory, arguments.variants.split(","), arguments.jobs)
        return 0
    index = json.loads((arguments.directory / "index.json").read_text())
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "environment": environment(),
        "variants_of_sources": index["sources"],
        "left_out": {name: text for name, (text, _) in VARIANTS.items()},
        "results": [],
    }
    for rows in run(arguments.directory):
        print_point(rows)
        report["results"] += rows
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["ok"] for row in report["results"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
