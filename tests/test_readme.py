"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
COMMANDS = re.findall(r"^qkflow ([a-z]+(?: [a-z]+)?)", README.read_text(), re.M)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(README), "exec"), {})


def test_every_command_shown_exists() -> None:
    from qkflow.cli import find

    assert COMMANDS
    for words in COMMANDS:
        find(words.split())
