# SPDX-License-Identifier: Apache-2.0
"""Ways a host can differ from what the plug-in was written for, each consistent in itself, with what must be said."""

from __future__ import annotations

from tests.helpers.fake_host.generate import Plan

MOVED_TO = "tensorrt_llm._torch.experts.fused_moe"


def move_moe_modules(plan: Plan) -> None:
    """All MoE modules are at another place, and everybody knows."""
    old, new = plan.moe_base.replace(".", "/"), MOVED_TO.replace(".", "/")
    for path in [p for p in plan.files if p.startswith(f"{old}/")]:
        plan.files[path.replace(old, new, 1)] = plan.files.pop(path)
    plan.edit("tensorrt_llm._standin.paths", plan.moe_base, MOVED_TO)


def rename_class(plan: Plan) -> None:
    """A carrier has another name, everywhere."""
    for path, text in plan.files.items():
        plan.files[path] = text.replace("MoERunContext", "MoEForwardContext")


def rename_argument(plan: Plan) -> None:
    """Construction takes the routing under another name, everywhere."""
    head = "module: nn.Module, *, routing_method: "
    plan.edit(f"{plan.moe_base}.impl_base", head, head.replace("routing_method", "router"))


MUTATIONS = {
    "moved module": (move_moe_modules, "they moved to a place that this plug-in does not know"),
    "missing class": (rename_class, "impl_contract.MoERunContext: expected to exist, found nothing of that name"),
    "renamed argument": (rename_argument, "apply_moe_impl_construction_state: expected to accept routing_method"),
}
"""Name -> (mutation, text that docs/serving.md promises)."""
