# SPDX-License-Identifier: Apache-2.0
"""Clocks, power and temperature of a GPU while something is timed: a thread that asks NVML every few milliseconds.

Used by the runner and by the GPU suite. Needs nvidia-ml-py; without it, or where NVML refuses, there are no readings
and the result says null.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.005


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the device."""

    sm_mhz: float
    mem_mhz: float
    power_w: float
    temperature_c: float


def nvml_reader(device_index: int) -> Callable[[], Reading] | None:
    """A function that reads CUDA device `device_index`, or None where NVML is not to be had."""
    try:
        import pynvml

        handle = _nvml_handle(device_index)

        def read() -> Reading:
            return Reading(
                float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
                float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
                pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            )

        read()
    except Exception as err:  # no package, no library, no permission: whatever it is, there is nothing to read
        logger.info("no clocks: %s: %s", type(err).__name__, err)
        return None
    return read


def device_limits(device_index: int) -> dict[str, float]:
    """`sm_max`, the highest SM clock in MHz, and `limit`, the enforced power limit in watts; empty without NVML."""
    try:
        import pynvml

        handle = _nvml_handle(device_index)
        return {
            "sm_max": float(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "limit": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        }
    except Exception as err:  # as above
        logger.info("no limits: %s: %s", type(err).__name__, err)
        return {}


def _nvml_handle(device_index: int) -> Any:
    import pynvml
    import torch

    pynvml.nvmlInit()
    if pynvml.nvmlDeviceGetCount() == 1:
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    # NVML counts all GPUs of the machine, CUDA the visible ones: only the identity says which is which
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device_index).uuid}")


class ClockSampler:
    """Context manager around a timed region; `summary` afterwards.

    Args:
        read: Looks at the device once; None takes no readings. A call that raises ends the sampling.
        interval_s: Time between two readings.
    """

    def __init__(self, read: Callable[[], Reading] | None, interval_s: float = _INTERVAL_S) -> None:
        self._read = read
        self._interval_s = interval_s
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ClockSampler:
        if self._read is not None:
            self._thread = threading.Thread(target=self._sample, name="clock-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        assert self._read is not None
        try:
            while True:
                self._readings.append(self._read())
                if self._stop.wait(self._interval_s):
                    return
        except Exception as err:
            logger.info("clocks end early: %s: %s", type(err).__name__, err)

    def summary(self) -> dict[str, float] | None:
        """Medians, and the extremes that matter (lowest SM clock, highest power); None without a reading."""
        if not self._readings:
            return None
        return {
            "sm_mhz": statistics.median(r.sm_mhz for r in self._readings),
            "sm_mhz_min": min(r.sm_mhz for r in self._readings),
            "mem_mhz": statistics.median(r.mem_mhz for r in self._readings),
            "power_w": statistics.median(r.power_w for r in self._readings),
            "power_w_max": max(r.power_w for r in self._readings),
            "temperature_c": max(r.temperature_c for r in self._readings),
            "readings": float(len(self._readings)),
        }
