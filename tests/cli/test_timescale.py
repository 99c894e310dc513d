"""`qkflow timescale theory` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from input_errors import raises_code
from qkflow.cli import main
from qkflow.papers.fast_slow.master_equation import random_generator, stationary_distribution

QUICK = ["timescale", "theory", "--quick", "--steps", "60", "--hidden-dim", "8"]


def test_generator_file_json_and_offline_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    W = random_generator(3, (2,), seed=5)
    (tmp_path / "rates<1>.json").write_text(json.dumps(W.tolist()))
    page = tmp_path / "new" / "theory.html"
    arguments = [*QUICK, "--generator", str(tmp_path / "rates<1>.json"), "--out", str(page)]
    assert main.dispatch([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    torch.testing.assert_close(
        torch.tensor(result["stationary"]).double(), stationary_distribution(W), rtol=1e-6, atol=0
    )
    assert result["epsilons"] == [2.0**-k for k in range(1, 7)]
    assert len(result["errors"]) == 6
    assert result["order"] == pytest.approx(1, abs=0.02)
    assert result["solvers"]["any_two"] < 1e-13
    assert result["kl"]["steps"][-1] == 60
    assert result["kl"]["mean"][-1] < result["kl"]["mean"][0]
    text = page.read_text()
    assert text.count('class="plot"') == 5
    assert "<script src" not in text
    assert "rates&lt;1&gt;.json" in text
    assert [path.name for path in page.parent.iterdir()] == ["theory.html"]


def test_table_shows_the_fitted_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.dispatch([*QUICK, "--states", "2"]) == 0
    shown = capsys.readouterr().out
    assert "fitted order 1.00" in shown or "fitted order 0.99" in shown
    assert "1/64" in shown


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--states", "1"], "too-few-states"),
        (["--generator", "w.csv", "--states", "3"], "conflicting-options"),
        (["--generator", "missing.csv"], "generator-file-not-found"),
        (["--drift", "0"], "below-minimum"),
        (["--drift", "inf"], "not-finite"),
        (["--steps", "0"], "below-minimum"),
        (["--out", "."], "out-is-a-folder"),
        (["--seed", "9" * 20], "above-maximum"),
    ],
)
def test_invalid_options_raise(arguments: list[str], code: str) -> None:
    with raises_code(code):
        main.dispatch([*QUICK[:3], *arguments])


def test_invalid_generator_exits_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.csv").write_text("-1,2\n1,-1\n")
    arguments = ["timescale", "theory", "--generator", str(tmp_path / "w.csv"), "--json"]
    monkeypatch.setattr(sys, "argv", ["qkflow", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("qkflow: ")
    assert "column 1 sums to 1" in shown.err
    assert "[column-sum-not-zero]" in shown.err
    assert shown.err.count("\n") == 1
