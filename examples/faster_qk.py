"""Go on training a model with a query-key circuit that learns faster than the rest.

    python examples/faster_qk.py my.txt
    python examples/faster_qk.py my.txt --model gpt2-shape --ratio increasing:20

One line does it: `callbacks=[PaceCallback(ratio)]`. The optimizer, its schedule and weight decay stay the
Trainer's own, so the ratio is all that changes. GPT-2's fused weights are split for it and joined again.
"""

from __future__ import annotations

import copy
from pathlib import Path

from shared import blocks, held_out, model_and_tokenizer, run, train

from qkflow import hf


def main(
    text: Path,
    /,
    model: str = "llama-shape",
    ratio: str = "10",
    before: int = 100,
    steps: int = 100,
    lr: float = 1e-3,
    length: int = 128,
    seed: int = 0,
) -> None:
    network, tokenizer = model_and_tokenizer(model, seed)
    rows, rest = blocks(text, tokenizer, length, network)
    train(network, rows, steps=before, lr=lr, seed=seed)
    print(f"after {before} steps at one rate: {held_out(network, rest):.4f}")
    for name, callbacks in {"at one rate": (), f"QK at ratio {ratio}": (hf.PaceCallback(ratio),)}.items():
        goes_on = copy.deepcopy(network)
        train(goes_on, rows, steps=steps, lr=lr / 3, seed=seed + 1, callbacks=callbacks)
        hf.fuse_qkv(goes_on)
        print(f"{steps} steps more, {name}: {held_out(goes_on, rest):.4f}")


if __name__ == "__main__":
    run(main)
