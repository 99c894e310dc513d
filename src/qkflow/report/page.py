"""report.html: one self-contained page that opens offline and asks nothing of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkflow.html import json_for_script
from qkflow.report import figures
from qkflow.report.tables import all_rows, format_difference, format_number

if TYPE_CHECKING:
    from jinja2 import Template

    from qkflow.studies.analysis import RunData

_BADGES = {
    "helps": ("▼", "helps"),
    "hurts": ("▲", "hurts"),
    "no evidence": ("≈", "no evidence"),
    "no verdict": ("?", "no verdict"),
    "reference": ("=", "reference"),
}


def render_report(summary: dict[str, Any], runs: Sequence[RunData]) -> str:
    """The whole page as text. Everything users may have written is escaped by the template engine."""
    from plotly.offline import get_plotlyjs

    drawn = _build_figures(summary, runs)
    return load_template("report.html").render(
        summary=summary,
        config=summary["config"],
        rows=all_rows(summary),
        badges=_BADGES,
        styles=figures.variant_styles(summary),
        figures=drawn,
        probes={
            name: figures.probe_title(name.removeprefix("probe-"))
            for name in drawn
            if name.startswith("probe-")
        },
        layers=_probe_layers(drawn),
        figures_json=json_for_script(drawn),
        plotly_js=get_plotlyjs(),
    )


def load_template(name: str) -> Template:
    """One of the pages in `templates`, ready to be filled in."""
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
        "interval": format_difference,
        "count": format_count,
        "bytes": format_bytes,
        "plain": format_value,
    }
    return environment.get_template(name)


def _build_figures(summary: dict[str, Any], runs: Sequence[RunData]) -> dict[str, figures.Figure]:
    drawn = {
        "differences": figures.differences_figure(summary),
        "same-start": figures.same_init_figure(summary),
        "gap": figures.perplexity_gap_figure(summary, runs),
        "loss-tokens": figures.loss_curve_figure(summary, runs, "tokens"),
        "loss-seconds": figures.loss_curve_figure(summary, runs, "seconds"),
        **{f"probe-{name}": figure for name, figure in figures.probe_figures(summary, runs).items()},
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _probe_layers(figures_by_name: dict[str, figures.Figure]) -> list[str]:
    """The layers a reader can choose among in the probes."""
    found = {
        t["meta"]["layer"]
        for name, f in figures_by_name.items()
        if name.startswith("probe-")
        for t in f["data"]
    }
    return sorted(found - {"mean"}, key=int)


def format_count(value: float | None) -> str:
    """1234567 as 1.23M."""
    if value is None:
        return "–"
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def format_bytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f} MiB"


def format_value(value: Any) -> str:
    """A setting or a fact about the machine as one would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {format_value(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None else f"{value}"
