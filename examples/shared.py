"""Shared parts of the examples: a model, a text file as blocks of tokens, and a Trainer."""

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
    """Call `main` with the command-line arguments; print one line for bad input."""
    try:
        tyro.cli(main)
    except InputError as error:
        print(f"{error} [{error.code}]", file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError) as error:  # e.g. from TrainingArguments
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


def model_and_tokenizer(name: str, seed: int = 0) -> tuple[Any, Any]:
    """Return an untrained byte-level model (`gpt2-shape`, `llama-shape`), or a pretrained one."""
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


def train_and_eval_blocks(
    text: Path, tokenizer: Any, seq_len: int, model: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split a text file into blocks of `seq_len` tokens: the first 90% for training, the rest held out."""
    max_len = getattr(model.config, "max_position_embeddings", seq_len)
    if seq_len > max_len:
        raise InputError(
            f"--seq-len {seq_len} is too long: the model has {max_len} positions", code="seq-len-too-long"
        )
    if seq_len < 2:
        raise InputError(
            f"--seq-len {seq_len} leaves no token to predict: use 2 or more", code="seq-len-too-short"
        )
    try:
        tokens = tokenizer(text.read_text("utf-8"))["input_ids"]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"'{text}' cannot be read as text ({error}): give a UTF-8 file", code="unreadable-text"
        ) from None
    rows = [tokens[start : start + seq_len] for start in range(0, len(tokens) - seq_len + 1, seq_len)]
    if len(rows) < 2:
        raise InputError(
            f"'{text}' has {len(tokens)} tokens: give a text of at least {2 * seq_len}", code="text-too-short"
        )
    n_train = max(1, len(rows) * 9 // 10)
    blocks = [{"input_ids": row, "labels": row} for row in rows]
    return blocks[:n_train], blocks[n_train:]


def train(
    model: Any,
    blocks: list[dict[str, Any]],
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
        Trainer(model, arguments, train_dataset=blocks, callbacks=list(callbacks)).train()


@torch.no_grad()
def eval_loss(model: Any, blocks: list[dict[str, Any]]) -> float:
    """Return the mean loss per token."""
    model.eval()
    losses = []
    for start in range(0, len(blocks), 8):
        batch = [block["input_ids"] for block in blocks[start : start + 8]]
        ids = torch.tensor(batch, device=model.device)
        losses.append((float(model(input_ids=ids, labels=ids).loss), len(ids)))
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
