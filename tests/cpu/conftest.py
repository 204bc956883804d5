# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests inside a stand-in host."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_host.install import installed_host
from trtllm_megamoe.envs import HOST_VARS


@pytest.fixture
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the plug-in's variables but the CPU engine's."""
    for variable in HOST_VARS:  # registration writes aliases through; both lines make pytest take that back
        monkeypatch.setenv(variable.name, "")
        monkeypatch.delenv(variable.name)
    monkeypatch.setenv("TRTLLM_MEGAMOE_ENGINE", "cpu")


@pytest.fixture(params=["C", "D1", "D2"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A host of each era with the plug-in imported."""
    with installed_host(tmp_path, request.param) as name:
        importlib.import_module("trtllm_megamoe.host")
        yield name


@pytest.fixture
def newest(tmp_path: Path) -> Iterator[str]:
    """The newest host with the plug-in imported."""
    with installed_host(tmp_path, "D2") as name:
        importlib.import_module("trtllm_megamoe.host")
        yield name
