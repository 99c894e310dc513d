"""Promises of the package as a whole: what importing it costs, and how its command line answers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from input_errors import raises_code
from qkflow.cli import main as cli
from qkflow.cli.main import COMMANDS

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
    code = "import sys; from qkflow.cli import main; main.dispatch(['-h']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for name in COMMANDS:
        assert name in done.stdout
    assert done.stdout.strip().endswith("False")


def test_a_group_of_commands_has_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {name.partition(" ")[0] for name in COMMANDS if " " in name} - COMMANDS.keys()
    for group in groups:
        assert cli.dispatch([group, "--help"]) == 0
        said = capsys.readouterr().out
        for name in COMMANDS:
            assert (f"  {name}  " in said) == name.startswith(f"{group} ")
    with raises_code("unknown-command") as caught:
        cli.dispatch(["data", "lst"])
    assert "'data list'" in str(caught.value)


def test_unknown_command_suggests_the_nearest() -> None:
    done = run("bnch")
    assert done.returncode == 2
    assert "did you mean 'bench'" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_is_one_sentence_and_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["qkflow", "bench", "--level", "attention", "--variants", "eulr"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert len(printed.strip().splitlines()) == 1
    assert "did you mean 'euler" in printed


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("compare", "--starts=gpt2", "--inits"),
        ("train", "--start", "--init"),
        ("train", "--length", "--seq-len"),
        ("eval", "--batch", "--batch-size"),
        ("bench", "--width", "--dim"),
        ("bench", "--kv_heads", "--n-kv-heads"),
        ("pace study", "--layers", "--n-layers"),
        ("pace synthetic", "--qk-start", "--qk-init"),
        ("timescale theory", "--hidden", "--hidden-dim"),
    ],
)
def test_renamed_flag_names_the_new_one(command: str, old: str, new: str) -> None:
    with raises_code("renamed-flag") as caught:
        cli.dispatch([*command.split(), old, "1"])
    assert str(caught.value).endswith(f" {new}")


def test_flag_that_a_command_still_has_is_not_renamed() -> None:
    def command(*, start: int = 0, init: int = 0) -> None: ...

    cli.check_renamed_flags(["--start", "1"], command)


def test_import_of_the_old_hub_package_names_the_new_one() -> None:
    with pytest.raises(ImportError, match="from qkflow import hf"):
        importlib.import_module("qkflow").hub  # noqa: B018


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_every_command_has_help_with_an_example_and_json(
    name: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as exit:
        cli.dispatch([*name.split(), "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert "--json" in printed
    assert f"qkflow {name}" in " ".join(printed.partition("\nexamples:\n")[2].split())


def test_bench_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--level attention --quick --rounds 3 --dim 32 --n-heads 4 --threads 1 --json"
    assert cli.dispatch(["bench", "--variants", "euler n=1,none", *options.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["variant"] for row in printed["rows"]} == {"euler", "none"}
    for row in printed["rows"]:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert {"steps", "level", "flop_ratio", "memory_ratio"} <= set(row)
    assert printed["environment"]["dim"] == 32
