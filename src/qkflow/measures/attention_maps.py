"""Attention maps of a probe as a PNG. `qkflow.explore.offline` writes the interactive page."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from qkflow import files
from qkflow.measures.attention import LayerProbe

GAP_PIXELS = 4  # between the maps of a PNG


def write_png(path: Path, layers: list[LayerProbe]) -> None:
    """Write a grid of maps: one row per layer, one column per head."""
    files.write_atomic(path, draw_png(layers))


def draw_png(layers: list[LayerProbe]) -> bytes:
    """Return a grid of maps as PNG: one row per layer, one column per head."""
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
    return encode_png(image)


def encode_png(image: np.ndarray) -> bytes:
    """Encode a uint8 image (height, width, 3) as PNG."""
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a line is its filter type, 0
    lines[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _to_uint8(layer: LayerProbe) -> np.ndarray:
    """Return √|A| (H, T, T) as uint8, scaled per head to a maximum of 255.

    The square root, because the first rows have few keys and therefore much larger weights than the others.
    """
    assert layer.weights is not None
    weights = layer.weights.abs().numpy()
    return np.round(255 * np.sqrt(weights / np.maximum(_max_weights(layer), 1e-12)[:, None, None])).astype(
        np.uint8
    )


def _max_weights(layer: LayerProbe) -> np.ndarray:
    assert layer.weights is not None
    largest: np.ndarray = layer.weights.abs().amax(dim=(1, 2)).numpy()
    return largest


def _colormap() -> np.ndarray:
    """Return 256 RGB colors (256, 3) from white through blue to near black, with decreasing lightness."""
    stops = np.array([[255, 255, 255], [158, 202, 225], [33, 113, 181], [8, 29, 70]], float)
    positions = np.array([0, 0.25, 0.6, 1.0])
    levels = np.linspace(0, 1, 256)
    channels = [np.interp(levels, positions, stops[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)
