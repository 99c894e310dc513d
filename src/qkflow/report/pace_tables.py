"""Tables of a pace study: for the terminal, and flat for CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkflow.report.tables import format_number, to_csv

if TYPE_CHECKING:
    from rich.table import Table

    from qkflow.studies.pace.results import PaceSummary, RatioSummary
    from qkflow.studies.stats import PairedDifference

COLUMN_HEADINGS = {
    "performance": "test",
    "mass": "mass",
    "confidence": "AC",
    "comprehensiveness": "compr.",
    "sufficiency": "suff.",
    "qk_scale": "‖QK‖",
    "ov_scale": "‖OV‖",
}
CSV_COLUMNS = ("ratio", "measure", "mean", "difference", "low", "high", "p", "p_holm", "verdict", "seeds")
PUBLISHED_TITLES = ("published, same rate", "published, faster")
_VERDICT_ARROWS = {"raises": "↑", "lowers": "↓"}


def ratio_cells(row: RatioSummary) -> list[str]:
    """Return the mean of each column, with an arrow if it differs significantly from the baseline."""
    cells = []
    for name in COLUMN_HEADINGS:
        entry = row.measures.get(name)
        arrow = _VERDICT_ARROWS.get(entry.verdict or "", "") if entry else ""
        cells.append(format_number(entry.mean if entry else None) + arrow)
    return cells


def published_rows(summary: PaceSummary) -> list[tuple[str, list[str]]]:
    """Return title and cells of the published baseline and the published faster setting."""
    if summary.published is None:
        return []
    results = [summary.published.get(name, (None, None)) for name in COLUMN_HEADINGS]
    return [
        (title, [format_number(values[index]) for values in results])
        for index, title in enumerate(PUBLISHED_TITLES)
    ]


def attribution_cells(row: RatioSummary) -> list[str]:
    """Return the mean comprehensiveness (AOPC) of each attribution method."""
    return [format_number(measures["comprehensiveness"]) for measures in row.deletions.values()]


def attribution_methods(summary: PaceSummary) -> list[str]:
    return next((list(row.deletions) for row in summary.rows if row.deletions), [])


def format_interval(difference: PairedDifference) -> str:
    interval = "" if difference.low is None else f" ({difference.low:+.3f}…{difference.high:+.3f})"
    return f"{difference.mean:+.3f}{interval}".replace("-", "−")


def results_table(summary: PaceSummary) -> Table:
    from rich import box
    from rich.table import Table

    caption = (
        "means over seeds; ↑ ↓ differs from the baseline after Holm; mass: attention on the rationale; AC: "
        f"share of examples with mass above {summary.recipe.threshold:g}; compr., suff.: of the top "
        f"{summary.recipe.ks[0]:g}% tokens by rollout; published: Vashisht & Ramaswamy 2026"
    )
    table = Table(title=_title(summary), caption=caption, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("r")
    for heading in COLUMN_HEADINGS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summary.rows:
        table.add_row(row.ratio, *ratio_cells(row))
    for title, cells in published_rows(summary):
        table.add_row(title, *cells, style="dim")
    return table


def _title(summary: PaceSummary) -> str:
    config, facts = summary.config, summary.facts
    majority = "" if facts.majority is None else f", most frequent class {facts.majority:.3f}"
    setting = "as published" if config.as_published else "single knob"
    return f"{config.task}, {setting}: {facts.train} examples, {facts.steps} steps{majority}"


def attribution_table(summary: PaceSummary) -> Table:
    """Build the table of comprehensiveness by attribution method, with attention against random."""
    from rich import box
    from rich.table import Table

    level = f"{100 * summary.config.confidence:.3g}%"
    caption = f"mean comprehensiveness over k; last: attention minus random with its {level} interval"
    table = Table(title="Does attention explain anything?", caption=caption, box=box.SIMPLE)
    table.add_column("r")
    for name in (*attribution_methods(summary), "attention − random"):
        table.add_column(name, justify="right", no_wrap=True)
    contrasts = {each.ratio: each.differences["attention_random"] for each in summary.explains}
    for row in summary.rows:
        if row.deletions:
            table.add_row(row.ratio, *attribution_cells(row), format_interval(contrasts[row.ratio]))
    return table


def summary_csv(summary: PaceSummary) -> str:
    """Return one line per ratio and measure."""
    rows = []
    for row in summary.rows:
        for name, entry in row.measures.items():
            cells = {"ratio": row.ratio, "measure": name, "mean": entry.mean, "seeds": len(row.seeds)}
            if (difference := entry.difference) is not None:
                cells |= {"difference": difference.mean, "low": difference.low, "high": difference.high}
                cells |= {"p": difference.p, "p_holm": difference.p_holm, "verdict": entry.verdict}
            rows.append(cells)
    return to_csv(rows, CSV_COLUMNS)
