"""Which of a few changes helps on a text file, at the same steps and over seeds?

    python examples/compare.py my.txt
    python examples/compare.py my.txt --model gpt2-shape --variants standard,symmetric=1,drift,affine,ratio=10

Every variant of a seed starts from the same weights and sees the same batches, so what is printed besides the
mean is the spread of *paired* differences to the first variant. A start (`symmetric=1`, `mimetic`, `fan_in`)
costs nothing: a coupling has earned its place only if it beats the best of them. For a verdict with intervals
and tuned learning rates use `qkflow compare`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from shared import blocks, held_out, model_and_tokenizer, run, train

from qkflow import hf
from qkflow.attention import couplings
from qkflow.attention.registry import Spec


def one(text: Path, model: str, variant: str, *, steps: int, lr: float, length: int, seed: int) -> float:
    network, tokenizer = model_and_tokenizer(model, seed)
    rows, rest = blocks(text, tokenizer, length, network)
    callbacks: tuple[hf.PaceCallback, ...] = ()
    if variant.startswith("ratio="):
        callbacks = (hf.PaceCallback(variant.removeprefix("ratio=")),)
    elif Spec.parse(variant).name in couplings.names():
        hf.attach(network, variant, seed=seed)
    elif variant != "standard":
        hf.reinitialize(network, variant, seed=seed)
    train(network, rows, steps=steps, lr=lr, seed=seed, callbacks=callbacks)
    return held_out(network, rest)


def main(
    text: Path,
    /,
    model: str = "llama-shape",
    variants: str = "standard,symmetric=1,drift,affine,ratio=10",
    seeds: int = 3,
    steps: int = 100,
    lr: float = 1e-3,
    length: int = 128,
) -> None:
    names = variants.split(",")
    losses = {
        name: [one(text, model, name, steps=steps, lr=lr, length=length, seed=seed) for seed in range(seeds)]
        for name in names
    }
    print(f"{'variant':<16} {'held-out loss':>13}   difference to {names[0]}")
    for name, found in losses.items():
        paired = [mine - base for mine, base in zip(found, losses[names[0]], strict=True)]
        spread = f" ± {statistics.stdev(paired):.4f}" if seeds > 1 else ""
        print(f"{name:<16} {statistics.mean(found):>13.4f}   {statistics.mean(paired):+.4f}{spread}")


if __name__ == "__main__":
    run(main)
