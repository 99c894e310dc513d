"""What an attached coupling costs a `transformers` model, in training and in generation.

    python benchmarks/attach.py --batch 2 --threads 2      # docs/huggingface.md
    python benchmarks/attach.py --couplings drift --rounds 9 --json

A fresh Llama shape (width 512, 8 heads, 4 key/value heads) and copies of it with couplings attached take
turns in one process (`qkflow.bench.timing`). All have the very same weights, since where in memory weights
happen to lie can count for more than a coupling. Every number is time relative to the unattached model: 1.02
is 2% slower, with a 95% interval. Training moves the couplings away from their start, and one that starts as
the identity costs more from then on, so generation is measured as attached and once more with all added
weights moved; likewise a single token, over and over, which is most of generation and easiest to tell apart.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import tyro
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from qkflow import console, hf
from qkflow.bench.timing import time_interleaved
from qkflow.bench.variants import share_equal_weights

Job = Callable[[], object]


def llama(layers: int, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
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
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def copy_of(model: Any, plain: nn.Module) -> Any:
    """A copy of the model, in the memory of the plain one's weights where they are equal."""
    model = copy.deepcopy(model)
    share_equal_weights(model, plain)
    return model


@torch.no_grad()
def moved(model: Any) -> Any:
    """The model, its couplings away from their start, where training takes them."""
    for _, layer in hf.named_coupled_layers(model):
        for parameter in layer.coupling.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def training(model: Any, batch: int, length: int) -> Job:
    """One step: forward, backward, AdamW."""
    ids = torch.randint(1, model.config.vocab_size, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def generation(model: Any, prompts: int, tokens: int) -> Job:
    """`tokens` new tokens a prompt, greedily, with the default cache."""
    ids = torch.randint(1, model.config.vocab_size, (prompts, 16))
    mask = torch.ones_like(ids)

    def run() -> object:
        model.eval()
        return model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
        )

    return run


def writing(model: Any) -> Job:
    """One token in the midst of a text: what `generate` does again and again, in turns short enough to tell
    small differences from the machine's moods."""
    model.eval()
    cache = DynamicCache(config=model.config)
    text, token = torch.randint(1, model.config.vocab_size, (1, 17)).split((16, 1), dim=1)
    with torch.no_grad():
        model(input_ids=text, past_key_values=cache, use_cache=True)

    @torch.no_grad()
    def run() -> None:
        model(input_ids=token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return run


def main(
    couplings: str = "affine,drift,euler",
    layers: int = 4,
    vocabulary: int = 8192,
    batch: int = 4,
    length: int = 256,
    prompts: str = "1",
    new_tokens: int = 32,
    rounds: int = 15,
    threads: int = 1,
    json: bool = False,
) -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    plain: Any = llama(layers, vocabulary)
    coupled = {name: hf.attach(copy_of(plain, plain), name, seed=0) for name in couplings.split(",")}
    later = {name: moved(copy_of(model, plain)) for name, model in coupled.items()}
    turns = 4 * rounds  # of generation, whose calls are shorter
    works: dict[str, tuple[dict[str, Any], int, Callable[[Any], Job]]] = {
        f"training step, {batch}×{length} tokens": (
            later, rounds, lambda model: training(model, batch, length)
        )
    }  # fmt: skip
    for count in map(int, prompts.split(",")):
        for state, models in (("as attached", coupled), ("moved", later)):
            name = f"generate, {count} prompt{'s' if count > 1 else ''}, {state}"
            works[name] = (models, turns, lambda model, count=count: generation(model, count, new_tokens))
    for state, models in (("as attached", coupled), ("moved", later)):
        works[f"one token in the midst of a text, {state}"] = models, 20 * rounds, writing
    result: dict[str, Any] = {}
    with console.progress_bar() as bar:
        task = bar.add_task("interleaving", total=sum(times for _, times, _ in works.values()))
        for name, (models, times, make) in works.items():
            jobs = {coupling: make(model) for coupling, model in models.items()}
            found = time_interleaved(make(plain), jobs, rounds=times, on_round=lambda: bar.advance(task))
            result[name] = {coupling: dataclasses.asdict(ratio) for coupling, ratio in found.items()}
    if json:
        console.emit_json(result)
        return
    for name, found in result.items():
        print(f"{name}: time relative to the unattached model")
        for coupling, ratio in found.items():
            print(f"  {coupling:<12} {ratio['ratio']:.3f}  [{ratio['low']:.3f}, {ratio['high']:.3f}]")


if __name__ == "__main__":
    tyro.cli(main)
