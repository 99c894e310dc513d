"""Compare a few changes to a model on a text file, at the same number of steps and over seeds.

    python examples/compare.py my.txt
    python examples/compare.py my.txt --model gpt2-shape --variants standard,symmetric=1,drift,affine,ratio=10

All variants of a seed share their initial weights and batches, so the printed spread is that of *paired*
differences to the first variant. An init (`symmetric=1`, `mimetic`, `fan_in`) costs nothing: a coupling is
worth its cost only if it beats the best init. For a verdict with intervals and tuned learning rates use
`qkflow compare`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from shared import eval_loss, model_and_tokenizer, run, train, train_and_eval_blocks

from qkflow import hf
from qkflow.attention import couplings
from qkflow.attention.registry import Spec


def train_variant(
    text: Path, model: str, variant: str, *, steps: int, lr: float, seq_len: int, seed: int
) -> float:
    """Return the held-out loss of one variant."""
    network, tokenizer = model_and_tokenizer(model, seed)
    train_blocks, eval_blocks = train_and_eval_blocks(text, tokenizer, seq_len, network)
    callbacks: tuple[hf.PaceCallback, ...] = ()
    if variant.startswith("ratio="):
        callbacks = (hf.PaceCallback(variant.removeprefix("ratio=")),)
    elif Spec.parse(variant).name in couplings.names():
        hf.attach(network, variant, seed=seed)
    elif variant != "standard":
        hf.reinitialize(network, variant, seed=seed)
    train(network, train_blocks, steps=steps, lr=lr, seed=seed, callbacks=callbacks)
    return eval_loss(network, eval_blocks)


def main(
    text: Path,
    /,
    model: str = "llama-shape",
    variants: str = "standard,symmetric=1,drift,affine,ratio=10",
    seeds: int = 3,
    steps: int = 100,
    lr: float = 1e-3,
    seq_len: int = 128,
) -> None:
    names = variants.split(",")
    losses = {
        name: [
            train_variant(text, model, name, steps=steps, lr=lr, seq_len=seq_len, seed=seed)
            for seed in range(seeds)
        ]
        for name in names
    }
    print(f"{'variant':<16} {'held-out loss':>13}   difference to {names[0]}")
    for name, values in losses.items():
        paired = [loss - baseline for loss, baseline in zip(values, losses[names[0]], strict=True)]
        spread = f" ± {statistics.stdev(paired):.4f}" if seeds > 1 else ""
        print(f"{name:<16} {statistics.mean(values):>13.4f}   {statistics.mean(paired):+.4f}{spread}")


if __name__ == "__main__":
    run(main)
