"""A record is judged as the folder it was written from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.cli.main import dispatch
from qkflow.report.study_tables import TABLES
from qkflow.studies import Comparison, compare, load_comparison, restore_record, save_record
from qkflow.studies.stability import SPIKE_NATS, measure_stability
from toy_study import SMALL_GRID, TOY


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("studies") / "whole"
    return compare("toy text", variants="standard,euler,broken@gpt2", out=folder, **SMALL_GRID, **TOY)


def test_record_gives_the_same_verdicts(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    save_record(comparison.folder, path)
    read = load_comparison(path)
    for before, after in zip(comparison.rows, read.rows, strict=True):
        assert before["verdict"] == after["verdict"]
        assert before["seeds"] == after["seeds"]
        for name in ("perplexity", "percent", "percent_low", "p_holm", "tokens_to_target"):
            assert after[name] == (None if before[name] is None else pytest.approx(before[name], rel=1e-2))
    assert read.summary.runs == comparison.summary.runs
    again = tmp_path / "again.json"
    save_record(path, again)
    assert again.read_bytes() == path.read_bytes()
    for rows in TABLES.values():
        assert [list(row.values())[:3] for row in rows(read)] == [
            list(row.values())[:3] for row in rows(comparison)
        ]


def test_restored_runs_are_not_repeated(comparison: Comparison, tmp_path: Path) -> None:
    path, folder = tmp_path / "record.json", tmp_path / "restored"
    save_record(comparison.folder, path)
    restore_record(path, folder)
    before = {p.parent.name: p.stat().st_mtime_ns for p in folder.glob("runs/*/result.json")}
    assert len(before) == sum(run.loss is not None for run in comparison.runs)
    read = load_comparison(folder)
    assert [row["verdict"] for row in read.rows] == [row["verdict"] for row in comparison.rows]
    again = tmp_path / "again.json"
    save_record(folder, again)
    finished = [run for run in json.loads(path.read_text())["runs"] if run.get("status") == "finished"]
    assert [run for run in json.loads(again.read_text())["runs"] if run.get("status")] == finished

    extended = compare(
        "toy text", variants="standard,euler,broken@gpt2,drift", out=folder, **SMALL_GRID, **TOY
    )
    assert "drift" in extended.verdicts
    for name, written in before.items():
        if (result := folder / "runs" / name / "result.json").exists():
            assert result.stat().st_mtime_ns == written
    restore_record(path, folder)  # a study that exists is left as it is
    assert load_comparison(folder).verdicts == extended.verdicts


def test_records_of_versions_without_these_keys(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    save_record(comparison.folder, path)
    record = json.loads(path.read_text())
    del record["config"]["optimizer"], record["config"]["accumulate"]
    path.write_text(json.dumps(record | {"config": record["config"] | {"lr": 0.003}}))
    summary = load_comparison(path).summary
    assert (summary.config.optimizer, summary.config.lr) == ("adamw", None)
    assert summary.command.endswith("--optimizer adamw")


def test_reuse_needs_a_folder(tmp_path: Path) -> None:
    with raises_code("reuse-needs-out"):
        dispatch(["compare", "--reuse", str(tmp_path / "record.json")])
    with raises_code("corrupt-record"):
        dispatch(["compare", "--reuse", str(tmp_path / "absent.json"), "--out", str(tmp_path / "study")])
    assert not (tmp_path / "study").exists()


def test_report_prints_tables_of_a_record(
    comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    assert dispatch(["report", str(comparison.folder), "--record", str(path), "--json"]) == 1  # a run failed
    capsys.readouterr()
    for name in ("verdicts", "cells", "dynamics"):
        assert dispatch(["report", str(path), "--table", name, "--markdown"]) == 0
        assert "euler" in capsys.readouterr().out
    with raises_code("no-finished-runs"):  # this study did not tune
        dispatch(["report", str(path), "--table", "rates"])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "corrupt-record"),
        ("[]", "not-a-record"),
        ('{"kind": "qkflow comparison"}', "corrupt-study"),
    ],
)
def test_damaged_record(text: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with raises_code(code):
        load_comparison(path)


def test_damaged_run_of_a_record(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    save_record(comparison.folder, path)
    values = json.loads(path.read_text())
    next(run for run in values["runs"] if run["phase"] == "compare")["curve"] = [[1, 2]]
    path.write_text(json.dumps(values))
    with raises_code("corrupt-record"):
        load_comparison(path)


def train_log(losses: list[float], peaks: dict[int, float]) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "loss": loss,
            "loss_max": peaks.get(step, loss),
            "grad_norm_max": 5.0 if step in peaks else 1.0,
        }
        for step, loss in enumerate(losses, start=1)
    ]


def test_stability_counts_spikes_after_warmup() -> None:
    losses = [8.0 - 0.1 * step for step in range(40)]
    smooth = measure_stability(train_log(losses, {}))
    assert smooth is not None
    assert (smooth.spikes, smooth.largest_spike, smooth.grad_norm_tail) == (0, 0.0, 1.0)
    spiky = measure_stability(train_log(losses, {2: 12.0, 20: losses[18] + SPIKE_NATS + 0.25}))
    assert spiky is not None
    assert spiky.spikes == 1  # the one of step 2 is in the warmup
    assert spiky.largest_spike == pytest.approx(SPIKE_NATS + 0.25)
    assert spiky.grad_norm_tail == pytest.approx(5.0)
    assert measure_stability([]) is None
