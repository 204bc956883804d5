# SPDX-License-Identifier: Apache-2.0
"""What the README shows exists: commands, options, targets, snippets, variables; and it says what has run where."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from microbench.cli import main as microbench
from trtllm_megamoe.cli.main import main
from trtllm_megamoe.envs import ENV_VARS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {"trtllm_megamoe": main, "microbench": microbench}
COMMAND = re.compile(r"python -m (trtllm_megamoe|microbench) ([^\n`]*)")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str, program: str) -> list[list[str]]:
    """Every complete command line of the shell blocks, split into words."""
    joined = "\n".join(blocks(text, "bash")).replace("\\\n", " ")
    lines = [line for found, line in COMMAND.findall(joined) if found == program]
    return [shlex.split(line, comments=True) for line in lines]


def resolve(program: str, words: list[str]) -> click.Command:
    """The command that a command line calls, through groups; the bench's own default is `run`."""
    command: click.Command = PROGRAMS[program]
    if program == "microbench" and words[0].startswith("-"):
        words = ["run", *words]
    for word in words:
        if isinstance(command, click.Group) and not word.startswith("-"):
            found = command.get_command(click.Context(command), word)
            assert found is not None, words
            command = found
    return command


def option_names(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_commands_and_options_exist(document: Path, program: str) -> None:
    for words in commands(document.read_text(encoding="utf-8"), program):
        wrong = {w.split("=")[0] for w in words if w.startswith("--")} - option_names(resolve(program, words))
        assert not wrong, words


def test_every_command_is_in_the_readme() -> None:
    shown = {words[0] for words in commands(README, "trtllm_megamoe")}
    assert shown >= set(main.list_commands(click.Context(main)))


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", "\n".join(blocks(README, "bash")), re.MULTILINE)) <= targets
    assert {"bench", "test", "lint"} <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_snippets_compile(document: Path) -> None:
    for snippet in blocks(document.read_text(encoding="utf-8"), "python"):
        compile(snippet, str(document), "exec")


def test_variable_table_is_the_one_of_the_code() -> None:
    shown = set(re.findall(r"`(TRTLLM_MEGAMOE_[A-Z_]+)`", README))
    assert shown == {variable.name for variable in ENV_VARS}


def test_first_forty_lines_say_what_it_is_and_what_has_run() -> None:
    head = "\n".join(README.splitlines()[:40])
    assert "TensorRT-LLM" in head and "NVFP4" in head
    assert "not run on hardware" in head  # Blackwell, wherever a user could think otherwise (D4)
    for text in ("pip install", "python -m trtllm_megamoe doctor", "make bench"):
        assert text in head, text
