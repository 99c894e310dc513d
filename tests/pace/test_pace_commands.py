"""The pace commands as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkflow import cli
from qkflow.errors import InputError


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_flow_json_has_one_row_per_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "pace", "flow", "--ratios", "0.01,1,100", "--loss", "1e-3", "--check")
    assert [row["ratio"] for row in found["rows"]] == [0.01, 1, 100]
    for row in found["rows"]:
        assert row["loss"] == pytest.approx(1e-3)
        assert row["difference"] < 1e-8
        assert row["mu_ov"] > 0
        assert row["mu_qk"] > 0
    assert found["rows"][0]["alpha"] < found["rows"][-1]["alpha"]


def test_flow_table_shows_the_published_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["pace", "flow"]) == 0
    printed = capsys.readouterr().out
    assert "81.669 0.559 0.149" in printed
    assert "81.6687" in printed


def test_flow_page_is_self_contained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "flow.html"
    run_json(capsys, "pace", "flow", "--kind", "all", "--ratios", "1", "--out", str(page))
    text = page.read_text()
    assert "FACO, r = 1" in text
    assert "plotly" in text
    assert '<script src="http' not in text
    assert list(page.parent.iterdir()) == [page]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ratios", "0"], "ratio must be a positive number"),
        (["--ratios", "one"], "--ratios takes numbers"),
        (["--loss", "9"], "the loss must lie between"),
        (["--kind", "CACA"], "unknown parameterisation"),
    ],
)
def test_flow_refuses_bad_input(flags: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        cli.run(["pace", "flow", *flags])
