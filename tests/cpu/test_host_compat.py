# SPDX-License-Identifier: Apache-2.0
"""Which hosts the plug-in accepts, what it says to the others, and what registration changes in them."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.fake_host.generate import ERAS, NEW_LAYOUT, Deviation, Plan
from tests.helpers.fake_host.install import installed_host
from tests.helpers.fake_host.mutations import MOVED_TO, MUTATIONS, move_moe_modules
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError

pytestmark = pytest.mark.usefixtures("cpu_host")


def host(name: str) -> ModuleType:
    return importlib.import_module(f"trtllm_megamoe.host.{name}")


def edit(module: str, old: str, new: str) -> Deviation:
    """A deviation in a module of the MoE package, or in an absolute one."""

    def deviate(plan: Plan) -> None:
        plan.edit(module if module.startswith("tensorrt_llm") else f"{plan.moe_base}.{module}", old, new)

    return deviate


@pytest.mark.parametrize(("era", "found"), [("C", "C"), ("D1", "D"), ("D2", "D")])
def test_detect_supported_era_is_found_by_features(era: str, found: str, tmp_path: Path) -> None:
    with installed_host(tmp_path, era) as base:
        api = host("compat").detect()
        assert (api.era.value, api.base) == (found, base)
        assert host("compat").deviations(api) == []


@pytest.mark.parametrize("era", ["A", "B"])
def test_detect_older_era_is_refused_by_name(era: str, tmp_path: Path) -> None:
    with (
        installed_host(tmp_path, era),
        pytest.raises(MegaMoeUnavailableError, match=f"of era {era} .*does not support"),
    ):
        host("compat").detect()


def test_detect_absent_host_says_so() -> None:
    with pytest.raises(MegaMoeUnavailableError, match="tensorrt_llm is not installed"):
        host("compat").detect()


REFUSED = {
    **MUTATIONS,
    "missing class that others import": (
        edit("impl_contract", "class MoERunContext", "class MoERunContext2"),
        "cannot import name 'MoERunContext'",
    ),
    "missing upstream class": (
        edit("create_moe", "from .mega_moe import MegaMoECuteDsl", "from .mega_moe import MegaMoECuteDsl as Mega"),
        "create_moe.MegaMoECuteDsl: expected to exist",
    ),
    "missing reason": (
        edit("impl_contract", "    QUANT_UNSUPPORTED = ", "    QUANT_REFUSED = "),
        "MoERejectReason: expected members QUANT_UNSUPPORTED",
    ),
    "renamed field of the run context": (
        edit("impl_contract", "token_final_scales: Optional", "token_weights: Optional"),
        "MoERunContext: expected members token_final_scales",
    ),
    "new required argument of run_moe": (
        edit(
            "impl_base", "def run_moe(self, ctx: MoERunContext)", "def run_moe(self, ctx: MoERunContext, stream: int)"
        ),
        "run_moe: expected to need no arguments beyond ours, but it needs stream",
    ),
    "resolver read by value": (
        edit(
            "create_moe",
            "def standin_resolve(*args, **kwargs):\n    return resolve_moe_cls(*args, **kwargs)",
            "standin_resolve = resolve_moe_cls",
        ),
        "expected some function of the module to read resolve_moe_cls at call time",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_register_intolerable_deviation_is_refused_and_nothing_replaced(name: str, tmp_path: Path) -> None:
    deviation, message = REFUSED[name]
    with installed_host(tmp_path, "D2", deviation) as base:
        with pytest.raises((MegaMoeUnavailableError, ImportError)) as caught:
            host("register").register()
        assert message in str(caught.value)
        if isinstance(caught.value, MegaMoeUnavailableError):
            assert "serve without this plug-in" in str(caught.value)
        loaded = sys.modules.get(f"{base}.moe_resolution")
        if loaded is not None and hasattr(loaded, "IMPL_PRIORITY"):
            assert "TrtllmMegamoeBackend" not in [cls.__name__ for cls in loaded.IMPL_PRIORITY]


def test_import_hook_unknown_place_of_create_moe_is_an_error(tmp_path: Path) -> None:
    """The hook sees a moved create_moe being imported, so upstream's backend never runs silently."""
    with installed_host(tmp_path, "D2", move_moe_modules):
        importlib.import_module("trtllm_megamoe.host")
        with pytest.raises((MegaMoeUnavailableError, ImportError)):
            importlib.import_module(f"{MOVED_TO}.create_moe")


def drop_eplb_capability(plan: Plan) -> None:
    edit("impl_contract", "    supports_eplb: object = False\n", "")(plan)
    edit("mega_moe.mega_moe_cute_dsl", "supports_eplb=True, ", "")(plan)


