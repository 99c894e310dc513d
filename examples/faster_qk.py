"""Continue training a model with a higher learning rate for its query-key circuit.

    python examples/faster_qk.py my.txt
    python examples/faster_qk.py my.txt --model gpt2-shape --ratio increasing:20

It takes one line: `callbacks=[PaceCallback(ratio)]`. The Trainer keeps its optimizer, schedule and weight
decay, so the ratio is all that changes. GPT-2's fused weights are split for training and fused again.
"""

from __future__ import annotations

import copy
from pathlib import Path

from shared import eval_loss, model_and_tokenizer, run, train, train_and_eval_blocks

from qkflow import hf


def main(
    text: Path,
    /,
    model: str = "llama-shape",
    ratio: str = "10",
    before: int = 100,
    steps: int = 100,
    lr: float = 1e-3,
    seq_len: int = 128,
    seed: int = 0,
) -> None:
    network, tokenizer = model_and_tokenizer(model, seed)
    train_blocks, eval_blocks = train_and_eval_blocks(text, tokenizer, seq_len, network)
    train(network, train_blocks, steps=before, lr=lr, seed=seed)
    print(f"after {before} steps at one rate: {eval_loss(network, eval_blocks):.4f}")
    for name, callbacks in {"at one rate": (), f"QK at ratio {ratio}": (hf.PaceCallback(ratio),)}.items():
        continued = copy.deepcopy(network)
        train(continued, train_blocks, steps=steps, lr=lr / 3, seed=seed + 1, callbacks=callbacks)
        hf.fuse_qkv(continued)
        print(f"{steps} more steps, {name}: {eval_loss(continued, eval_blocks):.4f}")


if __name__ == "__main__":
    run(main)
