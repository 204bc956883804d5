# SPDX-License-Identifier: Apache-2.0
"""`doctor --host` and `explain --host`: an installed tensorrt_llm against what the plug-in relies on, and what it does.

Both print what `trtllm_megamoe.host` finds; no rule lives here. Nothing is served and no model is built.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from trtllm_megamoe import __version__
from trtllm_megamoe.cli.text import table
from trtllm_megamoe.envs import HOST_VARS


def doctor_host(as_json: bool) -> bool:
    """Compare the installed host's signatures and members with the reliance table; True when nothing differs.

    Raises:
        MegaMoeUnavailableError: No tensorrt_llm, or one of an era that is not supported.
    """
    from trtllm_megamoe.host import compat, hook
    from trtllm_megamoe.host.__main__ import hook_path

    hook.remove()  # a host that differs is to be described here, not refused
    api = compat.locate()
    found = compat.deviations(api)
    facts = {
        "tensorrt_llm": api.version,
        "era": api.era.value,
        "moe_modules": api.base,
        "start_up_hook": str(hook_path()) if hook_path().exists() else None,
    }
    if as_json:
        differences = [asdict(deviation) for deviation in found]
        report: dict[str, Any] = {"schema": "megamoe-doctor-host/1", "version": __version__, **facts}
        click.echo(json.dumps({**report, "fits": not found, "differences": differences}, indent=2))
        return not found
    click.echo(f"trtllm-megamoe {__version__}\n")
    click.echo(table((), [(name, value or "not installed") for name, value in facts.items()]))
    checked = len(compat.everything_relied_on(api))
    if found:
        click.echo("\nThis host differs from what the plug-in relies on:")
        click.echo(table(("where", "expected", "found"), [(d.where, d.expected, d.found) for d in found]))
        click.echo(
            "\nThe plug-in refuses such a host. Install a version that docs/serving.md lists, or report this table."
        )
    else:
        click.echo(f"\n{checked} relied-on names and signatures checked: nothing differs.")
    return not found


def explain_host(as_json: bool) -> None:
    """Register in this process and show what was replaced, with which settings.

    Raises:
        MegaMoeUnavailableError: The host is absent or differs.
        MegaMoeConfigError: A variable has an illegal value.
    """
    from trtllm_megamoe.host.__main__ import module_directory
    from trtllm_megamoe.host.register import install_worker_entry, register

    done = register()
    install_worker_entry()
    replaced = [*done.replaced, ("tensorrt_llm.executor.proxy.worker_main", "trtllm_megamoe.host.worker.worker_main")]
    if as_json:
        report = {
            "schema": "megamoe-explain-host/1",
            "version": __version__,
            "tensorrt_llm": done.api.version,
            "era": done.api.era.value,
            "replaced": [{"place": place, "now": now} for place, now in replaced],
            "settings": {variable.name: variable.get() for variable in HOST_VARS},
        }
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(f"tensorrt_llm {done.api.version}, era {done.api.era.value}, MoE modules at {done.api.base}\n")
    click.echo("Replaced in every rank's process before a model is built:\n" + table(("place", "now"), replaced))
    click.echo(
        "\nReaches the ranks through the last entry, which the host hands to its workers by reference; or through"
    )
    click.echo("the start-up hook (python -m trtllm_megamoe.host --install-hook, TRTLLM_MEGAMOE_ENABLE=1).")
    click.echo(f"\nServe with: --custom_module_dirs {module_directory()}\n")
    click.echo("Settings:\n" + table((), [(v.name, v.get(), v.description) for v in HOST_VARS]))
