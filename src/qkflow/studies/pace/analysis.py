"""From a study's runs to its answer: means, paired differences, and what they allow one to say.

Runs of one seed share the start of every parameter and the order of every batch, so each ratio is judged by
its paired differences to r = 1 with the statistics of the lab; Holm's correction is over the ratios, for each
measure on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from qkflow.studies.pace.recipes import PUBLISHED_RESULTS, get_recipe
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT, holm_correction, paired_difference
from qkflow.studies.verdicts import format_p_value

Result = dict[str, Any]
BASELINE_RATIO = "1"


def _deletion_metric(name: str, method: str, k: str = "first") -> Callable[[Result], float]:
    def read(result: Result) -> float:
        by_k = result["faithfulness"][method][name]
        return float(next(iter(by_k.values())) if k == "first" else by_k[k])

    return read


def _aopc_metric(name: str, method: str) -> Callable[[Result], float]:
    return lambda result: float(result["faithfulness"][method][f"aopc_{name}"])


# name → (what it is called, how it is read from a result); the first ones are judged
MEASURES: dict[str, tuple[str, Callable[[Result], Any]]] = {
    "performance": ("test performance", lambda result: result["performance"]),
    "mass": ("attention on the rationale", lambda result: result["mass"]),
    "confidence": ("attention confidence (AC)", lambda result: result["confidence"]),
    "comprehensiveness": ("comprehensiveness (rollout)", _deletion_metric("comprehensiveness", "rollout")),
    "sufficiency": ("sufficiency (rollout)", _deletion_metric("sufficiency", "rollout")),
    "attention_over_random": (
        "comprehensiveness of attention over chance",
        lambda result: (
            _aopc_metric("comprehensiveness", "attention")(result)
            - _aopc_metric("comprehensiveness", "random")(result)
        ),
    ),
    "qk_scale": ("query-key scale ‖W_QK‖", lambda result: result["qk_scale"]),
    "ov_scale": ("output-value scale ‖W_OV‖", lambda result: result["ov_scale"]),
    "loss": ("test loss", lambda result: result["loss"]),
}
ATTRIBUTION_METHODS = ("attention", "rollout", "gradient", "random")


def analyse(study_dir: StudyDir, study: dict[str, Any]) -> dict[str, Any]:
    """`summary.json` as a dict."""
    question = study["config"]
    results = _results(study_dir, study)
    ratios = list(study["arms"])
    baseline = BASELINE_RATIO if BASELINE_RATIO in ratios else ratios[0]
    rows = [_row(ratio, results.get(ratio, {}), results.get(baseline, {}), baseline) for ratio in ratios]
    _apply_holm(rows, question["confidence"])
    for row in rows:
        row["sentences"] = _sentences(row, baseline, question["confidence"])
    failures = [
        {
            "ratio": run["cell"],
            "seed": run["seed"],
            "error": (study_dir.run_dir(run["id"]).result() or {}).get("error"),
        }
        for run in study["runs"]
        if (study_dir.run_dir(run["id"]).result() or {}).get("status") == "failed"
    ]
    published = PUBLISHED_RESULTS.get(question["task"])
    summary = {
        "config": question,
        "command": study["command"],
        "recipe": study["recipe"],
        "facts": study["facts"],
        "baseline": baseline,
        "rows": rows,
        "explains": [
            _attribution_contrasts(ratio, results.get(ratio, {})) for ratio in ratios if results.get(ratio)
        ],
        "published": {name: list(values) for name, values in published.items()} if published else None,
        "runs": {
            "planned": len(study["runs"]),
            "finished": sum(len(by_seed) for by_seed in results.values()),
            "failures": failures,
        },
        "curves": _curves(study_dir, study),
        "environment": _environment(results),
    }
    return summary | {"headline": headline(summary), "notes": _notes(summary)}


def _results(study_dir: StudyDir, study: dict[str, Any]) -> dict[str, dict[int, Result]]:
    """Finished results by ratio and seed."""
    found: dict[str, dict[int, Result]] = {}
    for run in study["runs"]:
        result = study_dir.run_dir(run["id"]).result()
        if result and result.get("status") == "finished":
            found.setdefault(run["cell"].removeprefix("r="), {})[run["seed"]] = result
    return found


def _row(
    ratio: str, results: dict[int, Result], baseline_results: dict[int, Result], baseline: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"ratio": ratio, "seeds": sorted(results), "measures": {}, "heatmap": None}
    for name, (_, read) in MEASURES.items():
        values = {seed: read(result) for seed, result in results.items()}
        values = {seed: value for seed, value in sorted(values.items()) if value is not None}
        if not values:
            continue
        entry: dict[str, Any] = {"mean": fmean(values.values()), "by_seed": list(values.values())}
        pairs = [seed for seed in values if seed in baseline_results]
        if ratio != baseline and pairs:
            theirs = [read(baseline_results[seed]) for seed in pairs]
            entry["difference"] = asdict(paired_difference([values[seed] for seed in pairs], theirs))
        row["measures"][name] = entry
    maps = [result["heatmap"] for result in results.values() if result["heatmap"]]
    if maps:
        row["heatmap"] = np.mean(maps, axis=0).tolist()
    row["deletions"] = _mean_aopc(results)
    row["seconds"] = fmean(result["seconds"] for result in results.values()) if results else None
    return row


def _mean_aopc(results: dict[int, Result]) -> dict[str, dict[str, float]]:
    """Mean AOPC of each ranking."""
    if not results:
        return {}
    return {
        source: {
            name: fmean(_aopc_metric(name, source)(result) for result in results.values())
            for name in ("comprehensiveness", "sufficiency")
        }
        for source in ATTRIBUTION_METHODS
    }


def _apply_holm(rows: list[dict[str, Any]], confidence: float) -> None:
    """Holm over the ratios, for every measure on its own; then the verdict of each."""
    for name in MEASURES:
        judged = [row["measures"][name] for row in rows if "difference" in row["measures"].get(name, {})]
        for entry, corrected in zip(
            judged, holm_correction([e["difference"]["p"] for e in judged]), strict=True
        ):
            difference = entry["difference"]
            difference["p_holm"] = corrected
            entry["verdict"] = _verdict(difference, confidence)


def _verdict(difference: dict[str, Any], confidence: float) -> str:
    if difference["pairs"] < MIN_SEEDS_FOR_VERDICT or difference["p_holm"] is None:
        return "no verdict"
    if difference["p_holm"] >= 1 - confidence:
        return "no evidence"
    return "raises" if difference["mean"] > 0 else "lowers"


def _attribution_contrasts(ratio: str, results: dict[int, Result]) -> dict[str, Any]:
    """Does deleting what a ranking puts first matter more than deleting at random?

    A ranking explains if its comprehensiveness (AOPC) is above that of a random one. Gradients are the
    yardstick of what can be had.
    """
    seeds = sorted(results)
    by_source = {
        s: [_aopc_metric("comprehensiveness", s)(results[seed]) for seed in seeds]
        for s in ATTRIBUTION_METHODS
    }
    pairs = [
        ("attention", "random"),
        ("rollout", "random"),
        ("gradient", "random"),
        ("attention", "gradient"),
    ]
    found: dict[str, Any] = {"ratio": ratio}
    for one, other in pairs:
        difference = asdict(paired_difference(by_source[one], by_source[other]))
        found[f"{one}_{other}"] = {name: difference[name] for name in ("mean", "low", "high", "p", "pairs")}
    return found


def _sentences(row: dict[str, Any], baseline: str, confidence: float) -> list[str]:
    said = []
    for name in ("mass", "confidence", "comprehensiveness", "attention_over_random", "performance"):
        entry = row["measures"].get(name, {})
        if "difference" in entry:
            said.append(_sentence(row["ratio"], name, entry, baseline, confidence))
    return said


def _sentence(ratio: str, name: str, entry: dict[str, Any], baseline: str, confidence: float) -> str:
    difference, what = entry["difference"], MEASURES[name][0]
    size = f"{difference['mean']:+.3f}".replace("-", "−")
    if entry["verdict"] == "no verdict":
        pairs = difference["pairs"]
        return f"r = {ratio}: no verdict on {what} from {pairs} paired seed(s); it differs by {size}."
    inside = f"{100 * confidence:.3g}% interval {difference['low']:+.3f} to {difference['high']:+.3f}, "
    inside += f"{difference['pairs']} paired seeds, {format_p_value(difference['p_holm'])}"
    inside = inside.replace("-", "−")
    if entry["verdict"] == "no evidence":
        return f"r = {ratio}: no evidence that it changes {what} ({size}; {inside})."
    return f"r = {ratio} {entry['verdict']} {what} by {size.lstrip('+−')} against r = {baseline} ({inside})."


_DIRECTIONS = {"raises": "higher", "lowers": "lower"}


def headline(summary: dict[str, Any]) -> str:
    """The study in one or two sentences."""
    parts = []
    for name in ("mass", "comprehensiveness", "performance"):
        by_verdict: dict[str, list[str]] = {}
        for row in summary["rows"]:
            verdict = row["measures"].get(name, {}).get("verdict")
            if verdict is not None:
                by_verdict.setdefault(_DIRECTIONS.get(verdict, verdict), []).append(row["ratio"])
        told = [f"{verdict} at r = {', '.join(ratios)}" for verdict, ratios in by_verdict.items()]
        parts += [f"{MEASURES[name][0]}: {', '.join(told)}"] if told else []
    mode = "as published, confounds included" if summary["config"]["as_published"] else "one knob turned"
    where = f"{summary['config']['task']}, {mode}"
    return f"{where}. {'; '.join(parts)}." if parts else f"{where}: nothing to compare yet."


def _notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = [f"{count} {what}" for what, count in summary["facts"]["notes"].items() if count]
    base = next((row for row in summary["rows"] if row["ratio"] == summary["baseline"]), None)
    majority = summary["facts"]["majority"]
    got = base["measures"].get("performance", {}).get("mean") if base else None
    if got is not None and majority is not None and got < majority + 0.03:
        notes.insert(0, f"the baseline has hardly learnt: it is right on {got:.1%} of the test texts, always "
                        f"guessing the commonest class on {majority:.1%}")  # fmt: skip
    if summary["config"]["as_published"]:
        changed = get_recipe(summary["config"]["task"], True).confounds.describe()
        notes.insert(0, f"as published, more changes than r: {changed}; differences are not of r alone")
    failed = summary["runs"]["failures"]
    notes += [f"{one['ratio']} seed {one['seed']} failed: {one['error']}" for one in failed]
    if summary["config"]["seeds"] < MIN_SEEDS_FOR_VERDICT:
        notes.append(f"a verdict needs at least {MIN_SEEDS_FOR_VERDICT} seeds")
    return notes


def _curves(study_dir: StudyDir, study: dict[str, Any]) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    """Ratio → measure → rows (step, mean, lowest, highest over seeds)."""
    looks: dict[str, dict[str, dict[int, list[float]]]] = {}
    for run in study["runs"]:
        ratio = run["cell"].removeprefix("r=")
        for row in study_dir.run_dir(run["id"]).metrics().get("eval", []):
            for name, value in row.items():
                if isinstance(value, float):
                    looks.setdefault(ratio, {}).setdefault(name, {}).setdefault(row["step"], []).append(value)
    return {
        ratio: {
            name: [_mean_min_max(step, values) for step, values in sorted(by_step.items())]
            for name, by_step in names.items()
        }
        for ratio, names in looks.items()
    }


def _mean_min_max(step: int, values: Sequence[float]) -> tuple[float, ...]:
    return (float(step), fmean(values), min(values), max(values))


def _environment(results: dict[str, dict[int, Result]]) -> dict[str, Any]:
    first = next((result for by_seed in results.values() for result in by_seed.values()), None)
    return dict(first["environment"]) if first else {}
