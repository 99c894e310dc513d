"""From the runs of a study to its answer: who was best started, paired differences, costs, verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qkflow.measures.language import perplexity
from qkflow.studies import verdicts
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.stats import (
    first_crossing,
    holm_correction,
    mean_curve,
    paired_difference,
    variance_ratio,
)

THROUGHPUT_QUANTILE = 0.9  # the quantile of a run's logged speeds that stands for its own


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it."""

    id: str
    phase: str
    cell: str
    seed: int
    lr: float
    tokens: int
    result: dict[str, Any] | None
    metrics: dict[str, list[dict[str, Any]]]
    last_log_line: str = ""

    @property
    def loss(self) -> float | None:
        """The final validation loss of a run that finished with a usable one."""
        if self.result is None or self.result.get("status") != "finished":
            return None
        return _finite_or_none(self.result.get("loss"))

    @property
    def status(self) -> str:
        if self.result is None:
            return "not finished"
        return "finished" if self.loss is not None else "failed"

    def throughput(self) -> float | None:
        """Tokens a second when nothing disturbed it: a run that was paused or shared its core is not slow."""
        rows = self.metrics.get("train", [])
        speeds = [speed for row in rows if (speed := _finite_or_none(row.get("tokens_per_second")))]
        return float(np.quantile(speeds, THROUGHPUT_QUANTILE)) if speeds else None

    def curve(self) -> list[tuple[float, float, float, float]]:
        """(step, tokens, seconds, loss) at every evaluation; seconds at the run's undisturbed speed."""
        speed = self.throughput()
        rows = []
        for row in self.metrics.get("eval", []):
            step, *values = (_finite_or_none(row.get(name)) for name in ("step", "tokens", "seconds", "loss"))
            tokens, seconds, loss = values
            if step is not None and tokens is not None and seconds is not None and loss is not None:
                rows.append((step, tokens, tokens / speed if speed else seconds, loss))
        return rows


def load_runs(study_dir: StudyDir, study: dict[str, Any]) -> list[RunData]:
    runs = []
    for row in study["runs"]:
        run = study_dir.run_dir(row["id"])
        metrics = run.metrics() if row["phase"] == "compare" else {}
        kept = {name: row[name] for name in ("id", "phase", "cell", "seed", "lr", "tokens")}
        runs.append(RunData(**kept, result=run.result(), metrics=metrics, last_log_line=run.last_log_line()))
    return runs


@dataclass
class CellData:
    """The finished runs of one cell, by seed."""

    name: str
    init: str
    same_init_baseline: str
    runs: dict[int, RunData] = field(default_factory=dict)

    def losses(self, seeds: Iterable[int]) -> list[float]:
        return [loss for seed in seeds if (loss := self.runs[seed].loss) is not None]

    def sort_key(self, seeds: Iterable[int] | None = None) -> tuple[int, float]:
        """To be minimised: a cell that lost seeds (diverged) never beats one that kept them all."""
        losses = self.losses(self.runs if seeds is None else [s for s in seeds if s in self.runs])
        return -len(losses), float(np.mean(losses)) if losses else math.inf


def model_throughputs(runs: Iterable[RunData]) -> dict[str, float]:
    """Tokens a second of each model, by its quickest run: start and seed decide what is learned, not what a
    step costs, so that the model of a cell is what its name says before the start."""
    speeds: dict[str, float] = {}
    for run in runs:
        model = run.cell.partition("@")[0]
        speeds[model] = max(speeds.get(model, 0.0), run.throughput() or 0.0)
    return {model: speed for model, speed in speeds.items() if speed}


def best_cell(cells: Sequence[CellData], seeds: Iterable[int] | None = None) -> CellData:
    """The best start: by mean final loss over the given seeds, or over all."""
    chosen = None if seeds is None else list(seeds)
    return min(cells, key=lambda cell: cell.sort_key(chosen))


def common_seeds(a: CellData, b: CellData) -> list[int]:
    return sorted(a.runs.keys() & b.runs.keys())


