"""What an attached coupling costs a `transformers` model, in training and in generation.

    python benchmarks/attach.py                    # the table in docs/huggingface.md
    python benchmarks/attach.py --couplings drift --rounds 5 --json

A fresh Llama shape (width 512, 8 heads, 4 key/value heads) and copies of it with couplings attached take
turns in one process, round by round; a ratio is the median over rounds of attached against unattached in
the same round, given with its quartiles. Above 1 is slower in training; below 1 is slower in generation.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from qkflow import console, hub

PLAIN = "(unattached)"


def shape(layers: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=layers,
        intermediate_size=2048,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
    )


def training_step(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def generation(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> Callable[[], None]:
    model.eval()

    def run() -> None:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )

    return run


def interleave(
    jobs: dict[str, Callable[[], None]], rounds: int, what: str, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every job in every round; one round of warm-up is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    with console.progress() as bar:
        task = bar.add_task(what, total=(rounds + 1) * len(jobs))
        for round_number in range(rounds + 1):
            names = list(jobs)
            for name in names if round_number % 2 else reversed(names):
                began = clock()
                jobs[name]()
                seconds[name].append(clock() - began)
                bar.advance(task)
    return {name: values[1:] for name, values in seconds.items()}


def ratios(seconds: dict[str, list[float]], *, speed: bool) -> dict[str, dict[str, float]]:
    table = {}
    for name, values in seconds.items():
        if name == PLAIN:
            continue
        pairs = [
            plain / mine if speed else mine / plain
            for mine, plain in zip(values, seconds[PLAIN], strict=True)
        ]
        low, middle, high = statistics.quantiles(pairs, n=4)
        table[name] = {"ratio": middle, "low": low, "high": high}
    return table


def main(
    couplings: str = "affine,drift,euler",
    layers: int = 4,
    vocabulary: int = 8192,
    batch: int = 4,
    length: int = 256,
    rounds: int = 15,
    prompts: int = 4,
    new_tokens: int = 48,
    threads: int = 1,
    clock: Literal["wall", "cpu"] = "wall",
    json: bool = False,
) -> None:
    """Compare attached couplings with the unattached model; both tables are ratios.

    On a machine that others use, `--clock cpu` counts the time this process computes, not the time it waits.
    """
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(shape(layers, vocabulary))
    models = {PLAIN: plain}
    for name in couplings.split(","):
        models[name] = hub.attach(copy.deepcopy(plain), name, seed=0)
    ids = torch.randint(vocabulary, (batch, length))
    prompt = torch.randint(1, vocabulary, (prompts, 16))
    makers: dict[str, tuple[bool, Callable[[PreTrainedModel], Callable[[], None]]]] = {
        "training step, time": (False, lambda model: training_step(model, ids)),
        "generate, tokens/s": (True, lambda model: generation(model, prompt, new_tokens)),
    }
    timer = time.perf_counter if clock == "wall" else time.process_time
    result: dict[str, Any] = {}
    for what, (speed, make) in makers.items():
        jobs = {name: make(model) for name, model in models.items()}
        result[what] = ratios(interleave(jobs, rounds, what, timer), speed=speed)
    if json:
        console.emit_json(result)
        return
    for what, table in result.items():
        print(f"{what}, attached against unattached:")
        for name, row in table.items():
            print(f"  {name:<12} {row['ratio']:.3f}  [{row['low']:.3f}, {row['high']:.3f}]")


if __name__ == "__main__":
    tyro.cli(main)
