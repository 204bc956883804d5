# SPDX-License-Identifier: Apache-2.0
"""Staged sources in an unlinked temporary file instead of memory: for hosts too small for the order of a delivery.

Written with `pwrite` and read back with `pread`, so that staged bytes never enter the resident set. One file serves one
load window; a tensor that comes again takes its old place. Used by the loader and by staging.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Hashable
from pathlib import Path

import torch

from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.weights.host_memory import host_bytes


def read_into(descriptor: int, data: torch.Tensor, offset: int) -> bool:
    """Fill a contiguous uint8 CPU tensor from a file; False when the file ends early."""
    view = data.numpy().data.cast("B") if data.numel() else memoryview(b"")
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


class SpillFile:
    """Byte tensors by key on disk. The file has no name and dies with this object or the process."""

    def __init__(self, directory: Path, need_bytes: int) -> None:
        """Create the file.

        Raises:
            MegaMoeUnavailableError: the directory cannot be written or has not `need_bytes` free.
        """
        try:
            free = shutil.disk_usage(directory).free
            if free < need_bytes:
                raise MegaMoeUnavailableError(
                    f"staging needs {need_bytes} bytes in {directory}, {free} are free; choose another directory or "
                    "deliver layer by layer (order='layer')"
                )
            self._file = tempfile.TemporaryFile(dir=directory, prefix="megamoe-staging-")  # noqa: SIM115 (lives as long as this object)
        except OSError as error:
            raise MegaMoeUnavailableError(f"cannot stage in {directory}: {error.strerror}") from None
        self._places: dict[Hashable, tuple[int, torch.Size]] = {}
        self._end = 0

    def write(self, key: Hashable, data: torch.Tensor) -> None:
        """Keep the bytes of a contiguous uint8 CPU tensor under a key."""
        offset, _ = self._places.get(key, (self._end, data.shape))
        view = data.numpy().data.cast("B") if data.numel() else memoryview(b"")
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], offset + done)
        self._places[key] = (offset, data.shape)
        self._end = max(self._end, offset + len(view))

    def read(self, key: Hashable) -> torch.Tensor:
        """The bytes of a key in fresh memory."""
        offset, shape = self._places[key]
        data = host_bytes(tuple(shape))
        if not read_into(self._file.fileno(), data, offset):
            raise MegaMoeUnavailableError("the staging file was cut short by somebody else; load again")
        return data

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        self._places.clear()
        self._file.close()
