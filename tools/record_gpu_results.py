# SPDX-License-Identifier: Apache-2.0
"""Records what a Hopper GPU computes for the calls that the interpreter makes too (tests/helpers/recorded.py).

    python tools/record_gpu_results.py --needs                              # kernels, and how to build them
    python tools/record_gpu_results.py --cache OBJECTS_DIR --out FILE.safetensors

Every call runs `REPEATS` times, poisoned; all must agree. Then the interpreter makes the same calls, its `ex2.approx`
and `rcp.approx` evaluated on this GPU, and the values that occur are recorded beside the results, so that a machine
without a GPU can repeat the comparison bit for bit. Exit code 1 where anything differs; what could be recorded is.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers.recorded import (
    CASES,
    RecordedCase,
    Recording,
    comparable,
    differing,
    interpreted,
    ptx_digest,
)
from tools.ptxsim import approx
from tools.ptxsim.kept import ARCH, DATA, KEPT, TILE, plain
from tools.ptxsim.layers import KernelFile
from vendored_kernels import registry

REPEATS = 20
TILES = {TILE.name: TILE}

_SOURCE = r"""
__global__ void ex2(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(x[i]));
}
__global__ void rcp(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(x[i]));
}
extern "C" int evaluate(int which, const float* x, float* y, int n) {
  static float* buffer = nullptr;
  const int most = 1 << 16;
  if (n > most) return -1;
  if (!buffer && cudaMalloc(&buffer, 2 * most * sizeof(float))) return -2;
  cudaMemcpy(buffer, x, n * sizeof(float), cudaMemcpyHostToDevice);
  (which ? rcp : ex2)<<<(n + 255) / 256, 256>>>(buffer, buffer + most, n);
  cudaMemcpy(y, buffer + most, n * sizeof(float), cudaMemcpyDeviceToHost);
  return cudaGetLastError();
}
"""


class GpuFunction:
    """One approximate instruction of this GPU as a function of fp32 lanes; remembers what it was asked."""

    def __init__(self, library: ctypes.CDLL, which: int) -> None:
        self._evaluate, self._which = library.evaluate, which
        self.seen: dict[int, int] = {}

    def __call__(self, value: approx.F32) -> approx.F32:
        lanes = np.ascontiguousarray(value, np.float32)
        result = np.empty_like(lanes)
        pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (lanes, result))
        status = self._evaluate(self._which, *pointers, lanes.size)
        if status:
            raise RuntimeError(f"CUDA error {status} in an approximation")
        bits = zip(lanes.view(np.uint32).reshape(-1).tolist(), result.view(np.uint32).reshape(-1).tolist(), strict=True)
        self.seen.update(bits)
        return result


def gpu_functions(directory: Path) -> dict[str, GpuFunction]:
    """`ex2.approx.ftz.f32` and `rcp.approx.ftz.f32` of this GPU."""
    (directory / "approx.cu").write_text(_SOURCE)
    command = ["nvcc", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", "-o", "approx.so", "approx.cu"]
    subprocess.run(command, cwd=directory, check=True, timeout=180)
    library = ctypes.CDLL(str(directory / "approx.so"))
    library.evaluate.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return {"ex2": GpuFunction(library, 0), "rcp": GpuFunction(library, 1)}


def run_on_gpu(case: RecordedCase, cache: Path) -> dict[str, torch.Tensor]:
    """One call (its launches in a row on a fresh, poisoned workspace) on the GPU."""
    from tools.gpu_suite.layer import GpuLayer
    from tools.gpu_suite.ranks import Inputs, RankGroup

    tensors = {name: tensor.cuda() for name, tensor in case.tensors().items()}
    inputs = [Inputs(i.x.cuda(), i.ids.cuda(), i.weights.float().cuda()) for i in case.inputs()]
    if case.spec.ep_size == 1:
        layer = GpuLayer(case.spec, tensors, case.cap, cache, ctas=case.grid, tiles=TILES)
        layer.poison()
        for _ in range(case.launches):
            y = layer.forward(TILE.name, inputs[0].x, inputs[0].ids, inputs[0].weights)
        layers, outputs, records = [layer], [y], [layer.error_record()]
    else:
        group = RankGroup(case.spec, tensors, case.cap, cache, ctas=case.grid, tiles=TILES)
        group.load([TILE.name])
        group.reset()
        group.poison()
        for _ in range(case.launches):
            outputs = group.outputs(inputs)
            group.run(TILE.name, inputs, outputs)
        torch.cuda.synchronize()
        layers, records = group.layers, group.records()
    torch.cuda.synchronize()
    failed = [record for record in records if record["set"]]
    if failed:
        raise RuntimeError(f"the launch reported {failed}")
    return comparable(case, [y.cpu() for y in outputs], lambda rank, name: layers[rank].region(name).cpu())


def record(cache: Path) -> tuple[Recording, bool]:
    """All cases; False where runs disagree with each other or with the interpreter."""
    ok, results, cases = True, {}, {}
    for name, case in CASES.items():
        started = time.time()
        try:
            first = run_on_gpu(case, cache)
            bad = [differing(run_on_gpu(case, cache), first) for _ in range(REPEATS - 1)]
        except Exception as err:
            print(f"{name}: FAILED {type(err).__name__}: {err}", flush=True)
            ok = False
            continue
        unstable = sum(bool(found) for found in bad)
        results[name] = first
        compiled = registry.object_path(KEPT[case.kernel], ARCH, cache).with_suffix(".ptx").read_text()
        cases[name] = {"unstable": unstable, "ptx": ptx_digest(plain(compiled))}
        ok &= not unstable
        print(f"{name}: {REPEATS} runs, {unstable} differ from the first, {time.time() - started:.1f} s", flush=True)
    tables: dict[str, approx.Table] = {}
    try:
        with tempfile.TemporaryDirectory() as directory:
            functions = gpu_functions(Path(directory))
            with approx.using({**functions}):
                for name in results:
                    started = time.time()
                    path = DATA / f"{CASES[name].kernel}.ptx"
                    kernel = KernelFile.load(path)
                    if ptx_digest(path.read_text()) != cases[name]["ptx"]:
                        raise RuntimeError(f"{CASES[name].kernel}: the kept PTX is not that of the objects")
                    found = differing(interpreted(CASES[name], kernel), results[name])
                    ok &= not found
                    seconds = time.time() - started
                    print(f"{name}: interpreter differs in {found or 'nothing'}, {seconds:.1f} s", flush=True)
        for name, function in functions.items():
            pairs = np.array(sorted(function.seen.items()), np.uint32).reshape(-1, 2)
            tables[name] = approx.Table(name, pairs[:, 0].copy(), pairs[:, 1].copy())
    except Exception as err:
        print(f"approximations: FAILED {type(err).__name__}: {err}", flush=True)
        ok = False
    inputs = {name: CASES[name].drawn() for name in results}
    return Recording(_facts(cases), inputs, results, tables), ok


def _facts(cases: dict[str, Any]) -> dict[str, Any]:
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(driver, capture_output=True, text=True, check=True).stdout.splitlines()[0],
        "torch": torch.__version__,
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "kernel_sources": registry.source_digest(ARCH)[:24],
        "repeats": REPEATS,
        "cases": cases,
    }


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--needs", action="store_true", help="list the kernels and stop")
    parser.add_argument("--cache", type=Path, help="directory of objects from `python -m tools.ptxsim.kept`")
    parser.add_argument("--out", type=Path, help="file to write")
    arguments = parser.parse_args()
    if arguments.needs:
        for name, config in KEPT.items():
            print(f"{name}: {registry.kernel_key(config, ARCH)}")
        print(f"build: python -m tools.ptxsim.kept OBJECTS_DIR {' '.join(KEPT)} (renews tests/data/ptx as well)")
        return 0
    if arguments.cache is None or arguments.out is None:
        parser.error("--cache and --out are needed")
    recording, ok = record(arguments.cache)
    recording.save(arguments.out)
    print(json.dumps(recording.facts))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
