"""Pages: the templates, and the figures and scripts that every page embeds.

A page is one file that opens offline. plotly.js and the figures are embedded compressed, and the content
security policy allows exactly two scripts, by their hashes: ours, and plotly.js once it is unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from qkflow.html import CARD_STYLE, csp_hash, deflate_base64, json_for_script
from qkflow.report.alternatives import figure_table
from qkflow.report.plotly_bundle import plotly_bundle
from qkflow.report.tables import format_difference, format_number, format_percent

if TYPE_CHECKING:
    from jinja2 import Environment

    from qkflow.report.figures import Figure


def render_document(template: str, figures: Mapping[str, Figure], live: bool = False, **context: Any) -> str:
    """Return a page. The template engine escapes all text that users may have written.

    A live page takes styles and scripts from the server that serves it, and its figures from its events.
    """
    context |= {"figures": figures, "live": live, "frame": "base.html"}
    if not live:
        script, bundle = read_asset("report.js"), plotly_bundle()
        context |= {
            "style": style_sheet(),
            "script": script,
            "plotly_deflated": bundle.deflated,
            "figures_deflated": deflate_base64(json_for_script(figures)),
            "policy": (
                f"default-src 'none'; script-src {csp_hash(script)} {bundle.policy_source}; "
                "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
            ),
        }
    return _environment().get_template(template).render(context)


def render_content(template: str, figures: Mapping[str, Figure], **context: Any) -> str:
    """Return what is inside the `main` element of a page."""
    page = _environment().get_template(template)
    return page.render({**context, "figures": figures, "frame": "fragment.html"})


def style_sheet() -> str:
    return CARD_STYLE + read_asset("report.css")


def read_asset(name: str) -> str:
    return (files("qkflow.report") / "templates" / name).read_text("utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("qkflow.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": format_number,
        "difference": format_difference,
        "percent": format_percent,
        "count": format_count,
        "bytes": format_bytes,
        "plain": format_value,
        "data_table": figure_table,
    }
    return environment


def format_count(value: float | None) -> str:
    """Format 1234567 as 1.23M."""
    if value is None:
        return "–"
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def format_bytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f} MiB"


def format_value(value: Any) -> str:
    """Format an option or a property of the environment."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {format_value(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None else f"{value}"
