"""report.html: one self-contained page that works offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkflow.html import json_for_script
from qkflow.report import difference_figures, figures
from qkflow.report.finetune import task_tables
from qkflow.report.tables import format_difference, format_number, format_percent
from qkflow.studies.design import Verdict
from qkflow.studies.results import StudySummary
from qkflow.studies.sentences import power_sentence

if TYPE_CHECKING:
    from jinja2 import Template

    from qkflow.studies.run_data import RunData

_BADGES = {
    Verdict.HELPS: "▼",
    Verdict.HURTS: "▲",
    Verdict.EQUIVALENT: "≈",
    Verdict.UNDECIDED: "…",
    Verdict.NO_VERDICT: "?",
    Verdict.REFERENCE: "=",
}


def render_report(summary: StudySummary, runs: Sequence[RunData]) -> str:
    """Return the whole page. The template engine escapes all text that users may have written."""
    from plotly.offline import get_plotlyjs

    figures_by_name = _build_figures(summary, runs)
    probes = [name for name in figures_by_name if name.startswith("probe-")]
    return load_template("report.html").render(
        summary=summary,
        config=summary.config,
        badges=_BADGES,
        power_sentence=power_sentence(summary.power) if summary.power else "",
        styles=figures.variant_styles(summary),
        figures=figures_by_name,
        probes={name: figures.probe_title(name.removeprefix("probe-")) for name in probes},
        layers=_probe_layers([figures_by_name[name] for name in probes]),
        task_tables=task_tables(summary.finetune),
        figures_json=json_for_script(figures_by_name),
        plotly_js=get_plotlyjs(),
    )


def load_template(name: str) -> Template:
    """Return one of the pages in `templates`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("qkflow.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": format_number,
        "difference": format_difference,
        "percent": format_percent,
        "count": format_count,
        "bytes": format_bytes,
        "plain": format_value,
    }
    return environment.get_template(name)


def _build_figures(summary: StudySummary, runs: Sequence[RunData]) -> dict[str, figures.Figure]:
    figures_by_name = {
        "differences": difference_figures.differences_figure(summary),
        "same-init": difference_figures.same_init_figure(summary),
        "gap": figures.perplexity_gap_figure(summary, runs) if summary.metric == "perplexity" else None,
        "loss-tokens": figures.loss_curve_figure(summary, runs, "tokens"),
        "loss-seconds": figures.loss_curve_figure(summary, runs, "seconds"),
        "learning-rates": difference_figures.learning_rate_figure(summary),
        **{f"probe-{name}": figure for name, figure in figures.probe_figures(summary, runs).items()},
    }
    return {name: figure for name, figure in figures_by_name.items() if figure is not None}


def _probe_layers(probe_figures: Sequence[figures.Figure]) -> list[str]:
    """Return the layers that the reader can select in the probe figures."""
    layers = {trace["meta"]["layer"] for figure in probe_figures for trace in figure["data"]}
    return sorted(layers - {"mean"}, key=int)


def format_count(value: float | None) -> str:
    """Format 1234567 as 1.23M."""
    if value is None:
        return "–"
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def format_bytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f} MiB"


def format_value(value: Any) -> str:
    """Format an option or a property of the environment."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {format_value(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None else f"{value}"
