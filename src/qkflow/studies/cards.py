"""Verdicts as cards: of a report, and of a comparison in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from qkflow.html import CARD_STYLE, Card, cards
from qkflow.studies.design import Verdict
from qkflow.studies.results import StudySummary
from qkflow.studies.sentences import format_percent

_SYMBOLS = {
    Verdict.HELPS: "▼",
    Verdict.HURTS: "▲",
    Verdict.EQUIVALENT: "≈",
    Verdict.UNDECIDED: "…",
    Verdict.NO_VERDICT: "?",
    Verdict.REFERENCE: "=",
}


def verdict_cards(summary: StudySummary, colors: Mapping[str, str] | None = None) -> list[Card]:
    """Return one card per variant. `colors` are those of the variants in the figures beside them."""
    items = []
    for arm in summary.variants:
        mean = arm.difference.percent["mean"] if arm.difference else None
        items.append(
            Card(
                title=arm.variant,
                text=arm.sentence,
                kind=str(arm.verdict),
                symbol=_SYMBOLS[arm.verdict],
                note="control" if arm.role == "control" else "",
                number=format_percent(mean) if arm.difference else "",
                unit=summary.metric,
                color=(colors or {}).get(arm.variant, ""),
            )
        )
    return items


def notebook_html(summary: StudySummary) -> str:
    """Return headline, cards and caveats as one element with its own styles, for the output of a cell."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in summary.notes)
    return (
        f'<div class="qkflow"><style>.qkflow {{ {CARD_STYLE} }}</style>'
        f"<p><strong>{escape(summary.headline)}</strong></p>{cards(verdict_cards(summary))}"
        f"{f'<ul>{notes}</ul>' if notes else ''}</div>"
    )
