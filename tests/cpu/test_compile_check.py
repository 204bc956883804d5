# SPDX-License-Identifier: Apache-2.0
"""The report over compiled kernels, from what a stand-in disassembler prints; test_sm90_compile has real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools import compile_check
from tools.check_kernels import Resources, expected_wgmma, read_resources
from vendored_kernels import registry
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.compile import KernelCompileError
from vendored_kernels.sm90.config import TILES, KernelConfig
from vendored_kernels.sm100.config import TILES as BLACKWELL_TILES
from vendored_kernels.sm100.config import KernelConfig as Sm100Config

PTX = (Path(__file__).parent.parent / "data" / "ptx" / "sm90_nvfp4.ptx").read_text()
LAYER = LayerSpec(256, 128, 16, 4, "nvfp4")
HOPPER = [KernelConfig(LAYER, TILES[name]) for name in ("h8", "n16")]
BLACKWELL = Sm100Config(LAYER, next(iter(BLACKWELL_TILES.values())))
LINE = "        /*{at:04x}*/                   {text} ;  /* 0x0000000000000000 */"


def usage(**changes: int) -> str:
    numbers = {"REG": 128, "STACK": 0, "SHARED": 1024, "LOCAL": 0, **changes}
    return " ".join(f"{name}:{value}" for name, value in numbers.items()) + " CONSTANT[0]:1972 TEXTURE:0"


def sass(kernel: KernelConfig, extra: Sequence[str] = ()) -> list[str]:
    """The instructions that are counted: wgmma, the waits of a pipelined main loop, and what is added."""
    count, widths = expected_wgmma(kernel.facts()), len(kernel.tile.token_widths)
    waits = ["gsb0, 0x0"] * widths + ["gsb0, 0x1"] * (count // 4)
    texts = [f"HGMMA.64x8x16.F32 R24, {wait}" for wait in waits] + ["HGMMA.64x8x16.F32 R24"] * (count - len(waits))
    return [LINE.format(at=16 * i, text=text) for i, text in enumerate([*texts, *extra])]


def test_resources_are_read_from_a_resource_line_and_the_instructions() -> None:
    spilt = sass(HOPPER[0], ["STL.64 [R1+0x8], R4", "LDL R5, [R1]", "LDG.E R5, [R2.64]"])
    assert read_resources(spilt, "  " + usage(REG=168, LOCAL=24)) == Resources(168, 0, 24, 2, 1024)
    assert read_resources(sass(HOPPER[0]), usage(STACK=8, SHARED=0)) == Resources(128, 8, 0, 0, 0)


@pytest.fixture
def disassembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, list[str]], None]:
    """Says what the stand-in cuobjdump prints for a kernel's cubin: its resource line and its instructions."""
    program = tmp_path / "cuobjdump"
    program.write_text(
        '#!/bin/sh\nif [ "$1" = -sass ]; then cat "${2%.cubin}.sass"; else cat "${2%.cubin}.usage"; fi\n'
    )
    program.chmod(0o755)
    printed: dict[str, tuple[str, list[str]]] = {}

    def compiler(
        arch: str, configs: list[KernelConfig], out_dir: Path, *, progress: Callable[[str, str], None], **_: object
    ) -> list[Path]:
        (config,) = configs
        path = registry.object_path(config, arch, out_dir)
        if config.tile.name not in printed:
            raise KernelCompileError(f"kernel {path.stem} failed to compile (exit 1)")
        progress(path.stem, "cached" if path.exists() else "compiled")
        resources, lines = printed[config.tile.name]
        files = {".so": "", ".json": json.dumps({**config.facts(), "arch": arch}), ".ptx": PTX, ".cubin": ""}
        for suffix, text in {**files, ".usage": resources, ".sass": "\n".join(lines)}.items():
            path.with_suffix(suffix).write_text(text)
        return [path]

    monkeypatch.setattr(compile_check, "compile_configs", compiler)
    monkeypatch.setattr(compile_check, "check_compiler", lambda: None)
    monkeypatch.setattr(compile_check, "find_cuobjdump", lambda: str(program))

    def put(tile: str, resources: str, lines: list[str]) -> None:
        printed[tile] = (resources, lines)

    return put


def test_report_has_every_kernel_with_its_numbers_its_seconds_and_a_verdict(
    disassembled: Callable[[str, str, list[str]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sound, one spilt, one that does not compile: the others are judged all the same."""
    wanted = [("sm_90a", HOPPER[0]), ("sm_90a", HOPPER[1]), ("sm_100a", BLACKWELL)]
    monkeypatch.setattr(compile_check, "wanted_kernels", lambda every: wanted)
    disassembled("h8", usage(), sass(HOPPER[0]))
    disassembled("n16", usage(REG=168, LOCAL=24), sass(HOPPER[1], ["STL.64 [R1+0x8], R4", "LDL R5, [R1]"]))
    out, file = tmp_path / "kernels", tmp_path / "report.json"
    out.mkdir()
    assert compile_check.main([str(out), "--json", str(file), "--jobs", "1"]) == 1
    report = json.loads(file.read_text())
    assert (report["passed"], report["failed"]) == (1, 2)
    assert report["command"].startswith("tools/compile_check.py ") and report["command"].endswith("--jobs 1")
    assert report["environment"]["cutlass_dsl"] == registry.DSL_VERSION
    assert set(report["environment"]["kernel_sources"]) == {"sm_90a", "sm_100a"}
    sound, spilt, broken = report["kernels"]
    assert sound["kernel"] == registry.kernel_key(HOPPER[0], "sm_90a") and sound["tile"]["name"] == "h8"
    assert (sound["verdict"], sound["faults"], sound["registers"], sound["spill_instructions"]) == ("ok", [], 128, 0)
    assert (sound["shared_bytes"], sound["static_shared_bytes"]) == (HOPPER[0].shared_bytes, 1024)
    assert sound["seconds"] >= 0 and sound["layer"]["hidden_size"] == 256
    assert (spilt["verdict"], spilt["registers"], spilt["local_bytes"]) == ("fault", 168, 24)
    assert spilt["spill_instructions"] == 2 and "2 local memory instructions" in spilt["faults"]
    assert broken["verdict"] == "fault" and "failed to compile" in broken["faults"][0] and "registers" not in broken
    assert "compile-check: 1 passed, 2 failed in" in capsys.readouterr().out


def test_report_of_cached_kernels_has_no_seconds_and_exit_code_0(
    disassembled: Callable[[str, str, list[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_check, "wanted_kernels", lambda every: [("sm_90a", HOPPER[0])])
    disassembled("h8", usage(), sass(HOPPER[0]))
    file = tmp_path / "report.json"
    for seconds in (True, False):
        assert compile_check.main([str(tmp_path), "--json", str(file)]) == 0
        (row,) = json.loads(file.read_text())["kernels"]
        assert (row["seconds"] is not None) == seconds and row["verdict"] == "ok"