def analyze(study: dict[str, Any], runs: Sequence[RunData]) -> dict[str, Any]:
    """The summary of a study, as `summary.json` holds it."""
    confidence = study["config"]["confidence"]
    compared = [run for run in runs if run.phase == "compare"]
    arms = {one["name"]: _cell_data(one, compared) for one in study["arms"]}
    standard = study["arms"][0]["name"]
    best = {name: best_cell(cells) for name, cells in arms.items()}
    reference = best[standard] if best[standard].runs else None
    speeds = model_throughputs(compared)
    cells = {cell.name: cell for group in arms.values() for cell in group}
    rows = []
    for one in study["arms"]:
        name, is_reference = one["name"], one["role"] == "reference"
        row = _arm_row(one, arms[name], best[name], cells, confidence)
        row |= _compare_to_reference(best[name], None if is_reference else reference, speeds, confidence)
        choice = None if is_reference else _cross_fit_difference(arms[name], arms[standard], confidence)
        rows.append({**row, "choice_of_init": choice})
    _assign_verdicts(rows, best, study, confidence)
    environment = _merge_environments(compared)
    summary = {
        "config": study["config"],
        "command": study["command"],
        "reference": rows[0] if reference is not None else None,
        "variants": rows[1:],
        "runs": _count_runs(compared),
        "learning_rates": _lr_search_rows(runs),
        "environment": environment,
        "commit": environment.get("commit"),
    }
    summary["notes"] = _notes(summary)
    summary["headline"] = verdicts.headline(summary)
    return summary


def _cell_data(arm: dict[str, Any], runs: Sequence[RunData]) -> list[CellData]:
    cells = []
    for cell in arm["cells"]:
        finished = {run.seed: run for run in runs if run.cell == cell["name"] and run.loss is not None}
        cells.append(CellData(cell["name"], cell["init"], cell["same_init_baseline"], finished))
    return cells


def _arm_row(
    arm: dict[str, Any],
    cells: Sequence[CellData],
    best: CellData,
    cells_by_name: dict[str, CellData],
    confidence: float,
) -> dict[str, Any]:
    """What a contestant is and reached, whatever it is compared with."""
    finished = [best.runs[seed] for seed in sorted(best.runs)]
    results = [run.result or {} for run in finished]
    loss = _mean_finite([run.loss for run in finished])
    per_token = _mean_finite([result.get("flops_per_token") for result in results])
    tokens = _mean_finite([result.get("tokens") for result in results])
    return {
        "variant": arm["name"],
        "role": arm["role"],
        "best_init": best.init,
        "cell": best.name,
        "seeds": [run.seed for run in finished],
        "lr": finished[0].lr if finished else None,
        "loss": loss,
        "loss_by_seed": [run.loss for run in finished],
        "perplexity": None if loss is None else perplexity(loss),
        "bits_per_byte": _mean_finite([result.get("bits_per_byte") for result in results]),
        "tokens": tokens,
        "flops": None if per_token is None or tokens is None else per_token * tokens,
        "seconds": _mean_finite([result.get("seconds") for result in results]),
        "step_seconds": _mean_finite([result.get("step_seconds") for result in results]),
        "peak_memory_bytes": max((result.get("peak_memory_bytes") or 0 for result in results), default=0)
        or None,
        "parameters": results[0].get("parameters") if results else None,
        "by_init": [
            _init_row(cell, cells_by_name.get(cell.same_init_baseline), confidence) for cell in cells
        ],
    }


def _init_row(cell: CellData, same_init_baseline: CellData | None, confidence: float) -> dict[str, Any]:
    """One start: what was reached from it, and the paired difference to the plain model from there too."""
    loss = _mean_finite([run.loss for run in cell.runs.values()])
    difference = None
    if same_init_baseline is not None and same_init_baseline.name != cell.name:
        difference = _difference(cell, same_init_baseline, confidence)
    return {
        "init": cell.init,
        "cell": cell.name,
        "against": cell.same_init_baseline,
        "seeds": sorted(cell.runs),
        "lr": next((run.lr for run in cell.runs.values()), None),
        "loss": loss,
        "perplexity": None if loss is None else perplexity(loss),
        "same_init_difference": difference,
    }


