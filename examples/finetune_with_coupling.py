"""Attach a coupling to a model, train it on a text file, keep the adapter.

    python examples/finetune_with_coupling.py my.txt
    python examples/finetune_with_coupling.py my.txt --model gpt2-shape --coupling drift --freeze
    python examples/finetune_with_coupling.py my.txt --model path/to/a/pretrained/model

An identity coupling leaves the model as it was, so training goes on from where the model is. A drift is
merged at the end: what is left is a plain `transformers` model.
"""

from __future__ import annotations

from pathlib import Path

from shared import blocks, held_out, model_and_tokenizer, run, train

from qkflow import hf
from qkflow.errors import InputError


def main(
    text: Path,
    /,
    model: str = "llama-shape",
    coupling: str = "affine",
    freeze: bool = False,
    steps: int = 200,
    lr: float = 1e-3,
    length: int = 128,
    seed: int = 0,
    out: Path = Path("finetuned"),
) -> None:
    if out.exists():  # what is left of another model there would be loaded with this one
        raise InputError(f"'{out}' exists already: give --out a folder that does not")
    out.mkdir(parents=True)  # now, lest training be lost for want of a place
    out.rmdir()
    network, tokenizer = model_and_tokenizer(model, seed)
    rows, rest = blocks(text, tokenizer, length, network)
    print(f"held-out loss as it comes: {held_out(network, rest):.4f}")

    hf.attach(network, coupling, seed=seed, freeze_base=freeze)
    hf.print_trainable_parameters(network)
    print(f"with {coupling} attached:   {held_out(network, rest):.4f}")

    train(network, rows, steps=steps, lr=lr, seed=seed)
    trained = held_out(network, rest)
    print(f"after {steps} steps:         {trained:.4f}")

    if coupling.startswith("drift"):
        hf.merge(network)
        print(f"merged, a plain model:    {held_out(network, rest):.4f}")
        network.save_pretrained(out)
    else:
        hf.save_adapter(network, out / "coupling")
        hf.detach(network).save_pretrained(out)
        hf.load_adapter(network, out / "coupling")
        print(f"saved and loaded again:   {held_out(network, rest):.4f}")
    tokenizer.save_pretrained(out)
    prompt = tokenizer(text.read_text("utf-8")[:40], return_tensors="pt", return_token_type_ids=False)
    written = network.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    run(main)
