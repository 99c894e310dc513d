"""Can the gain of a coupling be predicted from the text alone?

The stored studies `corpus-NAME` train the same arms on several corpora. Their gains stand beside measures of
the train split that need no training (`corpus-stats`, from `qkflow data describe`), and each measure is
tested by its rank correlation with the gain over corpora.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from qkflow.papers.claims import Results, judged_difference
from qkflow.papers.coupled_dynamics.claims import CORPUS_WEAK_EULER, EULER, WEAK_REFERENCE
from qkflow.report.tables import format_change
from qkflow.studies.stats import holm

STATS = "corpus-stats"
MEASURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "unigram entropy": lambda stats: stats["unigram_entropy_bits"],
    "topic": lambda stats: stats["topic_bits"],
    "seen in 8": lambda stats: stats["repetition"]["seen_within_8"],
    "seen in 128": lambda stats: stats["repetition"]["seen_within_128"],
    "induction": lambda stats: stats["repetition"]["induction_1"],
}
CHANGES = {
    "euler, fan_in, AdamW": (CORPUS_WEAK_EULER, WEAK_REFERENCE),
    "euler, modern, Muon": (EULER, None),
}
_PREDICTED = "euler, fan_in, AdamW"


@dataclass(frozen=True)
class Correlation:
    """Rank correlation over corpora, with its exact permutation p, Holm's correction over the measures."""

    measure: str
    rho: float
    p_holm: float


def corpus_rows(results: Results) -> list[dict[str, str]]:
    """Return the change of perplexity of every arm and the measures, by corpus."""
    rows = []
    for name, stats in results.output(STATS)["corpora"].items():
        comparison = results.comparison(f"corpus-{name}")
        changes = {}
        for label, (arm, against) in CHANGES.items():
            difference, verdict = judged_difference(comparison, arm, against)
            changes[label] = f"{format_change(difference)}, {verdict}"
        rows.append(
            {"corpus": name, **changes, **{key: f"{read(stats):.3g}" for key, read in MEASURES.items()}}
        )
    return rows


def gain_correlations(results: Results) -> list[Correlation]:
    """Return how each measure ranks the corpora by the change that euler makes from fan_in."""
    stats = results.output(STATS)["corpora"]
    arm, against = CHANGES[_PREDICTED]
    gains = [_mean_change(results, name, arm, against) for name in stats]
    tested = [rank_correlation([read(each) for each in stats.values()], gains) for read in MEASURES.values()]
    corrected = holm(np.array([p for _, p in tested]))
    return [
        Correlation(name, rho, float(p))
        for name, (rho, _), p in zip(MEASURES, tested, corrected, strict=True)
    ]


def predictor_rows(results: Results) -> list[dict[str, str]]:
    """Return the correlations as a table."""
    name = f"rank correlation with the change of {_PREDICTED}"
    return [
        {"measure": each.measure, name: f"{each.rho:+.2f}", "p, Holm": f"{each.p_holm:.2g}"}
        for each in gain_correlations(results)
    ]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return Spearman's ρ and its two-sided p over all permutations."""
    x, y = (rankdata(values) - (len(values) + 1) / 2 for values in (first, second))
    observed = abs(float(x @ y))
    orders = np.array(list(itertools.permutations(range(len(y)))))
    p = float(np.mean(np.abs(y[orders] @ x) >= observed - 1e-9))
    return float(x @ y / np.sqrt((x @ x) * (y @ y))), p


def _mean_change(results: Results, name: str, arm: str, against: str | None) -> float:
    difference, _ = judged_difference(results.comparison(f"corpus-{name}"), arm, against)
    assert difference is not None
    return float(difference.mean)
