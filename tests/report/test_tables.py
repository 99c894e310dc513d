"""The terminal table and the two commands that show it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from qkflow import console
from qkflow.cli.commands.compare import print_comparison
from qkflow.report.tables import format_difference, format_number, format_signed, terminal_table
from qkflow.studies import rebuild_report


def qkflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from qkflow.cli.main import main; main()", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=120)


def test_the_table_fits_an_80_column_terminal(study: Path) -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(rebuild_report(study).summary))
    lines = text.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    for words in ("leapfrog:n=7", "no evidence", "reference", "helps", "hurts", "−10.4%"):
        assert words in text.getvalue()


def test_numbers() -> None:
    assert (format_signed(-10.44), format_signed(-0.5), format_signed(3)) == ("−10.4", "−0.50", "+3.00")
    assert (format_number(None), format_number(1.234, ".2f×"), format_number(0.5, "g")) == (
        "–",
        "1.23×",
        "0.5",
    )
    assert format_difference({"difference": None}) == ("–", "–")
    alone = {"difference": {"percent": {"mean": 1.0, "low": None, "high": None}}}
    assert format_difference(alone) == ("+1.00%", "–")


def test_report_prints_one_json_object(study: Path) -> None:
    told = qkflow("report", str(study), "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["variants"][0]["variant"] == "euler"


def test_an_incomplete_study_says_so_and_ends_with_1(
    hostile_study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "out", Console(width=80))
    assert print_comparison(rebuild_report(hostile_study), json=False) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "symmetric helps: its perplexity is" in said
    assert "! Failed: euler@gpt2 seed 0, euler@gpt2 seed 1, euler@gpt2 seed 2: loss is <nan> & gone" in said
    assert "report.html" in said


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["report", "nowhere"], "nowhere is not a comparison"),
        (["compare", "--seeds", "1"], "a verdict needs at least 3 seeds"),
        (["compare", "--variants", "standard,leapfrg:n=7"], "did you mean 'leapfrog'?"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], hint: str) -> None:
    said = qkflow(*arguments)
    assert said.returncode == 2
    assert hint in said.stderr
    assert said.stdout == ""
    assert len(said.stderr.strip().splitlines()) == 1


def test_help_has_examples() -> None:
    said = qkflow("compare", "--help")
    assert "qkflow compare --data my.txt" in said.stdout
    assert "--no-verdict" in said.stdout
