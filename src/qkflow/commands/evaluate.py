"""`qkflow eval`: how well a trained model predicts a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from qkflow import console
from qkflow.errors import InputError


def evaluate(
    model: Annotated[Path, tyro.conf.Positional],
    *,
    data: str = "speeches",
    split: Literal["train", "validation", "test", "all"] = "validation",
    length: int = 128,
    batch: int = 16,
    tokens: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Perplexity and bits per byte of a model on a corpus, read with the model's own tokenizer.

    Bits per byte do not depend on the tokenizer, so models with different ones can be compared.

    examples:
      qkflow eval runs/first
      qkflow eval runs/first --data my_texts/ --split all
      qkflow eval runs/first --data wikitext-2 --split test --tokens 100k --json

    Args:
        model: folder of a finished run, or its model folder.
        data: corpus: a built-in name, a path or hf:owner/name:config.
        split: which part of the corpus.
        length: tokens that the model sees at a time.
        batch: windows computed at once.
        tokens: how many to predict at most, spread evenly, e.g. 100k (default: all).
        device: auto, cpu, cuda or mps.
        threads: of the processor (default: all cores).
        json: print one JSON object instead of a table.
    """
    from qkflow.data import EvalWindows, prepare
    from qkflow.measures.language import score
    from qkflow.training.config import parse_count
    from qkflow.training.model_folder import load_model, tokenizer_spec
    from qkflow.training.parallel import find_device
    from qkflow.training.worker import prepare_process

    if length < 1 or batch < 1:
        raise InputError(f"--length and --batch must be at least 1, not {length} and {batch}")
    prepare_process(threads)
    decoder, _ = load_model(model, device=find_device(device))
    text = prepare(data, tokenizer_spec(model))
    parts = ("train", "validation", "test") if split == "all" else (split,)
    found = np.concatenate([text.tokens(part) for part in parts])
    if not len(found):
        raise InputError(f"'{data}' has no text in its {split} split")
    limit = None if tokens is None else parse_count(tokens)
    windows = EvalWindows(found, length, batch, limit, token_bytes=text.token_bytes)

    def watch(batches: Iterable[Any]) -> Iterable[Any]:
        with console.progress() as bar:
            yield from bar.track(batches, total=len(windows), description=f"reading {text.name}")

    measured = score(decoder, windows, watch=watch)
    result = {"model": str(model), "data": text.name, "split": split, **measured.to_dict()}
    result |= {"tokens": measured.tokens, "bytes": measured.bytes}
    if json:
        console.emit_json(result)
        return
    bits = f", {measured.bits_per_byte:.4f} bits per byte" if measured.bits_per_byte else ""
    console.out.print(
        f"{model} on {text.name} ({split}, {measured.tokens:,} tokens): "
        f"loss {measured.loss:.4f}, perplexity {measured.perplexity:.2f}{bits}",
        highlight=False,
        soft_wrap=True,
    )
