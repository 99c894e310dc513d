"""Can a gain be predicted from the text alone?

Stored studies train the same arms on several corpora. Their gains stand beside measures of the train split
that need no training (`corpus-stats`, from `qkflow data describe`), and each measure is tested by its rank
correlation with each gain over corpora.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from qkflow.papers.claims import Results, judged_difference
from qkflow.papers.coupled_dynamics.arms import (
    EULER,
    FIXED_EULER,
    FIXED_SYMMETRIC,
    WEAK_REFERENCE,
)
from qkflow.report.tables import format_change
from qkflow.studies import Comparison
from qkflow.studies.stats import holm

STATS = "corpus-stats"
MEASURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "unigram entropy": lambda stats: stats["unigram_entropy_bits"],
    "topic": lambda stats: stats["topic_bits"],
    "seen in 8": lambda stats: stats["repetition"]["seen_within_8"],
    "seen in 128": lambda stats: stats["repetition"]["seen_within_128"],
    "induction": lambda stats: stats["repetition"]["induction_1"],
}
EULER_CHANGE = "euler, modern, Muon"
CHANGES = {  # arm, and what it is compared with; None: the reference
    "euler, fan_in, AdamW": (FIXED_EULER, WEAK_REFERENCE),
    "symmetric init, fan_in, AdamW": (FIXED_SYMMETRIC, WEAK_REFERENCE),
    EULER_CHANGE: (EULER, None),
}
# WikiText-2 is one of the budgets of `token_budgets`, with the same arms.
_STUDIES = {"wikitext-2": "tokens-500k"}


@dataclass(frozen=True)
class Correlation:
    """Rank correlation over corpora, with its exact permutation p, corrected over all of them (Holm)."""

    measure: str
    change: str
    rho: float
    p_holm: float


def corpus_rows(results: Results) -> list[dict[str, str]]:
    """Return the change of perplexity of every arm and the measures, by corpus."""
    rows = []
    for name, stats in results.output(STATS)["corpora"].items():
        comparison = _study(results, name)
        changes = {}
        for label, (arm, against) in CHANGES.items():
            difference, verdict = judged_difference(comparison, arm, against)
            changes[label] = f"{format_change(difference)}, {verdict}"
        rows.append(
            {"corpus": name, **changes, **{key: f"{read(stats):.3g}" for key, read in MEASURES.items()}}
        )
    return rows


def gain_correlations(results: Results) -> list[Correlation]:
    """Return how each measure ranks the corpora by each change of perplexity."""
    stats = results.output(STATS)["corpora"]
    changes = {label: list(mean_changes(results, label).values()) for label in CHANGES}
    pairs = list(itertools.product(MEASURES, CHANGES))
    tested = [
        rank_correlation([MEASURES[measure](each) for each in stats.values()], changes[change])
        for measure, change in pairs
    ]
    corrected = holm(np.array([p for _, p in tested]))
    return [
        Correlation(measure, change, rho, float(p))
        for (measure, change), (rho, _), p in zip(pairs, tested, corrected, strict=True)
    ]


def predictor_rows(results: Results) -> list[dict[str, str]]:
    """Return the correlations as a table: a row per measure, a column per change."""
    rows: dict[str, dict[str, str]] = {name: {"measure": name} for name in MEASURES}
    for each in gain_correlations(results):
        rows[each.measure][each.change] = f"{each.rho:+.2f} (p = {each.p_holm:.2g})"
    return list(rows.values())


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return Spearman's ρ and its two-sided p over all permutations."""
    x, y = (rankdata(values) - (len(values) + 1) / 2 for values in (first, second))
    observed = abs(float(x @ y))
    orders = np.array(list(itertools.permutations(range(len(y)))))
    p = float(np.mean(np.abs(y[orders] @ x) >= observed - 1e-9))
    return float(x @ y / np.sqrt((x @ x) * (y @ y))), p


def _study(results: Results, corpus: str) -> Comparison:
    return results.comparison(_STUDIES.get(corpus, f"corpus-{corpus}"))


def mean_changes(results: Results, change: str) -> dict[str, float]:
    """Return the mean difference that an arm of CHANGES makes, by corpus, in nats."""
    arm, against = CHANGES[change]
    differences = {
        corpus: judged_difference(_study(results, corpus), arm, against)[0]
        for corpus in results.output(STATS)["corpora"]
    }
    return {corpus: float(each.mean) for corpus, each in differences.items() if each is not None}
