"""`qkflow eval`: how well a trained model predicts a corpus, or does the tasks of an evaluation harness."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

from qkflow import console
from qkflow.errors import InputError, unknown

SPLITS = ("train", "validation", "test")


def evaluate(
    model: Annotated[Path, tyro.conf.Positional],
    *,
    data: str | None = None,
    split: str | None = None,
    seq_len: int | None = None,
    tokens: str | None = None,
    tasks: str | None = None,
    include: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    coupling: Path | None = None,
    batch_size: int = 16,
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Perplexity and bits per byte of a model on a corpus; or, with --tasks, what it scores on tasks.

    The corpus is read with the model's own tokenizer. Bits per byte do not depend on the tokenizer, so models
    with different ones can be compared. Tasks are run by lm-evaluation-harness (pip install "qkflow[eval]").

    examples:
      qkflow eval runs/first
      qkflow eval runs/first --data my_texts/ --split all
      qkflow eval runs/first --data wikitext-2 --split test --tokens 100k --json
      qkflow eval runs/first --tasks hellaswag,arc_easy --limit 200
      qkflow eval path/to/llama --coupling my-coupling --tasks my_task.yaml --shots 2

    Args:
        model: folder of a finished run; for tasks also a `transformers` folder or a name on the hub.
        data: corpus: a built-in name, a path or hf:owner/name:config (default: speeches).
        split: which part of the corpus: train, validation, test or all (default: validation).
        length: tokens that the model sees at a time (default: 128).
        tokens: how many to predict at most, spread evenly, e.g. 100k (default: all).
        tasks: instead of a corpus: tasks the harness knows, or YAML files of your own, with commas between.
        include: a folder with more tasks in YAML files.
        limit: questions of each task (default: all).
        shots: solved examples shown before each question (default: as the task says).
        coupling: a folder that `hf.save_adapter` wrote, attached to the model before its tasks.
        batch: windows or questions computed at once.
        device: auto, cpu, cuda or mps.
        threads: of the processor (default: all cores).
        json: print one JSON object instead of a table.
    """
    _check_exclusive_options(
        tasks,
        corpus_options={"data": data, "split": split, "seq_len": seq_len, "tokens": tokens},
        task_options={"include": include, "limit": limit, "shots": shots, "coupling": coupling},
    )
    for name, value, least in (
        ("batch-size", batch_size, 1),
        ("seq-len", seq_len, 1),
        ("limit", limit, 1),
        ("shots", shots, 0),
    ):
        if value is not None and value < least:
            raise InputError(f"--{name} must be at least {least}, not {value}")
    if split not in (None, *SPLITS, "all"):
        raise unknown("split", split, (*SPLITS, "all"))
    from qkflow.system import resolve_device
    from qkflow.training.worker import configure_process

    configure_process(threads)
    place = str(resolve_device(device))
    if tasks is not None:
        from qkflow.cli.commands.hf import evaluate_tasks

        evaluate_tasks(
            model, tasks, coupling=coupling, include=include, limit=limit, shots=shots, batch=batch_size,
            device=place, json=json,
        )  # fmt: skip
        return
    result = evaluate_corpus(
        model, data or "speeches", split or "validation", seq_len or 128, batch_size, tokens, place
    )
    if json:
        console.emit_json(result)
        return
    from qkflow.measures.language import format_eval_result

    console.out.print(
        f"{model} on {result['data']} ({result['split']}, {result['tokens']:,} tokens): {format_eval_result(result)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def evaluate_corpus(
    model: Path, corpus: str, split: str, length: int, batch: int, tokens: str | None, device: str
) -> dict[str, Any]:
    """How well a model of ours predicts a split of a corpus."""
    from qkflow.config_io import parse_count
    from qkflow.data import prepare
    from qkflow.measures.language import evaluate_loss
    from qkflow.training.pretrained import load_model, tokenizer_spec

    limit = None if tokens is None else parse_count(tokens)
    decoder, _ = load_model(model, device=device)
    text = prepare(corpus, tokenizer_spec(model))
    parts = SPLITS if split == "all" else (split,)
    if not any(len(text.tokens(part)) for part in parts):
        raise InputError(f"'{corpus}' has no text in its {split} split")
    windows = text.eval_windows(parts, length, batch, limit)

    def watch(batches: Iterable[Any]) -> Iterable[Any]:
        with console.progress_bar() as bar:
            yield from bar.track(batches, total=len(windows), description=f"reading {text.name}")

    measured = evaluate_loss(decoder, windows, progress=watch)
    if not math.isfinite(measured.loss):
        raise InputError(
            f"the loss of {model} on '{corpus}' is not a finite number: its weights are too large"
        )
    result = {"model": str(model), "data": text.name, "split": split, **measured.to_dict()}
    return result | {"tokens": measured.n_tokens, "bytes": measured.n_bytes}


def _check_exclusive_options(
    tasks: str | None, *, corpus_options: dict[str, Any], task_options: dict[str, Any]
) -> None:
    """A flag that would do nothing is a mistake worth telling."""
    idle, why = (
        (task_options, "needs --tasks") if tasks is None else (corpus_options, "does not go with --tasks")
    )
    for name, value in idle.items():
        if value is not None:
            raise InputError(f"--{name} {why}")