def _difference(cell: CellData, reference: CellData, confidence: float) -> dict[str, Any] | None:
    seeds = common_seeds(cell, reference)
    if not seeds:
        return None
    return paired_difference(cell.losses(seeds), reference.losses(seeds), confidence).to_dict()


def _compare_to_reference(
    cell: CellData, reference: CellData | None, throughputs: dict[str, float], confidence: float
) -> dict[str, Any]:
    """Paired difference, variance, and what reaching the reference's final loss takes."""
    nothing = dict.fromkeys(
        ("difference", "seed_variance_ratio", "tokens_to_target", "seconds_to_target", "step_time_ratio")
    )
    seeds = [] if reference is None else common_seeds(cell, reference)
    if reference is None or not seeds:
        return nothing
    target = float(np.mean(reference.losses(seeds)))
    curve = mean_curve([cell.runs[seed].curve() for seed in seeds])
    whole = mean_curve([reference.runs[seed].curve() for seed in seeds])
    reached = first_crossing([row[1] for row in curve], [row[3] for row in curve], target)
    tokens = reached / whole[-1][1] if reached is not None and whole and whole[-1][1] > 0 else None
    ours, theirs = (throughputs.get(one.name.partition("@")[0]) for one in (cell, reference))
    ratio = theirs / ours if ours and theirs else None
    return {
        "difference": _difference(cell, reference, confidence),
        "seed_variance_ratio": variance_ratio(cell.losses(seeds), reference.losses(seeds), confidence),
        "tokens_to_target": tokens,
        "seconds_to_target": None if tokens is None or ratio is None else tokens * ratio,
        "step_time_ratio": ratio,
    }


def _cross_fit_difference(
    cells: Sequence[CellData], standard: Sequence[CellData], confidence: float
) -> dict[str, Any] | None:
    """The difference when each seed's starts are chosen by the *other* seeds alone.

    Judging a variant at its best start on the very seeds that chose the start flatters it a little. Choosing
    for each seed without looking at it does not; where the choice never changes, nothing was flattered.
    """
    everyone = [*cells, *standard]
    seeds = sorted(set.intersection(*(set(cell.runs) for cell in everyone))) if everyone else []
    if len(seeds) < 2:
        return None
    ours, theirs, chosen = [], [], set()
    for seed in seeds:
        others = [s for s in seeds if s != seed]
        pick, base = best_cell(cells, others), best_cell(standard, others)
        ours += pick.losses([seed])
        theirs += base.losses([seed])
        chosen.add((pick.name, base.name))
    difference = paired_difference(ours, theirs, confidence).to_dict()
    return {"stable": len(chosen) == 1, "difference": difference}


def _assign_verdicts(
    rows: list[dict[str, Any]], best_cells: dict[str, CellData], study: dict[str, Any], confidence: float
) -> None:
    """Correct over all rows but the first, the reference; then give each its verdict and sentence."""
    wanted, reference = study["config"]["verdict"], rows[0]["cell"]
    judged = [row for row in rows if row["cell"] != reference]
    _apply_holm([row["difference"] for row in judged])
    for row in rows:
        row["verdict"] = (
            verdicts.decide_verdict(row["difference"], confidence) if wanted else verdicts.NO_VERDICT
        )
        if row["cell"] == reference:
            row["verdict"] = verdicts.REFERENCE
        row["against_controls"] = {}
    for control in (row for row in rows if row["role"] == "control"):
        family = {}
        for row in rows[1:]:
            difference = _difference(best_cells[row["variant"]], best_cells[control["variant"]], confidence)
            if row is not control and difference is not None:
                family[row["variant"]] = row["against_controls"][control["variant"]] = difference
        _apply_holm(list(family.values()))
        for difference in family.values():
            difference["verdict"] = verdicts.decide_verdict(difference, confidence)
            difference["control_verdict"] = control["verdict"]
    compared = sum((row["difference"] or {}).get("p") is not None for row in judged)
    for row in rows:
        row["sentence"] = verdicts.verdict_sentence(row, compared, study["config"])


