"""The pace commands as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkflow.cli import main
from qkflow.errors import InputError


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
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


def test_flow_table_shows_the_published_values(capsys: pytest.CaptureFixture[str]) -> None:
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
        main.dispatch(["pace", "flow", *flags])


def test_synthetic_cell_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "cell.html"
    cell = ["--setting", "CACO", "--qk-lr", ".3", "--ov-lr", ".3", "--seq-len", "128"]
    flags = [*cell, "--steps", "500", "--seeds", "2"]
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


def test_sweep_over_processes_equals_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    from qkflow.papers.faster_qk.sweep import sweep
    from qkflow.papers.faster_qk.synthetic import synthetic_config

    settings = [synthetic_config(kind, 0.5, 0.5, 16, steps=250) for kind in ("CACO", "FACO")]
    heard: list[int] = []
    alone = sweep(settings, [1, 2], workers=1, on_progress=heard.append)
    apart = sweep(settings, [1, 2], workers=2, on_progress=heard.append)
    assert [(each.config.kind, each.seed) for each in apart] == [
        (setting.kind, seed) for setting in settings for seed in (1, 2)
    ]
    assert [each.loss for each in apart] == pytest.approx([each.loss for each in alone], rel=1e-5)
    assert sum(heard) == 2 * 2 * 2 * 250


def test_synthetic_fixed_attention_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "pace", "synthetic", "--fixed-attention", "--steps", "250", "--seeds", "1")
    assert [(row["kind"], row["alpha"]) for row in found["rows"]][:2] == [
        ("collapsed", 0.2),
        ("collapsed", 0.4),
    ]
    assert found["rows"][4]["gain"] is None
    assert all(row["published"] is None for row in found["rows"])  # not the published recipe


def test_a_cell_of_the_figure_is_the_figures_own() -> None:
    from qkflow.papers.faster_qk.synthetic import FIGURE_CONFIGS, synthetic_config

    assert synthetic_config("CACO", 0.05, 0.01, 128) is FIGURE_CONFIGS[4]
    assert synthetic_config("CACO", 0.05, 0.01, 128, steps=10).published is None
    assert synthetic_config("CACO", 0.05, 0.01, 64).published is None
    assert synthetic_config("FAFO", growth=40).steps == 200_000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--setting", "FOO"], "unknown setting"),
        (["--qk-lr", "1"], "--qk-lr needs --setting"),
        (["--fixed-attention", "--growth", "2"], "--growth has no meaning with --fixed-attention"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--setting", "FACO", "--growth", "0"], "growth must be positive"),
    ],
)
def test_synthetic_refuses_bad_input(flags: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        main.dispatch(["pace", "synthetic", *flags])
