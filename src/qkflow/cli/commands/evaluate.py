"""`qkflow eval`: evaluate a trained model on a corpus, or on tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

from qkflow import console
from qkflow.config_io import Count, Range
from qkflow.errors import InputError, unknown

SPLITS = ("train", "validation", "test")
DEFAULT_SEQ_LEN = 128  # of a model whose config does not have the length it was trained on


def evaluate(
    model: Annotated[Path, tyro.conf.Positional],
    *,
    data: str | None = None,
    split: str | None = None,
    seq_len: Count | None = None,
    tokens: str | None = None,
    tasks: str | None = None,
    include: Path | None = None,
    limit: Count | None = None,
    shots: Annotated[int, Range(0, 10**4)] | None = None,
    coupling: Path | None = None,
    batch_size: Annotated[int, Range(1, 10**6)] = 16,
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Measure perplexity and bits per byte of a model on a corpus; with --tasks, its scores on tasks.

    The corpus is tokenized with the model's own tokenizer. Bits per byte do not depend on the tokenizer, so
    models with different ones can be compared. Tasks need lm-evaluation-harness (pip install "qkflow[eval]").

    examples:
      qkflow eval runs/first
      qkflow eval runs/first --data my_texts/ --split all
      qkflow eval runs/first --data wikitext-2 --split test --tokens 100k --json
      qkflow eval runs/first --tasks hellaswag,arc_easy --limit 200
      qkflow eval path/to/llama --coupling my-coupling --tasks my_task.yaml --shots 2

    Args:
        model: folder of a finished run; for tasks also a `transformers` folder or a model on the Hub.
        data: corpus: a built-in name, a path or hf:owner/name:config (default: speeches).
        split: split of the corpus: train, validation, test or all (default: validation).
        seq_len: tokens per window (default: as in training).
        tokens: maximum number of predicted tokens, evenly spaced, e.g. 100k (default: all).
        tasks: instead of a corpus: comma-separated names of harness tasks, or YAML files.
        include: folder with additional tasks in YAML files.
        limit: examples per task (default: all).
        shots: few-shot examples per prompt (default: as the task defines).
        coupling: folder written by `hf.save_adapter`, attached to the model before the tasks.
        batch_size: windows or examples per forward pass.
        device: auto, cpu, cuda or mps.
        threads: CPU threads (default: all cores).
        json: print one JSON object instead of a table.
    """
    _check_exclusive_options(
        tasks,
        corpus_options={"data": data, "split": split, "seq_len": seq_len, "tokens": tokens},
        task_options={"include": include, "limit": limit, "shots": shots, "coupling": coupling},
    )
    if split not in (None, *SPLITS, "all"):
        raise unknown("split", split, (*SPLITS, "all"))
    from qkflow.system import resolve_device
    from qkflow.training.worker import configure_process

    configure_process(threads)
    device = str(resolve_device(device))
    if tasks is not None:
        from qkflow.cli.commands.hf import evaluate_tasks

        evaluate_tasks(
            model, tasks, coupling=coupling, include=include, limit=limit, shots=shots, batch=batch_size,
            device=device, json=json,
        )  # fmt: skip
        return
    result = evaluate_corpus(
        model, data or "speeches", split or "validation", seq_len, batch_size, tokens, device
    )
    if json:
        console.emit_json(result)
        return
    from qkflow.measures.language import format_eval_result

    subject = f"{model} on {result['data']} ({result['split']}, {result['tokens']:,} tokens)"
    text = f"{subject}: {format_eval_result(result)}"
    console.out.print(text, markup=False, highlight=False, soft_wrap=True)


def evaluate_corpus(
    model: Path,
    corpus: str,
    split: str,
    seq_len: int | None,
    batch_size: int,
    tokens: str | None,
    device: str,
) -> dict[str, Any]:
    """Return the loss of a trained model on a split of a corpus; `seq_len` defaults to the trained length."""
    from qkflow.config_io import parse_count
    from qkflow.data import prepare
    from qkflow.measures.language import evaluate_loss
    from qkflow.training.pretrained import load_model, tokenizer_spec, trained_seq_len

    limit = None if tokens is None else parse_count(tokens)
    if limit == 0:
        raise InputError("--tokens must be at least 1, not 0", code="below-minimum")
    decoder, _ = load_model(model, device=device)
    token_set = prepare(corpus, tokenizer_spec(model))
    if token_set.vocab_size > decoder.config.vocab_size:
        raise InputError(
            f"the tokenizer of {model} has {token_set.vocab_size} tokens, its model "
            f"{decoder.config.vocab_size}: give the tokenizer it was trained with",
            code="vocab-size-mismatch",
        )
    splits = SPLITS if split == "all" else (split,)
    if not any(len(token_set.tokens(name)) for name in splits):
        raise InputError(f"'{corpus}' has no text in its {split} split", code="empty-split")
    seq_len = seq_len or trained_seq_len(model) or DEFAULT_SEQ_LEN
    windows = token_set.eval_windows(splits, seq_len, batch_size, limit)

    def track(batches: Iterable[Any]) -> Iterable[Any]:
        with console.progress_bar() as bar:
            yield from bar.track(batches, total=len(windows), description=f"evaluating {token_set.name}")

    measured = evaluate_loss(decoder, windows, progress=track)
    if not math.isfinite(measured.loss):
        raise InputError(
            f"the loss of {model} on '{corpus}' is not finite: its weights are too large",
            code="non-finite-loss",
        )
    result = {"model": str(model), "data": token_set.name, "split": split, "seq_len": seq_len}
    return result | measured.to_dict() | {"tokens": measured.n_tokens, "bytes": measured.n_bytes}


def _check_exclusive_options(
    tasks: str | None, *, corpus_options: dict[str, Any], task_options: dict[str, Any]
) -> None:
    """Raise InputError for an option that would have no effect."""
    if tasks is None:
        unused, reason, code = task_options, "needs --tasks", "needs-tasks"
    else:
        unused, reason, code = corpus_options, "cannot be combined with --tasks", "conflicts-with-tasks"
    for name, value in unused.items():
        if value is not None:
            raise InputError(f"--{name.replace('_', '-')} {reason}", code=code)