TOLERATED = {
    "optional argument more": edit(
        "impl_base", "def run_moe(self, ctx: MoERunContext)", "def run_moe(self, ctx: MoERunContext, *, hint: int=0)"
    ),
    "newer fields": edit(
        "impl_contract", "    do_finalize: bool = True", "    do_finalize: bool = True\n    x_extra: Any = None"
    ),
    "capability gone": drop_eplb_capability,
    "upstream alias renamed": edit(
        "create_moe",
        "from .mega_moe import MegaMoECuteDsl",
        "from .mega_moe import MegaMoECuteDsl\nNewName = MegaMoECuteDsl",
    ),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_register_harmless_deviation_is_tolerated(name: str, tmp_path: Path) -> None:
    with installed_host(tmp_path, "D2", TOLERATED[name]) as base:
        backend = host("register").register().backend
        create = importlib.import_module(f"{base}.create_moe")
        assert create.MegaMoECuteDsl is backend and getattr(create, "NewName", backend) is backend


@pytest.mark.parametrize("era", ["C", "D1", "D2"])
def test_register_twice_changes_nothing_more(era: str, tmp_path: Path) -> None:
    with installed_host(tmp_path, era) as base:
        register = host("register")
        first = register.register()
        resolution = importlib.import_module(f"{base}.moe_resolution")
        create = importlib.import_module(f"{base}.create_moe")
        before = (resolution.IMPL_PRIORITY, dict(resolution.BACKEND_FAMILY), create.resolve_moe_cls)
        assert register.register() is first
        importlib.import_module("trtllm_megamoe.host.hook").install()
        assert (resolution.IMPL_PRIORITY, dict(resolution.BACKEND_FAMILY), create.resolve_moe_cls) == before
        assert resolution.IMPL_PRIORITY.count(first.backend) == 1 and len(resolution.IMPL_PRIORITY) == 11
        assert resolution.BACKEND_FAMILY["MEGAMOE_CUTEDSL"] == {first.backend}
        if ERAS[era] == NEW_LAYOUT:
            identity = importlib.import_module(f"{base}.impl_identity")
            names = [str(i) for i in identity.MOE_IMPL_REGISTRY.identities()]
            assert names == ["trtllm.cutedsl.mega_moe.nvfp4", "trtllm_megamoe.cutedsl.mega_moe.nvfp4"]


def test_register_illegal_variable_is_refused_before_any_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_MEGAMOE_COMBINE_FORMAT", "fp7")
    with installed_host(tmp_path, "C"), pytest.raises(MegaMoeConfigError, match=r"allowed: bf16 .*16e2m1xbf16"):
        host("register").register()


def test_aliases_are_copied_to_forwarded_names_and_contradictions_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    settings = host("settings")
    monkeypatch.setenv("MEGAMOE_COMBINE_FORMAT", "32e4m3xe8m0")
    settings.adopt_aliases()
    assert os.environ["TRTLLM_MEGAMOE_COMBINE_FORMAT"] == "32e4m3xe8m0"
    assert settings.HostSettings.from_environment().combine_format.value == "fp8"
    monkeypatch.setenv("MEGAMOE_COMBINE_FORMAT", "bf16")
    with pytest.raises(MegaMoeConfigError, match="contradict each other"):
        settings.HostSettings.from_environment()


def test_worker_entry_is_named_once_and_runs_the_hosts_own(tmp_path: Path) -> None:
    with installed_host(tmp_path, "D2"):
        importlib.import_module("trtllm_megamoe.host")
        proxy = importlib.import_module("tensorrt_llm.executor.proxy")
        entry = proxy.worker_main
        assert entry.__module__ == "trtllm_megamoe.host.worker"
        importlib.import_module("trtllm_megamoe.host.hook").install()
        assert proxy.worker_main is entry
        seen: list[Any] = []
        importlib.import_module("tensorrt_llm.executor.worker").worker_main = lambda *a, **k: seen.append((a, k))
        entry(1, two=2)
        assert seen == [((1,), {"two": 2})]
        assert host("register").register().backend.__name__ == "TrtllmMegamoeBackend"


def test_worker_entry_that_is_not_read_at_call_time_is_refused(tmp_path: Path) -> None:
    """If the executor no longer names its workers' function through its module, our workers would never start."""
    moved = edit(
        "tensorrt_llm.executor.proxy", "self.session.submit_sync(worker_main,", "self.session.submit_sync(None,"
    )
    with installed_host(tmp_path, "D2", moved):
        importlib.import_module("trtllm_megamoe.host")
        with pytest.raises(MegaMoeUnavailableError, match="to read worker_main at call time"):
            importlib.import_module("tensorrt_llm.executor.proxy")


def test_import_needs_neither_host_nor_torch() -> None:
    """The start-up hook imports this in every Python process."""
    program = "import sys, trtllm_megamoe.host; print('torch' in sys.modules, 'tensorrt_llm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def reliance_rows() -> Iterator[tuple[str, Any]]:
    reliance = importlib.import_module("trtllm_megamoe.host.reliance")
    tables = ("COMMON", "OVER_MOE", "OVER_IMPL_BASE", "WORKER_ENTRY", "MIGRATION", "MIGRATION_OVER_MOE",
              "MIGRATION_OVER_IMPL_BASE")  # fmt: skip
    for table in tables:
        for row in getattr(reliance, table):
            yield table, row


def test_reliance_table_every_row_notices_its_loss(tmp_path: Path) -> None:
    """A row that cannot fail protects nothing: take each named thing away and the row must complain."""
    reliance = importlib.import_module("trtllm_megamoe.host.reliance")
    for _, row in reliance_rows():
        missing = list(reliance.find_deviations([row], lambda name: ModuleType(name)))
        assert len(missing) == 1 and "to exist" in str(missing[0]), row

        def absent(name: str) -> ModuleType:
            raise ModuleNotFoundError(name)

        assert "a module of that name" in str(next(reliance.find_deviations([row], absent))), row
    names = [row for _, row in reliance_rows() if row.use == "overridden"]
    assert names and all(not inspect.isclass(row) for row in names)
