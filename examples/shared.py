"""What the examples have in common: a model, a text file as blocks of tokens, and a Trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from qkflow import hf
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.errors import InputError
from qkflow.hf.pretrained import to_fast_tokenizer


def run(main: Callable[..., None]) -> None:
    """Call `main` with the command line's arguments; what is wrong with them is said in one sentence."""
    try:
        tyro.cli(main)
    except (InputError, ValueError, OSError) as error:  # the Trainer's own words on its arguments among them
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        sys.exit(130)


def model_and_tokenizer(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A fresh small model of a shape, reading bytes; or, by any other name, a pretrained model."""
    set_seed(seed)
    if name not in ("gpt2-shape", "llama-shape"):
        return hf.load_model_and_tokenizer(name)
    common = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}
    if name == "gpt2-shape":
        config: Any = GPT2Config(n_embd=128, n_layer=4, n_head=4, n_positions=256, **common)
    else:
        config = LlamaConfig(
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            **common,
        )
    return AutoModelForCausalLM.from_config(config), to_fast_tokenizer(ByteTokenizer())


def blocks(
    text: Path, tokenizer: Any, length: int, model: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A text file as blocks of tokens: the first nine tenths to train on, the rest held out."""
    longest = getattr(model.config, "max_position_embeddings", length)
    if length > longest:
        raise InputError(f"the model reads {longest} tokens at most: give --seq-len {longest} or less")
    if length < 2:
        raise InputError(f"a block of {length} tokens has no token to predict: give --seq-len 2 or more")
    try:
        tokens = tokenizer(text.read_text("utf-8"))["input_ids"]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"'{text}' cannot be read as a text ({error}): give a file in UTF-8") from None
    rows = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    if len(rows) < 2:
        raise InputError(f"'{text}' has {len(tokens)} tokens: give a text of at least {2 * length}")
    split = max(1, len(rows) * 9 // 10)
    cut = [{"input_ids": row, "labels": row} for row in rows]
    return cut[:split], cut[split:]


def train(
    model: Any,
    rows: list[dict[str, Any]],
    *,
    steps: int,
    lr: float,
    seed: int = 0,
    callbacks: tuple[TrainerCallback, ...] = (),
) -> None:
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=lr,
            per_device_train_batch_size=8,
            warmup_steps=steps // 10,
            lr_scheduler_type="cosine",
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            dataloader_pin_memory=False,
            seed=seed,
        )
        Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks)).train()


@torch.no_grad()
def held_out(model: Any, rows: list[dict[str, Any]]) -> float:
    """Mean loss per token of the held-out blocks."""
    model.eval()
    losses = []
    for start in range(0, len(rows), 8):
        ids = torch.tensor([row["input_ids"] for row in rows[start : start + 8]], device=model.device)
        losses.append((float(model(input_ids=ids, labels=ids).loss), len(ids)))
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
