"""`qkflow export` and `qkflow import` (`transformers` folders), and the tasks of `qkflow eval`."""

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

    `--to qkflow` keeps the architecture; loading it needs `import qkflow.hf`. `--to llama` writes a plain
    Llama: standard attention (a drift is merged into the weights), RoPE, SwiGLU feed-forward.

    examples:
      qkflow export runs/mine mine-hf
      qkflow export runs/mine mine-llama --to llama

    Args:
        source: folder of a finished run, or its `model` folder.
        out: folder to write; it must not exist.
        to: architecture of the folder.
        json: print one JSON object instead of a line.
    """
    from qkflow import hf

    model = hf.export_model(source, out, to=to)
    _print_model_summary(out, type(model).__name__, sum(p.numel() for p in model.parameters()), json)


def import_model(source: str, out: Path, /, json: bool = False) -> None:
    """Write a `transformers` model as a folder that every qkflow command reads.

    Supports the qkflow architecture and Llama, with weights in safetensors.

    examples:
      qkflow import path/to/llama runs/llama
      qkflow eval runs/llama

    Args:
        source: a `transformers` folder or Hub name.
        out: folder to write; it must not exist.
        json: print one JSON object instead of a line.
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
    """Run `qkflow eval MODEL --tasks a,b`: evaluate lm-evaluation-harness tasks, print results."""
    from qkflow import hf

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with redirect_stdout(sys.stderr):  # the harness prints; stdout is for the result
        results = hf.evaluate(
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
        console.emit_json({"model": str(model), "tasks": results})
        return
    table = Table(title=Text(str(model)))
    for column in ("task", "metric", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for task, metrics in results.items():
        for metric, value in metrics.items():
            if not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr")
                shown = f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")
                table.add_row(task, metric, shown)
    console.out.print(table)
