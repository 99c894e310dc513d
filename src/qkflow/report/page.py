"""report.html: one self-contained page of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkflow.html import cards
from qkflow.measures.language import perplexity
from qkflow.report import difference_figures, figures
from qkflow.report.document import render_content, render_document
from qkflow.report.finetune import task_tables
from qkflow.report.layer_figures import heatmap_variants, layer_heatmaps
from qkflow.studies.cards import verdict_cards
from qkflow.studies.design import Verdict
from qkflow.studies.results import StudySummary
from qkflow.studies.sentences import power_sentence, seeds_sentence

if TYPE_CHECKING:
    from qkflow.studies import Comparison
    from qkflow.studies.run_data import RunData

TEMPLATE = "report.html"


def render_report(comparison: Comparison) -> str:
    """Return the whole page of a comparison."""
    return render_document(TEMPLATE, **report_context(comparison))


def render_live_content(comparison: Comparison) -> tuple[str, dict[str, figures.Figure]]:
    """Return the content of the page and its figures, for a page that is already open."""
    context = report_context(comparison)
    return render_content(TEMPLATE, **context), context["figures"]


def report_context(comparison: Comparison) -> dict[str, Any]:
    """Return the variables of the template."""
    summary = comparison.summary
    figures_by_name = build_figures(summary, comparison.compared_runs)
    probes = [name for name in figures_by_name if name.startswith("probe-")]
    heatmaps = [name for name in figures_by_name if name.startswith("layers-")]
    styles = figures.variant_styles(summary)
    loss_curves = figures_by_name.get("loss-tokens", {"data": ()})["data"]
    return {
        "summary": summary,
        "config": summary.config,
        "cards": cards(verdict_cards(summary, {name: style["color"] for name, style in styles.items()})),
        "power_sentence": power_sentence(summary.power) if summary.power else "",
        "undecided": _undecided(summary),
        "styles": styles,
        "figures": figures_by_name,
        "other_inits": any(not trace["meta"]["best"] for trace in loss_curves),
        "probes": {name: figures.probe_title(name.removeprefix("probe-")) for name in probes},
        "layers": _probe_layers([figures_by_name[name] for name in probes]),
        "heatmaps": {name: figures.probe_title(name.removeprefix("layers-")) for name in heatmaps},
        "heatmap_variants": heatmap_variants([figures_by_name[name] for name in heatmaps]),
        "task_tables": task_tables(summary.finetune),
        "runs": [_run_row(run) for run in comparison.runs],
    }


def build_figures(summary: StudySummary, runs: Sequence[RunData]) -> dict[str, figures.Figure]:
    figures_by_name = {
        "power": difference_figures.power_figure(summary),
        "differences": difference_figures.differences_figure(summary),
        "same-init": difference_figures.same_init_figure(summary),
        "gap": figures.perplexity_gap_figure(summary, runs) if summary.metric == "perplexity" else None,
        "loss-tokens": figures.loss_curve_figure(summary, runs, "tokens"),
        "loss-seconds": figures.loss_curve_figure(summary, runs, "seconds"),
        "learning-rates": difference_figures.learning_rate_figure(summary),
        **{f"probe-{name}": figure for name, figure in figures.probe_figures(summary, runs).items()},
        **{f"layers-{name}": figure for name, figure in layer_heatmaps(summary, runs).items()},
    }
    return {name: figure for name, figure in figures_by_name.items() if figure is not None}


def _undecided(summary: StudySummary) -> list[tuple[str, str]]:
    """Return how many seeds would decide each undecided arm."""
    return [
        (arm.variant, seeds_sentence(arm, arm.difference))
        for arm in summary.variants
        if arm.verdict == Verdict.UNDECIDED and arm.difference
    ]


def _probe_layers(probe_figures: Sequence[figures.Figure]) -> list[str]:
    """Return the layers that the reader can select in the probe figures."""
    layers = {trace["meta"]["layer"] for figure in probe_figures for trace in figure["data"]}
    return sorted(layers - {"mean"}, key=int)


def _run_row(run: RunData) -> dict[str, Any]:
    result = run.result or {}
    return {
        **{name: getattr(run, name) for name in ("cell", "phase", "seed", "lr", "tokens", "status", "loss")},
        "perplexity": None if run.loss is None else perplexity(run.loss),
        "throughput": run.throughput(),
        "seconds": result.get("seconds"),
        "error": run.error if run.status == "failed" else "",
    }
