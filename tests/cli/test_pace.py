"""`qkflow pace flow` and `qkflow pace synthetic` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main.dispatch([*arguments, "--json"]) == 0
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


def test_flow_table_shows_published_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.dispatch(["pace", "flow"]) == 0
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
    ("flags", "code"),
    [
        (["--ratios", "0"], "option-not-positive"),
        (["--ratios", "one"], "not-a-number-list"),
        (["--loss", "9"], "loss-out-of-range"),
        (["--kind", "CACA"], "unknown-parameterization"),
    ],
)
def test_flow_invalid_options_raise(flags: list[str], code: str) -> None:
    with raises_code(code):
        main.dispatch(["pace", "flow", *flags])


def test_synthetic_setting_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "setting.html"
    setting = ["--setting", "CACO", "--qk-lr", ".3", "--ov-lr", ".3", "--seq-len", "128"]
    flags = [*setting, "--steps", "500", "--seeds", "2"]
    found = run_json(capsys, "pace", "synthetic", *flags, "--out", str(page))
    (row,) = found["rows"]
    assert row["name"] == "CACO 0.3/0.3"
    assert row["steps"] == [500, 500]
    assert sum(row["shares"]) == pytest.approx(100)
    assert len(row["shares"]) == 5
    assert 0 < row["mean_distinct_attention"] < 1
    assert row["loss"] < 4
    assert row["published"] is None
    assert found["seeds"] == [1234, 1235]
    assert "CACO 0.3" in page.read_text()


def test_sweep_in_processes_matches_one_process() -> None:
    from qkflow.papers.faster_qk.sweep import sweep
    from qkflow.papers.faster_qk.synthetic import synthetic_config

    settings = [synthetic_config(kind, 0.5, 0.5, 16, steps=250) for kind in ("CACO", "FACO")]
    progress: list[int] = []
    single = sweep(settings, [1, 2], workers=1, on_progress=progress.append)
    parallel = sweep(settings, [1, 2], workers=2, on_progress=progress.append)
    assert [(each.config.kind, each.seed) for each in parallel] == [
        (setting.kind, seed) for setting in settings for seed in (1, 2)
    ]
    assert [each.loss for each in parallel] == pytest.approx([each.loss for each in single], rel=1e-5)
    assert sum(progress) == 2 * 2 * 2 * 250


def test_synthetic_fixed_attention_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "pace", "synthetic", "--fixed-attention", "--steps", "250", "--seeds", "1")
    assert [(row["kind"], row["alpha"]) for row in found["rows"]][:2] == [
        ("collapsed", 0.2),
        ("collapsed", 0.4),
    ]
    assert found["rows"][4]["gain"] is None
    assert all(row["published"] is None for row in found["rows"])  # not the published number of steps


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--setting", "CACO", "--length", "128"], "renamed-flag"),
        (["--setting", "FOO"], "unknown-setting"),
        (["--qk-lr", "1"], "unused-option"),
        (["--fixed-attention", "--growth", "2"], "unused-option"),
        (["--seeds", "0"], "below-minimum"),
        (["--setting", "FACO", "--growth", "0"], "option-not-positive"),
    ],
)
def test_synthetic_invalid_options_raise(flags: list[str], code: str) -> None:
    with raises_code(code):
        main.dispatch(["pace", "synthetic", *flags])
