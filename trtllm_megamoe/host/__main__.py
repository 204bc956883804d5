# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_megamoe.host`: the directory for --custom_module_dirs; --install-hook and --remove-hook.

The start-up hook is one line in this Python's site-packages. It loads the plug-in in every process, but only where
TRTLLM_MEGAMOE_ENABLE=1; it is for workers that the host does not start itself.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import click

HOOK_NAME = "trtllm_megamoe_host.pth"
HOOK_LINE = 'import os; os.environ.get("TRTLLM_MEGAMOE_ENABLE") == "1" and __import__("trtllm_megamoe.host")\n'


def module_directory() -> Path:
    """The directory that `trtllm-serve --custom_module_dirs` takes."""
    return Path(__file__).resolve().parent / "custom_module" / "trtllm_megamoe_plugin"


def hook_path() -> Path:
    """Where the start-up hook is installed."""
    return Path(sysconfig.get_path("purelib")) / HOOK_NAME


@click.command()
@click.option("--install-hook", "action", flag_value="install", help="Write the start-up hook.")
@click.option("--remove-hook", "action", flag_value="remove", help="Remove the start-up hook.")
def main(action: str | None) -> None:
    """Print the directory for trtllm-serve --custom_module_dirs, or manage the start-up hook."""
    if action is None:
        click.echo(str(module_directory()))
        return
    path = hook_path()
    try:
        if action == "install":
            path.write_text(HOOK_LINE, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    except OSError as err:
        raise click.ClickException(f"{path}: {err.strerror}; use a virtual environment that you may write") from err
    click.echo(f"{path}: {'installed, active where TRTLLM_MEGAMOE_ENABLE=1' if action == 'install' else 'removed'}")


if __name__ == "__main__":
    main()
