"""`qkflow export` and `qkflow import`, between our runs and `transformers` folders; the tasks of `eval`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from qkflow import console


def export(source: Path, out: Path, /, to: Literal["qkflow", "llama"] = "qkflow", json: bool = False) -> None:
    """Write a trained model as a `transformers` folder: weights, config, tokenizer and model card.

    `--to qkflow` keeps the model as it is; loading it needs `import qkflow.hf`. `--to llama` writes a plain
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
    from qkflow import hf

    model = hf.export_model(source, out, to=to)
    _print_model_summary(out, type(model).__name__, sum(p.numel() for p in model.parameters()), json)


def import_model(source: str, out: Path, /, json: bool = False) -> None:
    """Write a `transformers` model as a folder that every qkflow command reads.

    Takes models of our own architecture and Llamas, with all their weights in safetensors.

    For example:
        qkflow import path/to/llama runs/llama
        qkflow eval runs/llama

    Args:
        source: a `transformers` folder, or a name on the hub.
        out: the folder to write, which must not exist yet.
        json: print one JSON object.
    """
    from qkflow import hf

    decoder = hf.import_model(source, out)
    _print_model_summary(out, "Decoder", sum(p.numel() for p in decoder.parameters()), json)


def _print_model_summary(out: Path, architecture: str, parameters: int, json: bool) -> None:
    if json:
        console.emit_json({"folder": str(out), "architecture": architecture, "parameters": parameters})
    else:
        console.out.print(f"{out}: {architecture}, {parameters:,} parameters", markup=False)


def evaluate_tasks(
    model: str | Path,
    tasks: str,
    *,
    coupling: Path | None = None,
    include: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    batch: int = 8,
    device: str = "cpu",
    json: bool = False,
) -> None:
    """What `qkflow eval MODEL --tasks a,b` does: run tasks of the evaluation harness, show their results."""
    from qkflow import hf

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with redirect_stdout(sys.stderr):  # the harness talks; the result alone goes to stdout
        found = hf.evaluate(
            model,
            names,
            coupling=coupling,
            include_path=include,
            limit=limit,
            num_fewshot=shots,
            batch_size=batch,
            device=device,
        )
    if json:
        console.emit_json({"model": str(model), "tasks": found})
        return
    table = Table(title=Text(str(model)))
    for column in ("task", "measure", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for task, measures in found.items():
        for measure, value in measures.items():
            if not measure.endswith("_stderr"):
                error = measures.get(f"{measure}_stderr")
                table.add_row(
                    task, measure, f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")
                )
    console.out.print(table)
