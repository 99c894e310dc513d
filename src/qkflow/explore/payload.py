"""The binary form of what the page draws: a JSON header, then tensors.

4 bytes            length of the header, little endian
header             JSON; `tensors` maps a name to its dtype, shape and offset behind the header
tensors            their bytes, each padded to a multiple of 4
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from qkflow.errors import InputError
from qkflow.explore.base import ExplorableModel, Trajectory
from qkflow.explore.capture import Capture


def encode(header: dict[str, Any], tensors: dict[str, Sequence[np.ndarray]]) -> list[bytes]:
    """Return the chunks of a payload. A tensor is given as parts that follow one another."""
    table, chunks, offset = {}, [], 0
    for name, parts in tensors.items():
        size = sum(part.nbytes for part in parts)
        shapes = [list(part.shape) for part in parts]
        table[name] = {"dtype": str(parts[0].dtype), "shapes": shapes, "offset": offset}
        chunks += [part.tobytes() for part in parts]
        chunks.append(bytes(-size % 4))
        offset += size + -size % 4
    text = dump_json({**header, "tensors": table})
    text += b" " * (-len(text) % 4)
    return [struct.pack("<I", len(text)), text, *chunks]


def dump_json(values: dict[str, Any]) -> bytes:
    """Return values as JSON, which has no NaN."""
    try:
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise InputError(
            "the model computes NaN or infinite values: its weights are damaged, or its training diverged",
            code="non-finite-output",
        ) from None


def decode(payload: bytes) -> tuple[dict[str, Any], dict[str, list[np.ndarray]]]:
    """Return the header and the parts of every tensor of a payload."""
    (length,) = struct.unpack_from("<I", payload)
    header = json.loads(payload[4 : 4 + length])
    tensors: dict[str, list[np.ndarray]] = {}
    for name, entry in header["tensors"].items():
        dtype, offset = np.dtype(entry["dtype"]), 4 + length + entry["offset"]
        tensors[name] = []
        for shape in entry["shapes"]:
            count = int(np.prod(shape))
            tensors[name].append(np.frombuffer(payload, dtype, count, offset).reshape(shape))
            offset += count * dtype.itemsize
    return header, tensors


def encode_view(capture: Capture, baseline: Capture | None = None) -> list[bytes]:
    """Return the view of a text; `baseline` is the same text with all heads on."""
    header = {
        "tokens": capture.tokens,
        "largest": capture.largest,
        "signed": capture.signed,
        "measures": capture.measures,
        "loss": capture.loss,
        "losses": capture.losses,
        "baseline_loss": (baseline or capture).loss,
        "classes": capture.classes,
        "baseline_classes": (baseline or capture).classes,
    }
    return encode(header, {"levels": [levels.numpy() for levels in capture.levels]})


def encode_plane(model: ExplorableModel, path: Trajectory, layer: int) -> list[bytes]:
    """Return q and k of a head (steps + 1, T, 2) in the plane of their two largest principal components."""
    points = torch.cat((path.q, path.k), dim=1).float().cpu()  # (steps + 1, 2T, D)
    centered = points - points.mean(dim=(0, 1))
    flat = centered.flatten(0, 1)
    covariance = flat.T @ flat
    if not bool(covariance.isfinite().all()):
        raise InputError(f"q and k of layer {layer} are NaN or infinite", code="non-finite-output")
    variance, axes = torch.linalg.eigh(covariance)
    plane = axes[:, -2:].flip(-1)
    plane = plane * plane[plane.abs().argmax(dim=0), [0, 1]].sign()  # the sign of an eigenvector is arbitrary
    projected = (centered @ plane).numpy().astype(np.float32)
    shift = (points[-1] - points[0]).norm(dim=-1)
    n_tokens = path.q.shape[1]
    coupling = model.coupling(layer)
    header = {
        "coupling": None if coupling is None else coupling.name,
        "equation": None if coupling is None else coupling.equation,
        "steps": len(points) - 1,
        "explained": float(variance[-2:].sum() / variance.sum().clamp_min(1e-12)),
        "q_shift": shift[:n_tokens].tolist(),
        "k_shift": shift[n_tokens:].tolist(),
        "q_norm": points[0, :n_tokens].norm(dim=-1).tolist(),
        "k_norm": points[0, n_tokens:].norm(dim=-1).tolist(),
    }
    return encode(header, {"q": [projected[:, :n_tokens]], "k": [projected[:, n_tokens:]]})


def describe_model(model: ExplorableModel) -> dict[str, Any]:
    """Return what the page needs to know about a model before it has seen a text."""
    couplings = {None if part is None else part.name for part in map(model.coupling, range(model.n_layers))}
    return {
        "name": model.name,
        "kind": model.kind,
        "n_heads": model.n_heads,
        "max_tokens": model.max_tokens,
        "predicts_tokens": model.predicts_tokens,
        "classes": model.class_names,
        "couplings": sorted(name for name in couplings if name is not None),
        "random_scores": model.random_scores,
    }
