"""The examples run as they are written, on a text made here."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def main(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return main


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"^[^|{\n]*: +(\d+\.\d{4})$", printed, re.MULTILINE)]


@pytest.mark.parametrize(("model", "coupling"), [("llama-shape", "affine"), ("gpt2-shape", "drift:step=0.5")])
def test_fine_tuning_with_a_coupling(run: Run, text: Path, tmp_path: Path, model: str, coupling: str) -> None:
    printed = run(
        "finetune_with_coupling.py", text, "--model", model, "--coupling", coupling, "--steps", 8,
        "--length", 32, "--out", tmp_path / "out",
    )  # fmt: skip
    plain, attached, trained, kept = losses(printed)
    if coupling == "affine":
        assert attached == plain
    assert trained < plain
    assert kept == pytest.approx(trained, abs=2e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_going_on_with_a_faster_circuit(run: Run, text: Path) -> None:
    printed = run(
        "faster_qk.py",
        text,
        "--model",
        "gpt2-shape",
        "--before",
        4,
        "--steps",
        4,
        "--length",
        32,
        "--ratio",
        5,
    )
    before, same, faster = losses(printed)
    assert same < before
    assert same != faster


def test_comparing(run: Run, text: Path) -> None:
    printed = run(
        "compare.py", text, "--variants", "standard,symmetric=1,drift,ratio=5", "--seeds", 1, "--steps", 3,
        "--length", 32,
    )  # fmt: skip
    rows = [line.split() for line in printed.splitlines() if re.search(r"[+-]\d\.\d{4}", line)]
    assert [row[0] for row in rows] == ["standard", "symmetric=1", "drift", "ratio=5"]
    assert rows[0][2] == "+0.0000"
    assert all(row[2] != "+0.0000" for row in rows[1:])
