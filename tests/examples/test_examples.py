"""Run the examples on a small text."""

from __future__ import annotations

import json
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
def test_finetune_with_coupling(run: Run, text: Path, tmp_path: Path, model: str, coupling: str) -> None:
    printed = run(
        "finetune_with_coupling.py", text, "--model", model, "--coupling", coupling, "--steps", 8,
        "--seq-len", 32, "--out", tmp_path / "out",
    )  # fmt: skip
    plain, attached, trained, kept = losses(printed)
    if coupling == "affine":
        assert attached == plain
    assert trained < plain
    assert kept == pytest.approx(trained, abs=2e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_existing_folder_is_refused(
    run: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("finetune_with_coupling.py", text, "--out", tmp_path)
    assert re.fullmatch(rf".*'{tmp_path}'.*\[folder-exists\]\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["finetune_with_coupling.py", "faster_qk.py", "compare.py"])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nowhere.txt",), r".*nowhere.txt.*\[unreadable-text\]"),
        (("binary.txt",), r".*binary.txt.*\[unreadable-text\]"),
        (("text.txt", "--model", "no/such/model"), r".*no/such/model.*\[model-not-found\]"),
    ],
)
def test_bad_arguments_print_one_line(
    run: Run,
    text: Path,
    name: str,
    arguments: tuple[str, ...],
    error: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (text.parent / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit, match="2"):
        run(name, text.parent / arguments[0], *arguments[1:])
    assert re.fullmatch(f"{error}\n", capsys.readouterr().err)


def test_faster_qk(run: Run, text: Path) -> None:
    printed = run(
        "faster_qk.py",
        text,
        "--model",
        "gpt2-shape",
        "--before",
        4,
        "--steps",
        4,
        "--seq-len",
        32,
        "--ratio",
        5,
    )
    before, same, faster = losses(printed)
    assert same < before
    assert same != faster


def test_compare(run: Run, text: Path) -> None:
    printed = run(
        "compare.py", text, "--variants", "standard,symmetric=1,drift,ratio=5", "--seeds", 1, "--steps", 3,
        "--seq-len", 32,
    )  # fmt: skip
    rows = [line.split() for line in printed.splitlines() if re.search(r"[+-]\d\.\d{4}", line)]
    assert [row[0] for row in rows] == ["standard", "symmetric=1", "drift", "ratio=5"]
    assert rows[0][2] == "+0.0000"
    assert all(row[2] != "+0.0000" for row in rows[1:])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--seq-len", 1), "[seq-len-too-short]"),
        (("--seq-len", 512, "--model", "gpt2-shape"), "[seq-len-too-long]"),
        (("--lr", "nan", "--seq-len", 32), "learning rate"),
        (("--out", "text.txt/x"), "Not a directory"),
    ],
)
def test_bad_options_fail_before_training(
    run: Run,
    text: Path,
    arguments: tuple[object, ...],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(text.parent)
    with pytest.raises(SystemExit, match="2"):
        run("finetune_with_coupling.py", text, *arguments)
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_cloze_corpus(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "cloze.jsonl"
    assert "50 questions" in run("cloze_corpus.py", text, out, "--examples", 50)
    rows = [json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()]
    assert len(rows) == 50
    for row in rows:
        question, context, answer = re.fullmatch(r"Q: (.*)\? C: (.*) A: (.+)", row).groups()
        assert answer in context
        assert answer in text.read_text()
        assert set(question.split()) <= {"what", *text.read_text().split()}
