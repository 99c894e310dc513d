"""The explorer as one self-contained HTML file: its page, style, scripts and a captured text.

The answers of the server are packed into one archive, deflated and written as base64; the page unpacks it
with `DecompressionStream`. Nothing is loaded from anywhere, and the page's own policy forbids it.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qkflow import files
from qkflow.explore import payload
from qkflow.explore.base import ExplorableModel
from qkflow.explore.capture import Capture

STATIC = Path(__file__).with_name("static")
# in the order of their imports
MODULES = (
    "payload.js",
    "source.js",
    "state.js",
    "dom.js",
    "color.js",
    "view.js",
    "pen.js",
    "raster.js",
    "heatmap.js",
    "grid.js",
    "tokens.js",
    "arcs.js",
    "coupling.js",
    "predictions.js",
    "rationale.js",
    "exporting.js",
    "app.js",
)
CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
FULL_TOKENS = 192  # longer texts come without predictions and couplings of every token and head


def write_page(path: Path, models: Sequence[ExplorableModel], captures: Sequence[Capture], text: str) -> None:
    """Write the offline page of captures, one per model."""
    files.write_atomic(path, render_page(models, captures, text))


def render_page(
    models: Sequence[ExplorableModel],
    captures: Sequence[Capture],
    text: str,
    baselines: Sequence[Capture] | None = None,
) -> str:
    """Return the offline page of captures, one per model; `baselines` are the same with all heads on."""
    entries: dict[str, bytes] = {}
    off = ",".join(f"{layer}.{head}" for layer, head in sorted(captures[0].off))
    described = {"text": text, "off": off, "models": [payload.describe_model(model) for model in models]}
    entries["models"] = json.dumps(described).encode()
    for index, (model, capture) in enumerate(zip(models, captures, strict=True)):
        baseline = None if baselines is None else baselines[index]
        entries[f"view/{index}"] = b"".join(payload.encode_view(capture, baseline))
        if len(capture.ids) <= FULL_TOKENS:
            entries |= _details(index, model, capture)
    page = (STATIC / "index.html").read_text("utf-8")
    style = f"<style>{(STATIC / 'style.css').read_text('utf-8')}</style>"
    page = page.replace('<link rel="stylesheet" href="/static/style.css">', f"{_policy()}{style}")
    page = page.replace('href="/static/icon.svg"', 'href="data:,"')
    data = f'<script type="application/octet-stream" id="archive">{pack(entries)}</script>'
    scripts = f'{data}\n<script type="module">\n{bundle_scripts()}</script>'
    return page.replace('<script type="module" src="/static/app.js"></script>', scripts)


@torch.no_grad()
def _details(index: int, model: ExplorableModel, capture: Capture) -> dict[str, bytes]:
    """Return predictions of every token and the plane of every head."""
    entries: dict[str, bytes] = {}
    if model.predicts_tokens:
        for token in range(len(capture.ids)):
            answer: dict[str, Any] = {"rows": model.predictions(capture, token), "before": None}
            entries[f"lens/{index}/{token}"] = json.dumps(answer).encode()
    for layer, n_heads in enumerate(model.n_heads):
        for head in range(n_heads):
            plane = payload.encode_plane(model, model.trajectory(capture, layer, head), layer)
            entries[f"coupling/{index}/{layer}/{head}"] = b"".join(plane)
    return entries


def pack(entries: dict[str, bytes]) -> str:
    """Return an archive of named byte strings: a JSON table and their bytes, deflated, as base64."""
    table, offset = {}, 0
    for name, content in entries.items():
        padded = len(content) + -len(content) % 4
        table[name] = [offset, len(content)]
        offset += padded
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 4)
    compressor = zlib.compressobj(6)
    parts = [compressor.compress(struct.pack("<I", len(head)) + head)]
    parts += [compressor.compress(content + bytes(-len(content) % 4)) for content in entries.values()]
    return base64.b64encode(b"".join([*parts, compressor.flush()])).decode()


def bundle_scripts() -> str:
    """Return the modules of the page as one: without imports and exports, in the order of `MODULES`."""
    parts = []
    for name in MODULES:
        text = (STATIC / name).read_text("utf-8")
        text = re.sub(r"^import [^;]*;\n", "", text, flags=re.M)
        parts.append(f"// {name}\n" + re.sub(r"^export ", "", text, flags=re.M))
    return "\n".join(parts)


def _policy() -> str:
    return f'<meta http-equiv="Content-Security-Policy" content="{CSP}">\n'
