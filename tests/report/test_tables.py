"""The terminal table, and the commands that print it."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from qkflow import console
from qkflow.cli.commands.compare import print_comparison
from qkflow.cli.main import main
from qkflow.report.tables import (
    format_difference,
    format_number,
    format_percent,
    format_signed,
    terminal_table,
    to_csv,
)
from qkflow.studies import load_comparison
from qkflow.studies.stats import PairedDifference

QkflowCommand = Callable[..., tuple[object, str, str]]


@pytest.fixture
def qkflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> QkflowCommand:
    """Return a function that runs a command in this process: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["qkflow", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code, *capsys.readouterr()

    return run


def test_table_fits_80_columns(study: Path) -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(load_comparison(study).summary))
    lines = text.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    for words in ("leapfrog:n=7", "undecided", "reference", "helps", "hurts", "−10.4%"):
        assert words in text.getvalue()


def test_narrow_terminal_has_every_verdict(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "out", Console(width=40))
    comparison = load_comparison(study)
    assert print_comparison(comparison, json=False) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 40 for line in printed.splitlines() if not line.startswith("report: "))
    for sentence in comparison.verdicts.values():
        assert sentence in " ".join(printed.split())
    for words in ("leapfrog:n=7", "−10.4%", "undecided"):
        assert words in printed.partition("Δ:")[0]


def test_number_formats() -> None:
    assert (format_signed(-10.44), format_signed(-0.5), format_signed(3)) == ("−10.4", "−0.50", "+3.00")
    assert (format_number(None), format_number(1.234, ".2f×"), format_number(0.5, "g")) == (
        "–",
        "1.23×",
        "0.5",
    )
    assert format_difference(None) == ("–", "–")
    one_seed = PairedDifference(math.log(1.01), None, None, None, None, None, 1)
    assert format_difference(one_seed) == ("+1.00%", "–")
    assert format_percent(None) == "–"


def test_report_prints_one_json_object(study: Path, qkflow: QkflowCommand) -> None:
    code, out, err = qkflow("report", str(study), "--json")
    assert code == 0, err
    assert json.loads(out)["variants"][0]["variant"] == "euler"
    for name in ("report.html", "summary.json", "summary.csv", "curves.csv"):
        assert (study / name).is_file()


def test_incomplete_study_prints_failures_and_returns_1(
    hostile_study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "out", Console(width=80))
    assert print_comparison(load_comparison(hostile_study), json=False) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "symmetric helps: its perplexity is" in text
    assert "! Failed: euler@gpt2 seed 0, euler@gpt2 seed 1, euler@gpt2 seed 2: loss is <nan> & gone" in text
    assert "report.html" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["report", "nowhere"], "not-a-study"),
        (["compare", "--seeds", "1"], "too-few-seeds"),
        (["compare", "--variants", "standard,leapfrg:n=7"], "unknown-variant"),
        (["compare", "--starts", "gpt2"], "renamed-flag"),
        (["reproduce", "fastslow"], "unknown-recipe"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], code: str, qkflow: QkflowCommand
) -> None:
    exit_code, out, err = qkflow(*arguments)
    assert exit_code == 2
    assert f"[{code}]" in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_csv_columns() -> None:
    assert to_csv([{"a": 1, "b": None}]) == "a,b\n1,\n"
    assert to_csv([], columns=["a"]) == "a\n"
    assert to_csv([]) == ""
