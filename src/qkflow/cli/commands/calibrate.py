"""`qkflow calibrate`: how often the verdicts of a comparison are wrong, by simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from qkflow import console
from qkflow.config_io import Percentage, Range
from qkflow.errors import InputError
from qkflow.plain_data import read_json
from qkflow.studies.calibration import (
    NULL_SCENARIOS,
    SEED_COUNTS,
    CalibrationRow,
    DesignName,
    Saving,
    calibrate,
    effect_scenarios,
    noise_scenarios,
    runs_saved,
)
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT

SAVING_STEPS = 20  # rows that `runs_saved` simulates, at most


def calibrate_command(
    *,
    studies: Annotated[int, Range(100, 10**6)] = 10_000,
    seeds: tuple[str, ...] = (),
    margin: Percentage = 1.0,
    saved: Path | None = None,
    json: bool = False,
    markdown: bool = False,
) -> int:
    """Simulate whole comparisons and count false verdicts, found effects and runs.

    Studies without any effect are simulated in the situations that could mislead a judge: tied or close
    inits, correlated seeds, unequal variances, a large pool of baselines, heavy tails. A verdict of helps or
    hurts there is false; the share of studies with one must stay below 5%. Studies with an effect of 0.5 to
    5% of perplexity show the power. Each is run with a fixed number of seeds and adaptively
    (`qkflow compare --seeds auto`). The code that judges is the one that judges real studies.

    examples:
      qkflow calibrate
      qkflow calibrate --studies 2000 --seeds 5,20 --json

    Args:
        studies: simulated studies per row.
        seeds: seeds of the fixed designs, and most seeds of the adaptive ones (default: 3,5,10,20).
        margin: margin of equivalence in percent of perplexity.
        saved: print the result that an earlier `qkflow calibrate --json` wrote to this file.
        json: print one JSON object with `rows` and `saving` instead of tables.
        markdown: print a Markdown table.
    """
    if saved is not None:
        rows, saving = _load(saved)
        return _print(rows, saving, json, markdown)
    counts = _parse_seeds(seeds)
    rows, saving = _simulate(counts, studies, margin)
    return _print(rows, saving, json, markdown)


def _load(path: Path) -> tuple[list[CalibrationRow], dict[str, Any]]:
    try:
        values = read_json(path)
        rows = [CalibrationRow.from_dict(row) for row in values["rows"]]
        if not rows:
            raise ValueError
        return rows, Saving.from_dict(values["saving"]).to_dict()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"--saved {path} is not a result of `qkflow calibrate --json`", code="not-a-calibration"
        ) from None


def _parse_seeds(texts: tuple[str, ...]) -> tuple[int, ...]:
    items = [item for text in texts for item in text.split(",") if item.strip()]
    try:
        counts = tuple(sorted({int(item) for item in items})) or SEED_COUNTS
    except ValueError:
        raise InputError(
            f"--seeds must be integers, e.g. 3,5,20, got {','.join(items)}", code="invalid-seeds"
        ) from None
    if counts[0] < MIN_SEEDS_FOR_VERDICT or counts[-1] > 100:
        raise InputError(
            f"--seeds must be between {MIN_SEEDS_FOR_VERDICT} and 100, got {counts[0]} to {counts[-1]}",
            code="invalid-seeds",
        )
    return counts


def _simulate(
    counts: tuple[int, ...], studies: int, margin: float
) -> tuple[list[CalibrationRow], dict[str, float]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    scenarios = [*NULL_SCENARIOS, *effect_scenarios(), *noise_scenarios()]
    designs: list[tuple[DesignName, int]] = [("fixed", n) for n in counts]
    designs += [("adaptive", n) for n in counts if n > MIN_SEEDS_FOR_VERDICT]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    rows = []
    with Progress(*columns, console=console.err, transient=True) as progress:
        total = studies * (len(scenarios) * len(designs) + SAVING_STEPS)
        task = progress.add_task("simulating", total=total)

        def advance(count: int) -> None:
            progress.advance(task, count)

        for scenario in scenarios:
            progress.update(task, description=scenario.name)
            for design, seeds in designs:
                row = calibrate(scenario, seeds, design, studies=studies, margin=margin, on_progress=advance)
                rows.append(row)
        progress.update(task, description="runs saved by adaptive seeds")
        saving = runs_saved(max_seeds=counts[-1], studies=studies, on_progress=advance)
    return rows, saving.to_dict()


def _print(rows: list[CalibrationRow], saving: dict[str, Any], json: bool, markdown: bool) -> int:
    if json:
        console.emit_json({"rows": [row.to_dict() for row in rows], "saving": saving})
        return 0
    null = [row for row in rows if row.power is None]
    effects = [row for row in rows if row.power is not None]
    tables = {
        "false helps or hurts, share of studies": _pivot(null, lambda row: f"{row.false_verdicts:.2%}"),
        "effects found (mean number of runs)": _pivot(
            effects, lambda row: f"{row.power or 0:.0%} ({row.mean_runs:.0f})"
        ),
    }
    for title, lines in tables.items():
        _print_table(title, lines, markdown)
    for sentence in _sentences(rows, saving):
        print(sentence)
    return 0


def _pivot(rows: list[CalibrationRow], cell: Callable[[CalibrationRow], str]) -> list[list[str]]:
    """Return a header and one line per scenario, with one column per design."""
    designs = list(dict.fromkeys((row.design, row.seeds) for row in rows))
    by_scenario: dict[str, dict[tuple[str, int], str]] = {}
    for row in rows:
        by_scenario.setdefault(row.scenario, {})[row.design, row.seeds] = cell(row)
    header = ["scenario", *(f"{design} {seeds}" for design, seeds in designs)]
    return [header, *([name, *(cells.get(d, "–") for d in designs)] for name, cells in by_scenario.items())]


def _print_table(title: str, lines: list[list[str]], markdown: bool) -> None:
    header, *body = lines
    if markdown:
        rule = ["---"] * len(header)
        print(f"{title.capitalize()}:\n")
        print("\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *body)), end="\n\n")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name == "scenario" else "right")
    for line in body:
        table.add_row(*line)
    console.out.print(table)


def _sentences(rows: list[CalibrationRow], saving: dict[str, Any]) -> list[str]:
    worst = max(rows, key=lambda row: row.false_verdicts)
    return [
        f"False helps or hurts: at most {worst.false_verdicts:.2%} ± {2 * worst.standard_error:.2%} of "
        f"{worst.studies:,} studies ({worst.scenario}, {worst.design}, {worst.seeds} seeds).",
        f"Adaptive seeds at an effect of {saving['effect_percent']:g}% with unknown noise: "
        f"{saving['adaptive_runs']:.0f} runs on average. A fixed design with the same error rates needs "
        f"{saving['fixed_seeds']:.0f} seeds: {saving['full_grid_runs']:.0f} runs with every init "
        f"({saving['ratio']:.1f}×), {saving['fixed_runs']:.0f} with screened inits "
        f"({saving['ratio_screened']:.1f}×).",
    ]
