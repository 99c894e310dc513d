from __future__ import annotations

import json
from pathlib import Path

from qkflow.studies.runner.study_dir import RunDir


def test_metrics_keep_the_later_row_and_skip_incomplete_lines(tmp_path: Path) -> None:
    rows = [{"kind": "eval", "step": s, "loss": loss} for s, loss in ((0, 9.0), (5, 5.0), (5, 4.0))]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "eval", "st'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [row["loss"] for row in RunDir(tmp_path).metrics()["eval"]] == [9.0, 4.0]


def test_failed_run_is_cleared_and_finished_run_is_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_failure("loss is NaN")
    assert run_dir.result() == {"status": "failed", "error": "loss is NaN"}
    run_dir.clear_failure()
    assert run_dir.result() is None
    (tmp_path / "result.json").write_text('{"status": "finished"}')
    run_dir.clear_failure()
    assert run_dir.is_finished


def test_last_log_line(tmp_path: Path) -> None:
    assert RunDir(tmp_path).last_log_line() == ""
    (tmp_path / "log.txt").write_text("first\nlast\n\n")
    assert RunDir(tmp_path).last_log_line() == "last"