def _apply_holm(differences: Sequence[dict[str, Any] | None]) -> None:
    there = [difference for difference in differences if difference is not None]
    for difference, p in zip(there, holm_correction([difference["p"] for difference in there]), strict=True):
        difference["p_holm"] = p


def _count_runs(runs: Sequence[RunData]) -> dict[str, Any]:
    failed = [
        {
            "id": run.id,
            "cell": run.cell,
            "seed": run.seed,
            "error": str((run.result or {}).get("error") or run.last_log_line or "no usable loss"),
        }
        for run in runs
        if run.status == "failed"
    ]
    finished = sum(run.status == "finished" for run in runs)
    return {"planned": len(runs), "finished": finished, "failed": failed}


def _lr_search_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """What the learning-rate search saw, cell by cell."""
    found: dict[str, dict[float, float | None]] = {}
    for run in runs:
        if run.phase == "tune":
            found.setdefault(run.cell, {})[run.lr] = run.loss
    rows = []
    for cell, tried in found.items():
        chosen = best_lr(tried)
        edge = chosen is not None and len(tried) > 1 and chosen in (min(tried), max(tried))
        losses = [{"lr": lr, "loss": tried[lr]} for lr in sorted(tried)]
        rows.append({"cell": cell, "chosen": chosen, "at_edge": edge, "tried": losses})
    return rows


def best_lr(loss_by_lr: dict[float, float | None]) -> float | None:
    """The learning rate with the lowest loss; one that diverged is out."""
    usable = {lr: loss for lr, loss in loss_by_lr.items() if loss is not None}
    return min(usable, key=lambda lr: usable[lr]) if usable else None


def _merge_environments(runs: Sequence[RunData]) -> dict[str, Any]:
    """Where the runs were made: one value, or all of them where runs differ."""
    seen: dict[str, list[Any]] = {}
    for run in runs:
        for name, value in ((run.result or {}).get("environment") or {}).items():
            values = seen.setdefault(name, [])
            if value not in values:
                values.append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in seen.items()}


def _notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes, counts = [], summary["runs"]
    left = counts["planned"] - counts["finished"] - len(counts["failed"])
    if left:
        notes.append(f"This is not complete: {left} of {counts['planned']} runs have not finished.")
    errors: dict[str, list[str]] = {}
    for run in counts["failed"]:
        errors.setdefault(run["error"], []).append(f"{run['cell']} seed {run['seed']}")
    notes += [f"Failed: {', '.join(who)}: {error}" for error, who in errors.items()]
    moving = [r["variant"] for r in summary["variants"] if (r["choice_of_init"] or {}).get("stable") is False]
    if moving:
        notes.append(
            f"Which start is best depends on the seeds for {', '.join(moving)} or the reference; the "
            "difference with starts chosen on the other seeds (choice_of_init) is free of that choice."
        )
    edges = [row["cell"] for row in summary["learning_rates"] if row["at_edge"]]
    if edges:
        notes.append(f"The best learning rate lies at the edge of the grid for {', '.join(edges)}: widen it.")
    if isinstance(summary["environment"].get("commit"), list):
        notes.append("The runs were made by different commits of the code.")
    pairs = [row["difference"]["pairs"] for row in summary["variants"] if row["difference"]]
    if pairs and min(pairs) < 6:
        notes.append(
            f"With {min(pairs)} seeds the t-interval assumes that differences are about normal, and the "
            "bootstrap has little to resample: it tends to be too narrow."
        )
    return notes


def _mean_finite(values: Iterable[float | None]) -> float | None:
    there = [number for value in values if (number := _finite_or_none(value)) is not None]
    return float(np.mean(there)) if there else None


def _finite_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
