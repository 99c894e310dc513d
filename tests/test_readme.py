"""What the README and the pages of `docs` show is what the command line takes."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
PAGES = [README, *sorted((README.parent / "docs").glob("*.md"))]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(README), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_exists_with_its_options(page: Path) -> None:
    from qkflow.cli.main import COMMANDS, split_command

    for line in re.findall(r"^qkflow ([a-z].+)", page.read_text(), re.M):
        name, rest = split_command(shlex.split(line, comments=True))
        module, function, _ = COMMANDS[name]
        command = getattr(importlib.import_module(f"qkflow.cli.commands.{module}"), function)
        known = {"help", *(key.replace("_", "-") for key in inspect.signature(command).parameters)}
        given = {word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")}
        unknown = {option for option in given if option.removeprefix("no-") not in known}
        assert not unknown, line
