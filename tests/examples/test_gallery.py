"""Run the short examples of docs/examples.md, with fewer steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 6


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    path = ROOT / "examples" / name
    code = re.sub(r"^STEPS = \d+$", f"STEPS = {STEPS}", path.read_text("utf-8"), flags=re.M)
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


def numbers(text: str, pattern: str) -> list[float]:
    return [float(match) for match in re.findall(pattern + r" (-?\d+\.\d+)", text)]


def test_coupling(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("coupling.py", capsys)
    counts = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) parameters", printed)]
    assert counts[0] < counts[1] < counts[2]
    losses = numbers(printed, "loss")
    assert len(set(losses)) == 3
    assert max(losses) < 5.55  # ln 257, the loss of a uniform guess


def test_slow_path(capsys: pytest.CaptureFixture[str]) -> None:
    closed, warm = numbers(run("slow_path.py", capsys), "residual stream")
    assert 0 < closed < warm


def test_pace(capsys: pytest.CaptureFixture[str]) -> None:
    slower, equal, faster = numbers(run("pace.py", capsys), "effective pace")
    assert slower < equal < faster


def test_attach(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("attach.py", capsys)
    assert "unchanged: True" in printed
    before, after = map(float, re.findall(r"loss (\S+) -> (\S+)", printed)[0])
    assert after < before


def test_every_example_is_on_the_page() -> None:
    page = (ROOT / "docs" / "examples.md").read_text("utf-8")
    names = {path.name for path in (ROOT / "examples").glob("*.py")} - {"shared.py"}
    assert not {name for name in names if f"examples/{name}" not in page}
