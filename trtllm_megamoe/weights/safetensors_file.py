# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: checked header, and tensors read one by one into memory of their own.

Reads with `pread` instead of a memory map: pages of a map pile up in the resident set of a long load (B26), and a
tensor must never alias a file. Used by :mod:`trtllm_megamoe.weights.checkpoint` only.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.weights.host_memory import host_bytes
from trtllm_megamoe.weights.spill import read_into

_MAX_HEADER_BYTES = 100_000_000

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class TensorEntry(NamedTuple):
    """Where a tensor lies: dtype code of the format, shape, first byte (from the start of the file), byte count."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """Header of one file. Opening reads the header only and keeps no handle."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            MegaMoeWeightError: the file is missing, truncated or not a safetensors file.
        """
        self.path = path
        try:
            self.entries = self._read_header()
        except OSError as err:
            raise MegaMoeWeightError(f"cannot read {path}: {err.strerror}") from None

    def _read_header(self) -> dict[str, TensorEntry]:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise self._fault(f"it has {size} bytes, a safetensors header alone needs more: truncated")
            length = struct.unpack("<Q", head)[0]
            if length > _MAX_HEADER_BYTES:
                raise self._fault(f"header length {length} is not plausible")
            if 8 + length > size:
                raise self._fault(f"truncated inside the header: {size} bytes, the header ends at {8 + length}")
            text = file.read(length)
        try:
            raw: dict[str, Any] = json.loads(text)
            entries = {name: self._entry(8 + length, info) for name, info in raw.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._fault("the header is not the JSON of a safetensors file") from None
        end = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + length)
        if end > size:
            raise self._fault(f"truncated: {size} bytes, the header promises {end}; copy or download it again")
        return entries

    def _entry(self, base: int, info: dict[str, Any]) -> TensorEntry:
        begin, end = (int(value) for value in info["data_offsets"])
        shape = tuple(int(value) for value in info["shape"])
        if not 0 <= begin <= end:
            raise ValueError("offsets run backwards")
        dtype = _DTYPES.get(info["dtype"])
        if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError("byte count does not fit shape and dtype")
        return TensorEntry(str(info["dtype"]), shape, base + begin, end - begin)

    def _fault(self, what: str) -> MegaMoeWeightError:
        return MegaMoeWeightError(f"{self.path}: {what}")

    def dtype(self, name: str) -> torch.dtype | None:
        """torch dtype of a tensor; None for a format dtype that torch lacks."""
        return _DTYPES.get(self.entries[name].dtype)

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """An open descriptor for :meth:`read`, closed at the end.

        Raises:
            MegaMoeWeightError: the file cannot be opened any more.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as err:
            raise self._fault(f"cannot be read: {err.strerror}") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, name: str, descriptor: int) -> torch.Tensor:
        """Read one tensor into fresh CPU memory.

        Raises:
            MegaMoeWeightError: the file shrank since its header was read, or the dtype is unknown.
        """
        entry = self.entries[name]
        dtype = self.dtype(name)
        if dtype is None:
            raise self._fault(f"tensor {name} has dtype {entry.dtype}, which cannot be read")
        data = host_bytes((entry.nbytes,))
        if not read_into(descriptor, data, entry.offset):
            raise self._fault(f"truncated while reading {name}")
        return data.view(dtype).reshape(entry.shape)
