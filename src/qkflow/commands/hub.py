"""`qkflow export` and `qkflow import`: between runs of ours and `transformers` folders."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qkflow import console


def export(source: Path, out: Path, /, to: Literal["qkflow", "llama"] = "qkflow", json: bool = False) -> None:
    """Write a trained model as a `transformers` folder: weights, config, tokenizer and model card.

    `--to qkflow` keeps the model as it is; loading it needs `import qkflow.hub`. `--to llama` writes a plain
    Llama that everything reads, which takes standard attention (a drift is merged into the weights), rotary
    positions and a SwiGLU feed-forward.

    For example:
        qkflow export runs/mine mine-hf
        qkflow export runs/mine mine-llama --to llama

    Args:
        source: the folder of a finished run, or its `model` folder.
        out: the folder to write, which must not exist yet.
        to: the architecture.
        json: print one JSON object.
    """
    from qkflow import hub

    model = hub.export(source, out, to=to)
    _report(out, type(model).__name__, sum(p.numel() for p in model.parameters()), json)


def import_model(source: str, out: Path, /, json: bool = False) -> None:
    """Write a `transformers` model as a folder that every qkflow command reads.

    Takes models of our own architecture and Llamas.

    For example:
        qkflow import path/to/llama runs/llama
        qkflow eval runs/llama

    Args:
        source: a `transformers` folder, or a name on the hub.
        out: the folder to write, which must not exist yet.
        json: print one JSON object.
    """
    from qkflow import hub

    decoder = hub.import_model(source, out)
    _report(out, "Decoder", sum(p.numel() for p in decoder.parameters()), json)


def _report(out: Path, architecture: str, parameters: int, json: bool) -> None:
    if json:
        console.emit_json({"folder": str(out), "architecture": architecture, "parameters": parameters})
    else:
        console.out.print(f"{out}: {architecture}, {parameters:,} parameters")
