"""Tab completion, checked in the shells that are installed; colors off where asked."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.cli import main as cli

BASH_COMPLETE = """
source "$1"; shift
COMP_WORDS=(qkflow "$@"); COMP_CWORD=$#
_qkflow
printf '%s\\n' "${COMPREPLY[@]}"
"""
COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;\dm]")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of every shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        (folder / f"qkflow.{shell}").write_text(cli._completion_script(["--print-completion", shell]))
    return folder


def complete(scripts: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    done = subprocess.run(
        ["bash", "-c", BASH_COMPLETE, "bash", str(scripts / "qkflow.bash"), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_and_options(scripts: Path) -> None:
    first_words = {name.partition(" ")[0] for name in cli.COMMANDS}
    assert set(complete(scripts, "")) == first_words | set(cli.TOP_LEVEL_FLAGS)
    assert complete(scripts, "comp") == ["compare"]
    assert complete(scripts, "--no-color", "comp") == ["compare"]
    assert set(complete(scripts, "data", "")) == {"list", "describe", "prepare", "verify"}
    assert complete(scripts, "pace", "stu") == ["study"]
    assert complete(scripts, "compare", "--data", "notes.txt", "--dry") == ["--dry-run"]
    assert complete(scripts, "data", "describe", "--tok") == ["--tokenizer"]
    assert "--variants" in complete(scripts, "compare", "--")
    assert "--variants" not in complete(scripts, "train", "--")
    assert complete(scripts, "compare", "--data", "no") == []  # then bash completes files
    assert "--source" not in complete(scripts, "export", "--")  # positional


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_the_script(scripts: Path, shell: str) -> None:
    text = (scripts / f"qkflow.{shell}").read_text()
    prefix = "-l " if shell == "fish" else "--"
    for name in cli.COMMANDS:
        assert f'"{name}"' in text
    for flag in ("dry-run", "print-completion", "no-color"):
        assert f"{prefix}{flag}" in text
    assert "@" not in re.sub(r"@\]|\(@\)|\$@", "", text)  # no placeholder is left
    if program := shutil.which(shell):
        subprocess.run([program, "-n", scripts / f"qkflow.{shell}"], check=True)


def test_unknown_shell() -> None:
    with raises_code("unknown-shell"):
        cli.dispatch(["--print-completion", "tcsh"])
    with raises_code("shell-missing"):
        cli.dispatch(["--print-completion"])


COMMAND = "from qkflow.cli.main import main; main()"
# what every command prints with
CONSOLE = """
import sys
from qkflow.cli.main import disable_color
disable_color(sys.argv[1:])
from qkflow import console
console.out.print("helps", style="green")
console.err.print("! a note", style="yellow")
"""


def run_in_terminal(code: str, *arguments: str, **environment: str) -> str:
    """Return what Python code prints to a terminal."""
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", **environment}
    terminal, output = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, stdout=output, stderr=output):
        os.close(output)
        printed = b""
        with contextlib.suppress(OSError):  # the process has closed its end
            while part := os.read(terminal, 65536):
                printed += part
    os.close(terminal)
    return printed.decode()


@pytest.mark.parametrize(("code", "arguments"), [(CONSOLE, ()), (COMMAND, ("data", "list", "--help"))])
def test_color_can_be_switched_off(code: str, arguments: tuple[str, ...]) -> None:
    assert COLOR.search(run_in_terminal(code, *arguments))
    assert not COLOR.search(run_in_terminal(code, *arguments, NO_COLOR="1"))
    assert not COLOR.search(run_in_terminal(code, *arguments, "--no-color"))


def test_version() -> None:
    from qkflow import __version__

    assert run_in_terminal(COMMAND, "--no-color", "--version").strip() == f"qkflow {__version__}"
