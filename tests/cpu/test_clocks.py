# SPDX-License-Identifier: Apache-2.0
"""Clock sampling with a scripted device."""

from __future__ import annotations

import threading

from microbench.clocks import ClockSampler, Reading


def test_sampler_summarises_the_readings_of_its_region() -> None:
    script = [Reading(1980, 3201, 300, 50), Reading(1500, 3201, 700, 60), Reading(1700, 3201, 650, 55)]
    done = threading.Event()
    taken = iter(script)

    def read() -> Reading:
        reading = next(taken)
        if reading is script[-1]:
            done.set()
        return reading

    with ClockSampler(read, interval_s=0.001) as sampler:
        assert done.wait(10)
    summary = sampler.summary()
    assert summary is not None
    assert summary["readings"] == 3, "the device's end of script ends the sampling, not the program"
    assert (summary["sm_mhz"], summary["sm_mhz_min"]) == (1700, 1500)
    assert (summary["power_w"], summary["power_w_max"], summary["temperature_c"]) == (650, 700, 60)


def test_sampler_without_a_reader_has_no_summary() -> None:
    with ClockSampler(None) as sampler:
        pass
    assert sampler.summary() is None


def test_sampler_that_fails_at_once_has_no_summary() -> None:
    def read() -> Reading:
        raise OSError("no permission")

    with ClockSampler(read) as sampler:
        pass
    assert sampler.summary() is None
