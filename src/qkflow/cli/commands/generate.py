"""`qkflow generate`: sample text from a trained model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from qkflow import console
from qkflow.config_io import Range, Seed, check_utf8


def generate(
    model: Annotated[Path, tyro.conf.Positional],
    *,
    prompt: str = "",
    tokens: Annotated[int, Range(1, 10**7)] = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: Seed | None = None,
    samples: Annotated[int, Range(1, 10**5)] = 1,
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Generate text from a prompt with a trained model, printed token by token.

    examples:
      qkflow generate runs/first --prompt "My fellow citizens"
      qkflow generate runs/first --prompt "The state of" --tokens 300 --temperature 0.7 --top-p 0.9 --seed 1
      qkflow generate runs/first --samples 4 --json

    Args:
        model: folder of a finished run, or its model folder.
        prompt: text to continue (default: the start of a document).
        tokens: maximum number of new tokens; the end-of-document token ends a text earlier.
        temperature: of the softmax; 0 takes the argmax.
        top_k: sample from the k most probable tokens only.
        top_p: sample from the smallest set of tokens with this total probability.
        seed: of the sampling (default: random).
        samples: number of texts.
        device: auto, cpu, cuda or mps.
        threads: CPU threads (default: all cores).
        json: print one JSON object instead of text.
    """
    import torch

    from qkflow.models.generate import Sampler
    from qkflow.models.generate import generate as continue_ids
    from qkflow.system import resolve_device
    from qkflow.training.pretrained import load_model
    from qkflow.training.worker import configure_process

    check_utf8("--prompt", prompt)
    Sampler(temperature, top_k, top_p)  # reports a wrong value before anything is printed
    configure_process(threads)
    decoder, tokenizer = load_model(model, device=resolve_device(device))
    prompt_ids = tokenizer.encode_with_bos(prompt)
    ids = torch.tensor([prompt_ids] * samples)
    printer = _TextStreamer(tokenizer, prompt) if samples == 1 and not json else None
    start_time = time.perf_counter()
    output = continue_ids(
        decoder,
        ids,
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=tokenizer.eos_token_id,
        on_token=printer,
    )
    seconds = time.perf_counter() - start_time
    count = output.shape[1] - ids.shape[1]
    texts = [
        prompt + tokenizer.decode(_truncate_at_eos(row, tokenizer.eos_token_id))
        for row in output[:, len(prompt_ids) :].tolist()
    ]
    if json:
        console.emit_json({"texts": texts, "tokens": count, "tokens_per_second": samples * count / seconds})
        return
    if printer is None:
        for number, text in enumerate(texts, 1):
            print(f"--- {number}\n{_to_terminal(text)}")
    else:
        printer.finish()
    console.err.print(
        f"{count} tokens, {samples * count / seconds:.0f} tokens/s", style="dim", highlight=False
    )


def _truncate_at_eos(tokens: list[int], eos_token_id: int) -> list[int]:
    return tokens[: tokens.index(eos_token_id)] if eos_token_id in tokens else tokens


def _to_terminal(text: str) -> str:
    """Escape control characters, which a model may generate, on a terminal. A file gets them as they are."""
    return console.without_controls(text) if sys.stdout.isatty() else text


class _TextStreamer:
    """Prints text token by token. A character is held back until all of its bytes have been generated."""

    def __init__(self, tokenizer: Any, prompt: str) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._n_printed = 0
        sys.stdout.write(prompt)

    def __call__(self, token: Any) -> None:
        self._tokens.append(int(token))
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stdout.write(_to_terminal(text[self._n_printed :]))
        sys.stdout.flush()
        self._n_printed = len(text)

    def finish(self) -> None:
        self._write(self._tokenizer.decode(self._tokens))
        sys.stdout.write("\n")
