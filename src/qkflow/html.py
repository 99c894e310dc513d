"""HTML helpers shared by every page that qkflow writes."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable
from html import escape
from typing import Any, NamedTuple


def json_for_script(value: Any) -> str:
    r"""Return `value` as JSON for a `<script type="application/json">` element.

    `<`, `>` and `&` are written as `\uXXXX`, so that no string in `value` can close the element. NaN and
    infinity raise ValueError: JSON has neither.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def deflate_base64(text: str) -> str:
    """Compress text for a data element; a page unpacks it with `DecompressionStream("deflate")`."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def csp_hash(script: str) -> str:
    """Return the source of a content security policy that allows this inline script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


class Card(NamedTuple):
    """One finding: a title with a badge, a large number and a sentence."""

    title: str
    text: str
    kind: str = ""  # of the verdict: helps, hurts, equivalent, undecided, no verdict
    symbol: str = ""  # before `kind`, for readers who do not see colors
    note: str = ""  # small, beside the title
    number: str = ""
    unit: str = ""
    color: str = ""  # of the dot before the title, as in the figures


# Colors come from the page; a notebook has none of them and takes the second value.
CARD_STYLE = """\
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 16px; }
.card { background: var(--paper, transparent); border: 1px solid var(--line, #88888855); border-radius: 12px; padding: 18px 20px; }
.card .head { display: flex; justify-content: space-between; align-items: baseline; gap: 12px; }
.card h3 { margin: 0; font-size: 17px; overflow-wrap: anywhere; }
.card h3 small, .effect small { color: var(--soft, inherit); font-size: 13px; font-weight: 400; }
.card p { margin: 8px 0 0; font-size: 14.5px; overflow-wrap: anywhere; }
.card .effect { margin-top: 10px; font-size: 28px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.1; }
.dot { display: inline-block; width: 10px; height: 10px; margin-right: 8px; border-radius: 50%; background: var(--variant); }
.badge { flex: none; padding: 2px 10px; border-radius: 99px; font-size: 13px; font-weight: 600; color: var(--still, #3b4047); background: var(--still-ground, #eeeeea); }
.helps .badge { color: var(--good, #00573e); background: var(--good-ground, #e2f3ec); }
.hurts .badge { color: var(--bad, #8a3500); background: var(--bad-ground, #fdebdf); }
.helps .effect { color: var(--good, inherit); }
.hurts .effect { color: var(--bad, inherit); }
"""  # noqa: E501 - one rule per line


def cards(items: Iterable[Card], label: str = "Verdicts") -> str:
    """Return the cards as one element; all text is escaped."""
    return f'<div class="cards" role="group" aria-label="{escape(label)}">{"".join(map(_card, items))}</div>'


def _card(card: Card) -> str:
    dot = f'<span class="dot" style="--variant: {escape(card.color)}"></span>' if card.color else ""
    note = f" <small>{escape(card.note)}</small>" if card.note else ""
    badge = ""
    if card.kind:
        symbol = f'<span aria-hidden="true">{escape(card.symbol)}</span> ' if card.symbol else ""
        badge = f'<span class="badge">{symbol}{escape(card.kind)}</span>'
    effect = ""
    if card.number:
        effect = f'<p class="effect">{escape(card.number)} <small>{escape(card.unit)}</small></p>'
    return (
        f'<article class="card {escape(card.kind.replace(" ", "-"))}"><div class="head">'
        f"<h3>{dot}{escape(card.title)}{note}</h3>{badge}</div>{effect}<p>{escape(card.text)}</p></article>"
    )
