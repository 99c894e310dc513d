"""Promises of the package as a whole: what importing it costs, and how its command line answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from qkflow.cli import main as cli
from qkflow.cli.main import COMMANDS
from qkflow.errors import InputError

ALLOWED = {"torch", "numpy", "qkflow"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from qkflow.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
    )


def test_importing_qkflow_needs_torch_alone() -> None:
    """Whatever it loads beyond `import torch` is our own or the standard library."""
    code = (
        "import sys, torch; before = set(sys.modules); from qkflow import Attention;"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    outside = set(done.stdout.split()) - ALLOWED - sys.stdlib_module_names
    assert not outside


def test_help_lists_every_command_without_torch() -> None:
    code = "import sys; from qkflow.cli.main import run; run(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for name in COMMANDS:
        assert name in done.stdout
    assert done.stdout.strip().endswith("False")


def test_a_group_of_commands_has_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {name.partition(" ")[0] for name in COMMANDS if " " in name}
    for group in groups:
        assert cli.dispatch([group, "--help"]) == 0
        said = capsys.readouterr().out
        for name in COMMANDS:
            assert (f"  {name}  " in said) == name.startswith(f"{group} ")
    with pytest.raises(InputError, match="unknown command 'data lst': did you mean 'data list'"):
        cli.dispatch(["data", "lst"])


def test_unknown_command_suggests_the_nearest() -> None:
    done = run("bnch")
    assert done.returncode == 2
    assert "did you mean 'bench'" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_is_one_sentence_and_exit_code_two() -> None:
    done = run("bench", "--level", "attention", "--variants", "eulr")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "did you mean 'euler" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(name: str) -> None:
    done = run(*name.split(), "--help", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert f"qkflow {name}" in done.stdout.replace("usage: ", "", 1)


def test_bench_prints_one_json_object() -> None:
    arguments = (
        "--level",
        "attention",
        "--variants",
        "euler n=1,none",
        "--quick",
        "--rounds",
        "3",
        "--dim",
        "32",
    )
    done = run("bench", *arguments, "--n-heads", "4", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert {row["variant"] for row in printed["rows"]} == {"euler", "none"}
    for row in printed["rows"]:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert {"steps", "level", "flop_ratio", "memory_ratio"} <= set(row)
    assert printed["environment"]["width"] == 32
