"""The report as a reader's browser gets it."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qkflow.report.figures import _mean_eval_curve, _perplexity_gap_curve
from qkflow.report.page import format_count, format_value
from qkflow.report.tables import terminal_table
from qkflow.studies import Comparison, rebuild_report


class Page(HTMLParser):
    """Tags, ids, what would be loaded, script bodies, and the text a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.text = ""
        self._script: str | None = None
        self._inside: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.ids.append(found.get("id") or "")
        self.loads += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action") and v]
        if tag in ("script", "style"):
            self._inside, self._script = tag, found.get("id")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[self._script] = data
        elif self._inside is None:
            self.text += data


@pytest.fixture(scope="module")
def answer(study: Path) -> Comparison:
    return rebuild_report(study)


@pytest.fixture(scope="module")
def page(answer: Comparison) -> Page:
    return Page((answer.folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def drawn(page: Page) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(page.scripts["figures"])
    return figures


def test_loads_nothing_and_forbids_itself_to(answer: Comparison, page: Page) -> None:
    assert page.loads == []
    html = (answer.folder / "report.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy\" content=\"default-src 'none'" in html
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "link" not in page.tags
    assert len(html) < 6_000_000


def test_says_the_verdicts_first_and_the_command_last(page: Page, answer: Comparison) -> None:
    text = re.sub(r"\s+", " ", page.text)
    sections = [
        "Paired differences",
        "Over training",
        "Inside the attention",
        "All numbers",
        "How this was judged",
    ]
    order = [answer.summary["headline"], *answer.verdicts.values(), *sections, answer.summary["command"]]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "The reference is the standard model from its best start, gpt2" in text
    assert "1a2b3c4" in text


def test_has_each_figure_and_its_place(page: Page, drawn: dict[str, Any]) -> None:
    expected = ["differences", "same-start", "gap", "loss-tokens", "loss-seconds"]
    expected += [
        f"probe-{n}" for n in ("step_size", "attention_entropy", "sink_mass", "spectral_gap", "max_logit")
    ]
    assert list(drawn) == expected
    assert all(page.ids.count(name) == 1 for name in expected)
    assert all(figure["data"] for figure in drawn.values())


def test_the_differences_drawn_are_those_of_the_summary(drawn: dict[str, Any], answer: Comparison) -> None:
    bars = [trace for trace in drawn["differences"]["data"] if "error_x" in trace]
    rows = list(reversed(answer.summary["variants"]))
    assert drawn["differences"]["layout"]["yaxis"]["ticktext"] == [row["variant"] for row in rows]
    for bar, row in zip(bars, rows, strict=True):
        size = row["difference"]["percent"]
        assert bar["x"] == [size["mean"]]
        assert bar["x"][0] + bar["error_x"]["array"][0] == pytest.approx(size["high"])
        assert bar["x"][0] - bar["error_x"]["arrayminus"][0] == pytest.approx(size["low"])
    assert "symmetric · fan_in" in drawn["same-start"]["layout"]["yaxis"]["ticktext"]


def test_a_variant_has_one_colour_in_all_figures(drawn: dict[str, Any]) -> None:
    colours: dict[str, set[str]] = {}
    for figure in drawn.values():
        for trace in figure["data"]:
            name = re.match(
                r"(standard|euler|leapfrog:n=7|symmetric|uncoupled)\b", trace.get("hovertemplate", "")
            )
            if name:
                marker = trace.get("line") or trace["marker"]
                colours.setdefault(name[1], set()).add(marker["color"])
    assert len(colours) == 5
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 5


def test_curves_show_best_starts_and_keep_the_others_hidden(
    drawn: dict[str, Any], answer: Comparison
) -> None:
    lines = [trace for trace in drawn["loss-tokens"]["data"] if "name" in trace]
    shown = [trace["name"] for trace in lines if trace["visible"]]
    assert shown == ["standard from gpt2", "euler from gpt2", "leapfrog:n=7 from gpt2",
                     "symmetric from fan_in+symmetric=1", "uncoupled from gpt2"]  # fmt: skip
    assert len(lines) == 10
    assert lines[0]["y"][-1] == pytest.approx(answer.summary["reference"]["loss"], rel=1e-5)
    gap = next(trace for trace in drawn["gap"]["data"] if trace.get("name") == "symmetric")
    seeds = zip(
        answer.summary["variants"][2]["loss_by_seed"],
        answer.summary["reference"]["loss_by_seed"],
        strict=True,
    )
    mean = sum(100 * math.expm1(a - b) for a, b in seeds) / 3
    assert gap["y"][-1] == pytest.approx(mean, rel=1e-4)


def test_a_gap_is_read_at_equal_tokens_even_where_evaluations_do_not_meet() -> None:
    theirs = [(0.0, 0.0, 0.0, 8.0), (10.0, 100.0, 1.0, 6.0), (20.0, 200.0, 2.0, 5.0)]
    ours = [(0.0, 0.0, 0.0, 8.0), (15.0, 150.0, 1.0, 5.4), (30.0, 300.0, 2.0, 4.0)]
    gap = _perplexity_gap_curve(ours, theirs)
    assert gap[0.0] == (0.0, 0.0)
    assert gap[15.0] == (150.0, pytest.approx(100 * math.expm1(5.4 - 5.5)))
    assert 30.0 not in gap  # the reference has not trained that far


def test_a_run_just_begun_does_not_cut_the_curves_of_the_others(answer: Comparison) -> None:
    whole = next(run for run in answer.runs if run.status == "finished")
    begun = replace(whole, seed=9, result=None, metrics={"eval": whole.metrics["eval"][:1]})
    assert _mean_eval_curve([whole, begun], "tokens") == _mean_eval_curve([whole], "tokens")
    assert len(_mean_eval_curve([begun], "tokens")) == 1


def test_probes_show_the_mean_and_offer_the_layers(page: Page, drawn: dict[str, Any]) -> None:
    steps = drawn["probe-step_size"]["data"]
    assert {trace["meta"]["layer"] for trace in steps} == {"mean", "0", "1", "2", "3"}
    assert all(trace["visible"] == (trace["meta"]["layer"] == "mean") for trace in steps)
    assert not any(trace["hovertemplate"].startswith("standard") for trace in steps)  # it has no step size
    assert {trace["meta"]["layer"] for trace in drawn["probe-max_logit"]["data"]} == {"mean"}
    assert "layer" in page.ids


def test_text_of_users_stays_text(hostile_study: Path) -> None:
    answer = rebuild_report(hostile_study)
    html = (hostile_study / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert page.loads == []
    assert answer.summary["config"]["data"] in page.text
    assert "loss is <nan> & gone" in page.text
    assert "alert(1)" not in "".join(body for name, body in page.scripts.items() if name != "figures")
    assert answer.summary["variants"][0]["verdict"] == "no verdict"


def test_numbers_as_people_write_them() -> None:
    assert [format_count(v) for v in (None, 12, 201_000, 1_049_728, 1.6e12)] == [
        "–",
        "12",
        "201k",
        "1.05M",
        "1.6T",
    ]
    assert format_value([True, 0.5, "a", None]) == "yes, 0.5, a, –"
    assert format_value([]) == "none"
    assert format_value({"mlp": 3}) == "mlp: 3"


def test_a_study_hardly_begun_still_has_a_page(study: Path, tmp_path: Path) -> None:
    shutil.copy(study / "study.yaml", tmp_path / "study.yaml")
    answer = rebuild_report(tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert json.loads(page.scripts["figures"]) == {}
    assert "not complete: 30 of 30 runs have not finished" in page.text
    assert answer.summary["reference"] is None


@pytest.mark.parametrize("loss", [650.0, 900.0])  # of the one exp is a long number, of the other none
def test_a_loss_beyond_all_perplexities_still_has_a_page(study: Path, tmp_path: Path, loss: float) -> None:
    wrong = shutil.copytree(study, tmp_path / "study")
    for seed, run in enumerate(sorted((wrong / "runs").glob("euler-*"))):
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "loss": loss + seed, "perplexity": None}))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [{**row, "loss": loss + seed} if row["kind"] == "eval" else row for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = rebuild_report(wrong)
    euler = answer.summary["variants"][0]
    assert (euler["perplexity"] is None) == (loss > 700)
    size = "immeasurably" if loss > 700 else "e\\+2\\d\\d%"
    assert re.search(f"euler hurts: its perplexity is .*{size} higher than", euler["sentence"])
    assert max(map(len, answer.summary["headline"].split())) < 20
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(answer.summary))
    assert all(len(line) <= 80 for line in text.getvalue().splitlines())
    page = Page((wrong / "report.html").read_text(encoding="utf-8"))
    assert {"differences", "same-start", "gap"} <= json.loads(page.scripts["figures"]).keys()


@pytest.mark.skipif(not shutil.which("chromium"), reason="no browser here")
def test_a_browser_draws_every_figure(answer: Comparison, drawn: dict[str, Any], tmp_path: Path) -> None:
    quiet = ("gpu", "background-networking", "component-update", "sync")
    options = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    options += [
        "--virtual-time-budget=20000",
        f"--user-data-dir={tmp_path}",
        "--dump-dom",
        "--enable-logging=stderr",
    ]
    address = (answer.folder / "report.html").resolve().as_uri()
    done = subprocess.run(["chromium", *options, address], capture_output=True, text=True, timeout=120)
    assert f'data-drawn="{len(drawn)}"' in done.stdout
    assert done.stdout.count('<svg class="main-svg"') >= len(drawn)
    assert "CONSOLE" not in done.stderr  # neither errors nor warnings
