"""report.html as a browser receives it."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qkflow.report import write_outputs
from qkflow.report.document import format_count, format_value
from qkflow.report.figures import _mean_eval_curve, _perplexity_gap_curve, probe_figures
from qkflow.report.layer_figures import layer_heatmaps
from qkflow.report.tables import terminal_table
from qkflow.studies import Comparison, load_comparison


class Page(HTMLParser):
    """Tags, ids, loaded resources, scripts and visible text of a page."""

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
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids.append(attributes.get("id") or "")
        self.loads += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action") and v]
        if tag in ("script", "style"):
            self._inside, self._script = tag, attributes.get("id")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[self._script] = data
        elif self._inside is None:
            self.text += data


def read_figures(page: Page) -> dict[str, Any]:
    """Unpack the figures of a page as its script does."""
    figures: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(page.scripts["figures-deflated"])))
    return figures


def write_report(study: Path) -> Comparison:
    comparison = load_comparison(study)
    write_outputs(comparison)
    return comparison


@pytest.fixture(scope="module")
def comparison(study: Path) -> Comparison:
    return write_report(study)


@pytest.fixture(scope="module")
def page(comparison: Comparison) -> Page:
    return Page((comparison.folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def figures(page: Page) -> dict[str, Any]:
    return read_figures(page)


def test_page_loads_nothing(comparison: Comparison, page: Page) -> None:
    assert page.loads == []
    html = (comparison.folder / "report.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy\" content=\"default-src 'none'" in html
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "link" not in page.tags
    assert "unsafe-eval" not in html.split("</head>")[0]
    assert "script-src 'sha256-" in html
    assert len(html) < 2_500_000


def test_sections_are_in_order(page: Page, comparison: Comparison) -> None:
    text = re.sub(r"\s+", " ", page.text)
    sections = [
        "Paired differences",
        "Over training",
        "Inside the attention",
        "All numbers",
        "How this was judged",
    ]
    order = [
        comparison.summary.headline,
        *comparison.verdicts.values(),
        *sections,
        comparison.summary.command,
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "The reference is the best baseline, standard with gpt2" in text
    assert "1a2b3c4" in text


def test_every_figure_has_an_element(page: Page, figures: dict[str, Any]) -> None:
    expected = ["power", "differences", "same-init", "gap", "loss-tokens", "loss-seconds"]
    expected += [
        f"probe-{name}"
        for name in (
            *("step_size", "attention_entropy", "sink_mass", "spectral_gap", "max_logit"),
            *("qk_scale", "ov_scale", "copy_gain", "effective_pace"),
        )
    ]
    expected += [f"layers-{name}" for name in ("qk_scale", "ov_scale", "effective_pace", "attention_entropy")]
    assert list(figures) == expected
    assert all(page.ids.count(name) == 1 for name in expected)
    assert all(figure["data"] for figure in figures.values())


def test_difference_figure_shows_the_summary(figures: dict[str, Any], comparison: Comparison) -> None:
    bars = [trace for trace in figures["differences"]["data"] if "error_x" in trace]
    arms = list(reversed(comparison.summary.variants))
    assert figures["differences"]["layout"]["yaxis"]["ticktext"] == [arm.variant for arm in arms]
    for bar, arm in zip(bars, arms, strict=True):
        assert arm.difference is not None
        size = arm.difference.percent
        assert bar["x"] == [size["mean"]]
        assert bar["x"][0] + bar["error_x"]["array"][0] == pytest.approx(size["high"])
        assert bar["x"][0] - bar["error_x"]["arrayminus"][0] == pytest.approx(size["low"])
    assert "symmetric · fan_in" in figures["same-init"]["layout"]["yaxis"]["ticktext"]


def test_variant_has_one_color_in_all_figures(figures: dict[str, Any]) -> None:
    colors: dict[str, set[str]] = {}
    for figure in figures.values():
        for trace in figure["data"]:
            name = re.match(
                r"(standard|euler|leapfrog:n=7|symmetric|uncoupled)\b", trace.get("hovertemplate", "")
            )
            if name and trace["type"] == "scatter":
                marker = trace.get("line") or trace["marker"]
                colors.setdefault(name[1], set()).add(marker["color"])
    assert len(colors) == 5
    assert all(len(used) == 1 for used in colors.values())
    assert len(set.union(*colors.values())) == 5


def test_loss_curves_hide_other_inits(figures: dict[str, Any], comparison: Comparison) -> None:
    lines = [trace for trace in figures["loss-tokens"]["data"] if "name" in trace]
    shown = [trace["name"] for trace in lines if trace["visible"]]
    assert shown == ["standard with gpt2", "euler with gpt2", "leapfrog:n=7 with gpt2",
                     "symmetric with fan_in+symmetric=1", "uncoupled with gpt2"]  # fmt: skip
    assert len(lines) == 10
    reference = comparison.summary.reference
    assert reference is not None
    assert lines[0]["y"][-1] == pytest.approx(reference.loss, rel=1e-5)
    gap = next(trace for trace in figures["gap"]["data"] if trace.get("name") == "symmetric")
    seeds = zip(comparison.summary.variants[2].loss_by_seed, reference.loss_by_seed, strict=True)
    mean = sum(100 * math.expm1(a - b) for a, b in seeds) / 3
    assert gap["y"][-1] == pytest.approx(mean, rel=1e-4)


def test_perplexity_gap_interpolates_at_equal_tokens() -> None:
    theirs = [(0.0, 0.0, 0.0, 8.0), (10.0, 100.0, 1.0, 6.0), (20.0, 200.0, 2.0, 5.0)]
    ours = [(0.0, 0.0, 0.0, 8.0), (15.0, 150.0, 1.0, 5.4), (30.0, 300.0, 2.0, 4.0)]
    gap = _perplexity_gap_curve(ours, theirs)
    assert gap[0.0] == (0.0, 0.0)
    assert gap[15.0] == (150.0, pytest.approx(100 * math.expm1(5.4 - 5.5)))
    assert 30.0 not in gap  # the reference has not trained that far


def test_unfinished_run_does_not_shorten_the_mean_curve(comparison: Comparison) -> None:
    whole = next(run for run in comparison.runs if run.status == "finished")
    unfinished = replace(whole, seed=9, result=None, metrics={"eval": whole.metrics["eval"][:1]})
    assert _mean_eval_curve([whole, unfinished], "tokens") == _mean_eval_curve([whole], "tokens")
    assert len(_mean_eval_curve([unfinished], "tokens")) == 1


def test_probe_figures_hide_single_layers(page: Page, figures: dict[str, Any]) -> None:
    steps = figures["probe-step_size"]["data"]
    assert {trace["meta"]["layer"] for trace in steps} == {"mean", "0", "1", "2", "3"}
    assert all(trace["visible"] == (trace["meta"]["layer"] == "mean") for trace in steps)
    assert not any(trace["hovertemplate"].startswith("standard") for trace in steps)  # it has no step size
    assert {trace["meta"]["layer"] for trace in figures["probe-copy_gain"]["data"]} == {"mean"}
    assert "layer" in page.ids


def test_single_probe_is_visible(comparison: Comparison) -> None:
    """The runs of a short study are probed once: a line of one point would draw nothing."""
    runs = [replace(run, metrics={"probe": run.metrics["probe"][-1:]}) for run in comparison.runs]
    figures = probe_figures(comparison.summary, runs) | layer_heatmaps(comparison.summary, runs)
    assert len(figures) > 3
    for figure in figures.values():
        assert {trace.get("mode", "markers") for trace in figure["data"]} == {"markers"}
        assert figure["layout"]["xaxis"]["tickvals"] == figure["data"][0]["x"]


def test_user_text_is_escaped(hostile_study: Path) -> None:
    comparison = write_report(hostile_study)
    html = (hostile_study / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert page.loads == []
    assert comparison.summary.config.data in page.text
    assert "loss is <nan> & gone" in page.text
    assert "alert(1)" not in "".join(page.scripts.values())
    assert comparison.summary.variants[0].verdict == "no verdict"


def test_value_formats() -> None:
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


def test_study_without_finished_runs_has_a_page(study: Path, tmp_path: Path) -> None:
    shutil.copy(study / "study.yaml", tmp_path / "study.yaml")
    comparison = write_report(tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert read_figures(page) == {}
    assert "not complete: 30 of 30 runs have not finished" in page.text
    assert comparison.summary.reference is None


@pytest.mark.parametrize("loss", [650.0, 900.0])  # exp overflows for the second
def test_overflowing_perplexity_has_a_page(study: Path, tmp_path: Path, loss: float) -> None:
    diverged = shutil.copytree(study, tmp_path / "study")
    for seed, run in enumerate(sorted((diverged / "runs").glob("euler-*"))):
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "loss": loss + seed, "perplexity": None}))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [{**row, "loss": loss + seed} if row["kind"] == "eval" else row for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = write_report(diverged)
    euler = comparison.summary.variants[0]
    assert (euler.perplexity is None) == (loss > 700)
    size = "immeasurably" if loss > 700 else "e\\+2\\d\\d%"
    assert re.search(f"euler hurts: its perplexity is .*{size} higher than", euler.sentence)
    assert max(map(len, comparison.summary.headline.split())) < 20
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(comparison.summary))
    assert all(len(line) <= 80 for line in text.getvalue().splitlines())
    page = Page((diverged / "report.html").read_text(encoding="utf-8"))
    assert {"differences", "same-init", "gap"} <= read_figures(page).keys()
