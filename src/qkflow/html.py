"""HTML helpers shared by every page that qkflow writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

PLOTLY_PAGE_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h2{margin:2.5rem 0 .3rem}p{margin:.3rem 0}"
)


def json_for_script(value: Any) -> str:
    r"""Return `value` as JSON for a `<script type="application/json">` element.

    `<`, `>` and `&` are written as `\uXXXX`, so that no string in `value` can close the element. NaN and
    infinity raise ValueError: JSON has neither.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class PlotlySection(NamedTuple):
    """One figure of a page with its heading and a sentence of text; `figure` is a `plotly` Figure."""

    heading: str
    text: str
    figure: Any


def plotly_page(title: str, sections: Sequence[PlotlySection], intro: str = "") -> str:
    """Return an HTML page with a figure per section. plotly.js is inlined once; the page opens offline."""
    parts: list[str] = []
    for index, (heading, text, figure) in enumerate(sections):
        figure.update_layout(template="plotly_white")
        plot = figure.to_html(full_html=False, include_plotlyjs=index == 0, config={"displaylogo": False})
        parts += [_element("h2", heading), _element("p", text), plot]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{PLOTLY_PAGE_STYLE}</style></head><body>{_element('h1', title)}{_element('p', intro)}"
        f"{''.join(parts)}</body></html>\n"
    )


def _element(tag: str, text: str) -> str:
    return f"<{tag}>{escape(text)}</{tag}>" if text else ""
