"""Attach a coupling to a model, train it on a text file, and save the adapter.

    python examples/finetune_with_coupling.py my.txt
    python examples/finetune_with_coupling.py my.txt --model gpt2-shape --coupling drift --freeze
    python examples/finetune_with_coupling.py my.txt --model path/to/a/pretrained/model

A coupling with identity init leaves the model unchanged, so training continues from its weights. A drift is
merged at the end: the result is a plain `transformers` model.
"""

from __future__ import annotations

from pathlib import Path

from shared import eval_loss, model_and_tokenizer, run, train, train_and_eval_blocks

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
    seq_len: int = 128,
    seed: int = 0,
    out: Path = Path("finetuned"),
) -> None:
    if out.exists():
        raise InputError(f"--out '{out}' exists already: name a new folder", code="folder-exists")
    out.mkdir(parents=True)  # fails before training if the folder is not writable
    out.rmdir()
    network, tokenizer = model_and_tokenizer(model, seed)
    train_blocks, eval_blocks = train_and_eval_blocks(text, tokenizer, seq_len, network)
    print(f"held-out loss before:     {eval_loss(network, eval_blocks):.4f}")

    hf.attach(network, coupling, seed=seed, freeze_base=freeze)
    hf.print_trainable_parameters(network)
    print(f"with {coupling} attached:   {eval_loss(network, eval_blocks):.4f}")

    train(network, train_blocks, steps=steps, lr=lr, seed=seed)
    print(f"after {steps} steps:         {eval_loss(network, eval_blocks):.4f}")

    if coupling.startswith("drift"):
        hf.merge(network)
        print(f"merged, a plain model:    {eval_loss(network, eval_blocks):.4f}")
        network.save_pretrained(out)
    else:
        hf.save_adapter(network, out / "coupling")
        hf.detach(network).save_pretrained(out)
        hf.load_adapter(network, out / "coupling")
        print(f"saved and loaded again:   {eval_loss(network, eval_blocks):.4f}")
    tokenizer.save_pretrained(out)
    prompt = tokenizer(text.read_text("utf-8")[:40], return_tensors="pt", return_token_type_ids=False)
    generated = network.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(generated[0], skip_special_tokens=True))


if __name__ == "__main__":
    run(main)
