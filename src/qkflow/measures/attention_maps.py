"""Attention maps as a picture: a page to look at closely, or a plain image, in one file."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np

from qkflow import files
from qkflow.errors import InputError
from qkflow.measures.attention import MEASURES, LayerProbe

MapWriter = Callable[[Path, list[LayerProbe], list[str]], None]
END_LABEL = "[end]"  # the label of an end-of-document token
GAP_PIXELS = 4  # pixels between the maps of an image


def get_map_writer(path: Path) -> MapWriter:
    """How a file of this name is drawn."""
    kinds: dict[str, MapWriter] = {".html": write_html, ".png": write_png}
    if path.suffix.lower() not in kinds:
        raise InputError(f"maps are drawn as .html or .png, not as '{path.name}'")
    return kinds[path.suffix.lower()]


def write_png(path: Path, layers: list[LayerProbe], labels: list[str]) -> None:
    """A grid of maps, a row a layer and a column a head, by the roots of the weights."""
    maps = [_to_uint8(layer) for layer in layers]
    side = maps[0].shape[-1]
    zoom = max(1, 192 // side)
    cell = side * zoom + GAP_PIXELS
    heads = max(len(layer) for layer in maps)
    image = np.full((len(maps) * cell + GAP_PIXELS, heads * cell + GAP_PIXELS, 3), 255, np.uint8)
    for row, layer in enumerate(maps):
        for column, levels in enumerate(layer):
            y, x = GAP_PIXELS + row * cell, GAP_PIXELS + column * cell
            image[y : y + side * zoom, x : x + side * zoom] = _colormap()[
                levels.repeat(zoom, 0).repeat(zoom, 1)
            ]
    files.write_atomic(path, encode_png(image))


def encode_png(image: np.ndarray) -> bytes:
    """An image (height, width, 3) of bytes as a PNG file."""
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def write_html(path: Path, layers: list[LayerProbe], labels: list[str]) -> None:
    """A page with every head's map and measures; a click enlarges one and names what lies under the mouse."""
    cells = [
        {
            "name": f"layer {number}, head {head}",
            "levels": base64.b64encode(levels.tobytes()).decode(),
            "top": float(_max_weights(layer)[head]),
            "about": ", ".join(
                f"{name.replace('_', ' ')} {_head_value(layer, name, head):.2f}" for name in MEASURES
            ),
        }
        for number, layer in enumerate(layers)
        for head, levels in enumerate(_to_uint8(layer))
    ]
    data = {
        "labels": labels,
        "heads": len(_to_uint8(layers[0])),
        "cells": cells,
        "colours": _colormap().tolist(),
    }
    # "</" would end the script, whatever the text under study says
    content = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
    title = escape("Attention: " + "".join(label for label in labels if label != END_LABEL)[:80])
    page = Path(__file__).with_name("maps.html").read_text("utf-8")
    files.write_atomic(path, page.replace("{{title}}", title).replace("{{data}}", content))


def _to_uint8(layer: LayerProbe) -> np.ndarray:
    """Roots of the weights' sizes (heads, T, T) as bytes, 255 the largest of a head.

    Roots, because the first rows have few keys to share the weight among, and would outshine all others.
    """
    assert layer.weights is not None
    weights = layer.weights.abs().numpy()
    return np.round(255 * np.sqrt(weights / np.maximum(_max_weights(layer), 1e-12)[:, None, None])).astype(
        np.uint8
    )


def _max_weights(layer: LayerProbe) -> np.ndarray:
    assert layer.weights is not None
    top: np.ndarray = layer.weights.abs().amax(dim=(1, 2)).numpy()
    return top


def _head_value(layer: LayerProbe, name: str, head: int) -> float:
    values: list[float] = getattr(layer, name)
    assert layer.weights is not None
    each = len(values) // len(layer.weights)
    return max(values[head * each : (head + 1) * each])


def _colormap() -> np.ndarray:
    """256 colours from white over blue to nearly black, ever darker."""
    stops = np.array([[255, 255, 255], [158, 202, 225], [33, 113, 181], [8, 29, 70]], float)
    places = np.array([0, 0.25, 0.6, 1.0])
    levels = np.linspace(0, 1, 256)
    return (
        np.stack([np.interp(levels, places, stops[:, c]) for c in range(3)], axis=1).round().astype(np.uint8)
    )
