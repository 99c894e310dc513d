"""A trained model as a folder that anybody can load: config.json, model.safetensors, tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkflow import files
from qkflow.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_from_str
from qkflow.errors import InputError
from qkflow.models import Decoder, ModelConfig
from qkflow.training.tensor_file import write_tensors

MODEL_CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
TOKENIZER_NAME, TOKENIZER_CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
MODEL_FORMAT = "qkflow-decoder"


def full_state_dict(model: Decoder) -> dict[str, Tensor]:
    """Every weight on the CPU, put together from its shards where it has any."""
    whole = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole[name] = tensor.detach().cpu().contiguous()
    return whole


def save_model(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    *,
    length: int | None = None,
    special_tokens: dict[str, Any] | None = None,
) -> None:
    """Write the folder in one go: it is there with everything in it, or not at all.

    `length` is that of the texts the model was trained on, `special_tokens` are what a config of
    `transformers` calls so; both are handed on by `export`, where they are known.
    """
    with files.staging_folder(folder) as staging:
        write_tensors(staging / WEIGHTS_NAME, weights)
        files.write_atomic(staging / TOKENIZER_NAME, tokenizer.to_str())
        if isinstance(tokenizer, HuggingFaceTokenizer):
            end = tokenizer.backend_tokenizer.id_to_token(tokenizer.eos_token_id)
            files.write_json(staging / TOKENIZER_CONFIG_NAME, {"eos_token": end})
        described = {
            "format": MODEL_FORMAT,
            "model": config.to_dict(),
            "end_of_document": tokenizer.eos_token_id,
            "start_of_document": tokenizer.bos_token_id,
            "seq_len": length,
            "special_tokens": special_tokens,
        }
        files.write_json(staging / MODEL_CONFIG_NAME, {k: v for k, v in described.items() if v is not None})


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[Decoder, Tokenizer]:
    """The model and tokenizer of a finished run's folder, or of its `model` folder."""
    folder = find_model_dir(Path(path))
    described = _read_model_config(folder)
    config = ModelConfig.from_dict(described["model"])
    model = Decoder(config, device="meta").to_empty(device=device)
    _load_weights(model, folder / WEIGHTS_NAME, device)
    ends = described["end_of_document"], described["start_of_document"]
    return model.eval(), _load_tokenizer(folder / TOKENIZER_NAME, *ends)


def transformers_config(path: str | Path) -> dict[str, Any]:
    """What a config of `transformers` says besides the shape: special tokens, and the length in training."""
    described = _read_model_config(find_model_dir(Path(path)))
    end, length = described["end_of_document"], described["seq_len"]
    special = {"eos_token_id": end, "pad_token_id": end, **(described["special_tokens"] or {})}
    return special if length is None else {**special, "max_position_embeddings": length}


def tokenizer_spec(path: str | Path) -> str:
    """The tokenizer of a model, as `qkflow.data.prepare` takes it."""
    folder = find_model_dir(Path(path))
    is_bytes = _read_json(folder / TOKENIZER_NAME).get("type") == "bytes"
    return "bytes" if is_bytes else str(folder / TOKENIZER_NAME)


def find_model_dir(path: Path) -> Path:
    """The model folder that a path stands for."""
    for folder in (path, path / "model"):
        if (folder / MODEL_CONFIG_NAME).is_file():
            return folder
    if (path / "config.yaml").is_file():
        raise InputError(f"the run in {path} is not finished: `qkflow train {path}` goes on with it")
    if not path.exists():
        raise InputError(
            f"there is no model at {path}: give the folder of a run that `qkflow train` finished"
        )
    raise InputError(
        f"{path} holds no model: there is no {MODEL_CONFIG_NAME} in it, nor in a folder 'model' of it"
    )


def check_finite_weights(source: str | Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Weights that are no numbers make a model that scores anything at all."""
    for name, tensor in weights:
        values = tensor.float() if tensor.itemsize == 1 else tensor  # of eight bits torch cannot say
        if not bool(values.isfinite().all()):
            raise InputError(f"{source} is of no use: '{name}' holds values that are not finite numbers")


def _read_model_config(folder: Path) -> dict[str, Any]:
    """What the config says; None for what is known of some models only."""
    described = _read_json(folder / MODEL_CONFIG_NAME)
    if described.get("format") != MODEL_FORMAT:
        raise InputError(
            f"{folder / MODEL_CONFIG_NAME} does not describe a qkflow model: `qkflow import {folder} OUT` makes one "
            "of a transformers folder"
        )
    for name, kind in (("model", dict), ("end_of_document", int)):
        if not isinstance(described.get(name), kind):
            raise InputError(
                f"{folder / MODEL_CONFIG_NAME} is damaged: it does not say the '{name}' of a qkflow model"
            )
    for name, kind in (("start_of_document", int), ("seq_len", int), ("special_tokens", dict)):
        if not isinstance(described.setdefault(name), kind | None):
            raise InputError(f"{folder / MODEL_CONFIG_NAME} is damaged: its '{name}' is {described[name]!r}")
    return described


def _load_weights(model: Decoder, path: Path, device: torch.device | str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path, device=str(device))
        check_finite_weights(path, weights.items())
        model.load_state_dict(weights)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except RuntimeError as error:
        raise InputError(
            f"{path} does not hold the weights of its config: {str(error).splitlines()[-1]}"
        ) from None


def _load_tokenizer(path: Path, end_of_document: int, start_of_document: int | None) -> Tokenizer:
    try:
        return tokenizer_from_str(path.read_text("utf-8"), end_of_document, start_of_document)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path} cannot be read as a tokenizer: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} does not describe a qkflow model")
    return values
