"""Cost of an attached coupling in a `transformers` model: training, generation and one cached token.

    python benchmarks/attach.py --batch-size 2 --threads 2      # docs/huggingface.md
    python benchmarks/attach.py --couplings drift --rounds 9 --json

A Llama (dim 512, 8 heads, 4 key/value heads) and copies of it with couplings are timed interleaved in one
process (`qkflow.bench.timing`) and share the memory of equal weights, because the memory location of weights
can matter more than a coupling. Every number is time relative to the model without a coupling, with a 95%
interval: 1.02 is 2% slower. The couplings' weights are perturbed, as after training. Inference is timed with
the regular forward and after `hf.prepare_for_inference`; then also at init, where `affine`
is the identity.
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


def llama(n_layers: int, vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=n_layers,
        intermediate_size=2048,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def copy_of(model: Any, base: nn.Module) -> Any:
    """Copy a model; weights equal to those of `base` share its memory."""
    model = copy.deepcopy(model)
    share_equal_weights(model, base)
    return model


@torch.no_grad()
def perturbed(model: Any) -> Any:
    """Add noise to the weights of the couplings, in place."""
    for _, layer in hf.named_coupled_layers(model):
        for parameter in layer.coupling.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def prepared(model: Any) -> Any:
    return hf.prepare_for_inference(model.eval())


def training_step(model: Any, batch: int, length: int) -> Job:
    """Return one training step: forward, backward, AdamW."""
    ids = torch.randint(1, model.config.vocab_size, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def generation(model: Any, prompts: int, tokens: int) -> Job:
    """Return greedy generation of `tokens` tokens per prompt with the default cache."""
    ids = torch.randint(1, model.config.vocab_size, (prompts, 16))
    mask = torch.ones_like(ids)

    def generate() -> object:
        return model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
        )

    return generate


def cached_token(model: Any) -> Job:
    """Return the forward pass of one token after 16 cached ones: the inner loop of `generate`."""
    cache = DynamicCache(config=model.config)
    text, token = torch.randint(1, model.config.vocab_size, (1, 17)).split((16, 1), dim=1)
    with torch.no_grad():
        model(input_ids=text, past_key_values=cache, use_cache=True)

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return forward


def main(
    couplings: str = "affine,drift,euler",
    n_layers: int = 4,
    vocab_size: int = 8192,
    batch_size: int = 4,
    seq_len: int = 256,
    prompts: str = "1",
    new_tokens: int = 32,
    rounds: int = 15,
    threads: int = 1,
    json: bool = False,
) -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    base: Any = llama(n_layers, vocab_size).eval()
    at_init = {name: hf.attach(copy_of(base, base), name, seed=0) for name in couplings.split(",")}
    trained = {name: perturbed(copy_of(model, base)) for name, model in at_init.items()}
    inference = {
        "regular": trained,
        "prepared": {name: prepared(copy_of(model, base)) for name, model in trained.items()},
        "prepared, at init": {name: prepared(model) for name, model in at_init.items()},
    }
    timings: dict[str, tuple[dict[str, Any], int, Callable[[Any], Job]]] = {}
    for state, models in inference.items():
        for count in map(int, prompts.split(",")):
            name = f"generate, {count} prompt{'s' if count > 1 else ''}, {state}"
            timings[name] = (
                models, 4 * rounds, lambda model, count=count: generation(model, count, new_tokens)
            )  # fmt: skip
        timings[f"one cached token, {state}"] = models, 20 * rounds, cached_token
    # last: training changes the weights
    timings[f"training step, {batch_size}×{seq_len} tokens"] = (
        trained, rounds, lambda model: training_step(model, batch_size, seq_len)
    )  # fmt: skip
    result: dict[str, Any] = {}
    with console.progress_bar() as bar:
        task = bar.add_task("interleaving", total=sum(times for _, times, _ in timings.values()))
        for name, (models, times, make) in timings.items():
            jobs = {coupling: make(model) for coupling, model in models.items()}
            ratios = time_interleaved(make(base), jobs, rounds=times, on_round=lambda: bar.advance(task))
            result[name] = {coupling: dataclasses.asdict(ratio) for coupling, ratio in ratios.items()}
    if json:
        console.emit_json(result)
        return
    for name, ratios in result.items():
        print(f"{name}: time relative to the model without a coupling")
        for coupling, ratio in ratios.items():
            print(f"  {coupling:<12} {ratio['ratio']:.3f}  [{ratio['low']:.3f}, {ratio['high']:.3f}]")


if __name__ == "__main__":
    tyro.cli(main)
