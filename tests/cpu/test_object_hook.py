# SPDX-License-Identifier: Apache-2.0
"""The C hook in every kernel object: a CUDA error becomes an error of the binding, not a crash of the process."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from vendored_kernels.compile_one import STUB, c_compiler

SETTER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int)


def test_hook_cuda_error_reaches_the_setter_with_its_code(tmp_path: Path) -> None:
    try:
        compiler = c_compiler()
    except SystemExit as err:
        pytest.skip(str(err))
    (tmp_path / "hook.c").write_text(STUB)
    library = tmp_path / "hook.so"
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "hook.c")], check=True)
    hook = ctypes.CDLL(str(library)).CuteDSLRT_TVMFFISetRaisedCudaError
    seen: list[tuple[bytes, bytes]] = []

    @SETTER
    def setter(kind: bytes, parts: ctypes.Array[ctypes.c_char_p], count: int) -> None:
        seen.append((kind, b"".join(part for part in parts[:count] if part)))  # type: ignore[misc]

    hook(setter, 700)
    assert seen == [(b"RuntimeError", b"a CUDA launch failed with error code 700")]
    hook(None, 700)  # a binding without a setter is left alone
