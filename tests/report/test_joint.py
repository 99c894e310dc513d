"""Several studies on one page, records as pages, and comparisons in notebooks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from made_study import HOSTILE
from qkflow.cli.main import dispatch
from qkflow.report import live_server
from qkflow.report.alternatives import figure_table
from qkflow.report.joint import joint_figure, joint_rows, render_studies, study_names
from qkflow.report.plotly_bundle import TRACES, drop_unused_modules, plotly_bundle, select_traces
from qkflow.studies import load_comparison, save_record


def test_joint_rows_keep_the_verdicts_of_every_study(study: Path, hostile_study: Path) -> None:
    both = [load_comparison(study), load_comparison(hostile_study)]
    rows = {row["variant"]: row["cells"] for row in joint_rows(both)}
    assert list(rows) == ["euler", "leapfrog:n=7", "symmetric", "uncoupled", "euler@gpt2"]
    assert [cell["verdict"] for cell in rows["symmetric"]] == ["helps", "helps"]
    assert [cell["verdict"] for cell in rows["euler"]] == ["undecided", "–"]
    for comparison, cell in zip(both, rows["symmetric"], strict=True):
        arm = next(arm for arm in comparison.summary.variants if arm.variant == "symmetric")
        assert arm.difference is not None
        assert cell["value"] == arm.difference.percent["mean"]
    figure = joint_figure(both, study_names(both))
    assert figure is not None
    assert len(figure["data"]) == 6  # four arms of one study, two of the other
    assert ["symmetric, study", "−10.4"] in [row[:2] for row in figure_table(figure).rows]


def test_studies_of_the_same_name_are_told_apart(study: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    record = tmp_path / "other" / "study.json"
    save_record(study, record)
    comparisons = [load_comparison(study), load_comparison(record)]
    assert study_names(comparisons) == [f"{study.parent.name}/study", "other/study"]
    with raises_code("duplicate-study"):
        study_names([comparisons[0], comparisons[0]])


def test_page_of_studies_is_escaped(study: Path, hostile_study: Path) -> None:
    page = render_studies([load_comparison(study), load_comparison(hostile_study)])
    assert HOSTILE not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert len(page) < 2_500_000


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code = dispatch([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_report_of_a_record_and_of_several(
    study: Path, hostile_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, page, joint = (tmp_path / name for name in ("study.json", "new/page.html", "joint.html"))
    assert run_json(capsys, "report", str(study), "--record", str(record))[0] == 0
    code, summary = run_json(capsys, "report", str(record), "--out", str(page))
    assert (code, summary["variants"][0]["variant"]) == (0, "euler")
    assert "Does it help on" in page.read_text()
    code, both = run_json(capsys, "report", str(study), str(hostile_study), "--out", str(joint))
    assert code == 1  # the second has failed runs
    assert list(both["studies"]) == ["study", "hostile"]
    assert "2 studies side by side" in joint.read_text()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["A", "B", "--table", "cells"], "several-studies"),
        (["A", "--out", "."], "out-is-a-folder"),
        ([], "missing-study"),
        (["A", "A"], "duplicate-study"),
    ],
)
def test_report_refuses(arguments: list[str], code: str, study: Path, hostile_study: Path) -> None:
    folders = {"A": str(study), "B": str(hostile_study)}
    with raises_code(code):
        dispatch(["report", *(folders.get(each, each) for each in arguments)])


def test_watch_refuses_what_is_not_a_study(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with raises_code("not-a-study"):
            dispatch(["watch", str(folder), "--no-browser"])


def test_notebook_shows_escaped_cards(study: Path, hostile_study: Path) -> None:
    comparison = load_comparison(study)
    html = comparison._repr_html_()
    assert html.count('class="card ') == 4
    assert all(sentence.split(":")[0] in html for sentence in comparison.verdicts.values())
    assert "http" not in html
    assert "<script" not in load_comparison(hostile_study)._repr_html_()
    assert repr(comparison).splitlines()[1:] == list(comparison.verdicts.values())


def test_bundle_keeps_the_traces_of_our_figures() -> None:
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs()
    selected = select_traces(script, TRACES)
    assert 100 < len(script) - len(selected) < 1000, "the list of traces is shorter, nothing else"
    assert select_traces(script, ("heatmap", "no such trace")) == script
    assert select_traces("another layout", TRACES) == "another layout"


def test_bundle_has_only_modules_that_are_used() -> None:
    script = (
        "start;x({});var used=W((e,m)=>{m.exports=two()});var one=W(e=>{e.x=1});var rest=1;es=Ea(()=>{es()});"
        "var two=W((e,m)=>{m.exports=2});var last=W(()=>{used()});end"
    )
    kept = drop_unused_modules(script)
    assert kept.count("var ") == 3
    assert "one=W" not in kept
    assert "es=Ea" not in kept
    assert drop_unused_modules(script.replace("used()", "used(es)")).count("var ") == 5
    assert drop_unused_modules("another layout") == "another layout"
    assert len(plotly_bundle().deflated) < 700_000


def test_live_server_that_fails_does_not_end_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with live_server.live_server(tmp_path) as process:
        assert process is not None
        process.wait(10)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with live_server.live_server(tmp_path) as process:
        assert process is None
    assert "cannot be started" in capsys.readouterr().err


def test_live_server_ends_with_the_study(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []

    def read_address(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        addresses.append(json.loads(process.stdout.readline())["url"])

    monkeypatch.setattr(live_server, "_announce", read_address)
    monkeypatch.setattr(live_server, "END_TIMEOUT", 300.0)
    with live_server.live_server(study, open_browser=False) as process:
        assert process is not None
        while not addresses:
            assert process.poll() is None
            time.sleep(0.1)
    assert addresses[0].startswith("http://127.0.0.1:")
    assert process.returncode == 0
