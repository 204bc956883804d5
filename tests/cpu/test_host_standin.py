# SPDX-License-Identifier: Apache-2.0
"""The stand-in host against the JSON it is generated from: hierarchy, decorators, fields, signatures, defaults."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_host.generate import ERAS, NEW_LAYOUT, load_contract
from tests.helpers.fake_host.install import installed_host

MODULES = {
    "impl_contract_a": "impl_contract",
    "impl_contract_b": "impl_contract",
    "impl_blocks": "impl_blocks",
    "interface": "interface",
    "quantization": "quantization",
    "moe_resolution": "moe_resolution",
    "configurable_moe": "configurable_moe",
    "moe_scheduler": "moe_scheduler",
    "create_moe_old": "create_moe",
    "create_moe_new": "create_moe",
    "impl_identity": "impl_identity",
    "impl_base": "impl_base",
    "mega_moe_cute_dsl": "mega_moe.mega_moe_cute_dsl",
}
ONLY_NEW = {"create_moe_new", "impl_identity", "impl_base", "mega_moe_cute_dsl"}
# heads that differ on purpose; the reason stands in generate.py beside the change
CHANGED = {("D2", "apply_moe_impl_construction_state"), ("D1", "create_moe_backend"), ("D1", "create_moe")}
NOT_IN_ERA_C = {"get_moe_cls"}


def head_of(function: Any) -> str:
    """Parameters with kinds and defaults, as the JSON spells them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def normal(head: str) -> str:
    node = ast.parse(f"def f{head}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def raw(owner: Any, name: str) -> Any:
    """The function behind classmethods, properties and wrappers."""
    found = inspect.getattr_static(owner, name)
    found = getattr(found, "__func__", getattr(found, "fget", found))
    found = getattr(found, "_init_fn", found)  # torch's custom operator
    return inspect.unwrap(found)


def entries(era: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, entry in load_contract().items():
        if key not in MODULES or (key in ONLY_NEW and ERAS[era] != NEW_LAYOUT):
            continue
        if key == "create_moe_old" and ERAS[era] == NEW_LAYOUT:
            continue
        yield key, entry


@pytest.mark.parametrize("era", ["C", "D1", "D2"])
def test_standin_heads_equal_the_contract(era: str, tmp_path: Path) -> None:
    compared = 0
    with installed_host(tmp_path, era) as base:
        for key, entry in entries(era):
            module = importlib.import_module(f"{base}.{MODULES[key]}")
            for name, (head, _) in entry["functions"].items():
                if (era, name) in CHANGED or (era == "C" and name in NOT_IN_ERA_C):
                    continue
                assert head_of(raw(module, name)) == normal(head), f"{key}.{name}"
                compared += 1
            for name, facts in entry["classes"].items():
                cls = getattr(module, name)
                bases = [b.__name__ for b in cls.__bases__ if b is not object]
                assert bases == [b.split(".")[-1] for b in facts["bases"]], name
                for method, (head, decorators) in facts["methods"].items():
                    assert head_of(raw(cls, method)) == normal(head), f"{name}.{method}"
                    is_abstract = any("abstractmethod" in d for d in decorators)
                    found = inspect.getattr_static(cls, method)
                    assert getattr(found, "__isabstractmethod__", False) == is_abstract, f"{name}.{method}"
                    compared += 1
                if any(d.startswith("dataclass") for d in facts["decorators"]):
                    have = [f.name for f in dataclasses.fields(cls)]
                    want = list(facts["attributes"])
                    assert have[: len(want)] == want, name
                else:
                    for attribute, (_, default) in facts["attributes"].items():
                        assert default is None or hasattr(cls, attribute), f"{name}.{attribute}"
    assert compared > 100  # a walk that finds nothing would pass


def test_standin_moe_config_refuses_what_the_host_refuses(tmp_path: Path) -> None:
    with installed_host(tmp_path, "D2"):
        MoeConfig = importlib.import_module("tensorrt_llm.llmapi.llm_args").MoeConfig
        assert MoeConfig(backend="MEGAMOE_CUTEDSL").backend == "MEGAMOE_CUTEDSL"
        for wrong in ({"backend": "MEGAMOE_CUTEDLS"}, {"backend": "CUTLASS", "unknown_key": 1}):
            with pytest.raises(ValueError):
                MoeConfig(**wrong)


def test_standin_resolver_follows_the_contract(tmp_path: Path) -> None:
    with installed_host(tmp_path, "D2") as base:
        resolution = importlib.import_module(f"{base}.moe_resolution")
        config = importlib.import_module("tensorrt_llm._torch.model_config").ModelConfig(moe_backend="MEGAMOE_CUTEDSL")
        report = resolution.resolve_moe_impl(config, num_experts=16)
        assert (report.winner, report.requested, len(report.rejected)) == ("CutlassFusedMoE", "MEGAMOE_CUTEDSL", 1)
        with pytest.raises(ValueError, match="not eligible"):
            resolution.resolve_moe_impl(config, num_experts=16, allow_degradation=False)
        config.set_unfrozen("moe_backend", "WIDEEP")
        with pytest.raises(ValueError, match="Unsupported moe backend"):
            resolution.resolve_moe_impl(config, num_experts=16)
        with pytest.raises(ValueError, match="unknown implementation token"):
            resolution.resolve_moe_impl(config, num_experts=16, impl_id="nobody")


def test_standin_scheduler_chunks_by_the_fullest_rank(tmp_path: Path) -> None:
    """3 chunks because the fullest rank has 9 tokens and the limit is 4; the empty rank gets three empty chunks."""
    import torch

    with installed_host(tmp_path, "C") as base:
        scheduler_cls = importlib.import_module(f"{base}.moe_scheduler").FusedCommMoEScheduler

        class Wrapper:
            moe_max_num_tokens = 4

        scheduler = scheduler_cls(Wrapper())
        for rank, sizes in ((0, [3, 3, 3]), (1, [0, 0, 0]), (2, [2, 1, 1])):
            x = torch.zeros(sum(sizes), 8)
            layout = scheduler._compute_chunk_layout(x, x, [9, 0, 4], rank)
            assert layout[0] == 3 and [c.shape[0] for c in layout[1]] == sizes
            assert layout[3] == [[3, 0, 2], [3, 0, 1], [3, 0, 1]]
