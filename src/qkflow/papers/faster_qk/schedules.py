"""A ratio of the learning rates in language modeling: below and above 1, early, in upper layers.

The stored study `pace-lm` trains standard attention with several ratios, with a gated and with a plain
feed-forward. Zhu et al. (2026, arXiv 2605.10504) slow the query-key circuit of upper layers early, and gain
with a plain feed-forward alone; Vashisht & Ramaswamy (2026) speed it up.
"""

from __future__ import annotations

from collections.abc import Mapping

from qkflow.papers.claims import Results, judge_pairs
from qkflow.report.tables import format_change
from qkflow.studies import Comparison
from qkflow.studies.variants import Variant, parse_variant

RECORD = "pace-lm"
FEED_FORWARDS = {"swiglu": "gated (SwiGLU)", "gelu": "plain (GELU)"}


def schedule_rows(results: Results) -> list[dict[str, str]]:
    """Return the change of perplexity of every ratio, by feed-forward; verdicts are corrected together."""
    comparison = results.comparison(RECORD)
    arms = read_schedules(comparison)
    pairs = {
        (ratio, kind): (name, arms["1", kind])
        for (ratio, kind), name in arms.items()
        if ratio != "1" and ("1", kind) in arms
    }
    judged = judge_pairs(comparison, list(pairs.values()))
    rows = []
    for ratio in dict.fromkeys(ratio for ratio, _ in pairs):
        row = {"train.pace": ratio}
        for kind, label in FEED_FORWARDS.items():
            pair = pairs.get((ratio, kind))
            difference, verdict = judged.get(pair, (None, None)) if pair else (None, None)
            row[f"{label}, change (95%)"] = f"{format_change(difference)}, {verdict}" if difference else "–"
        rows.append(row)
    return rows


def read_schedules(comparison: Comparison) -> Mapping[tuple[str, str], str]:
    """Return the names of the arms by ratio, as in a config, and kind of feed-forward. Ratio 1: no pace."""
    arms = {}
    for arm in comparison.summary.arms:
        variant = parse_variant(arm.variant)
        kind = variant.override("model.feed_forward", "swiglu")
        arms[_ratio_text(variant), str(kind)] = arm.variant
    return arms


def _ratio_text(variant: Variant) -> str:
    texts = dict(variant.overrides)
    return variant.pace or texts.get("train.pace", "1")
