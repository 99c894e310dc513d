"""Save and load a trained model as a folder: config.json, model.safetensors, tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkflow import files
from qkflow.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_from_str
from qkflow.errors import InputError
from qkflow.models import Decoder, ModelConfig
from qkflow.plain_data import open_regular, read_json, read_text
from qkflow.training.tensor_file import write_tensors

MODEL_CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
MAX_STORED_INT = 10**9  # of token ids and lengths
TOKENIZER_NAME, TOKENIZER_CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
MODEL_FORMAT, OLD_MODEL_FORMAT = "qkflow-decoder-2", "qkflow-decoder"


def full_state_dict(model: Decoder) -> dict[str, Tensor]:
    """Return all weights on the CPU; FSDP tensors are gathered."""
    weights = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        weights[name] = tensor.detach().cpu().contiguous()
    return weights


def save_model(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    *,
    seq_len: int | None = None,
    special_tokens: dict[str, Any] | None = None,
) -> None:
    """Write a model folder atomically: it appears complete, or not at all.

    `seq_len` is the length of the windows in training: the default of `qkflow eval`, and
    `max_position_embeddings` of an export. `special_tokens` are token ids of a `transformers` config to keep
    for an export.
    """
    with files.staging_folder(folder) as staging:
        write_tensors(staging / WEIGHTS_NAME, weights)
        files.write_atomic(staging / TOKENIZER_NAME, tokenizer.to_str())
        if isinstance(tokenizer, HuggingFaceTokenizer):
            end = tokenizer.backend_tokenizer.id_to_token(tokenizer.eos_token_id)
            files.write_json(staging / TOKENIZER_CONFIG_NAME, {"eos_token": end})
        content = {
            "format": MODEL_FORMAT,
            "model": config.to_dict(),
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "seq_len": seq_len,
            "special_tokens": special_tokens,
        }
        files.write_json(staging / MODEL_CONFIG_NAME, {k: v for k, v in content.items() if v is not None})


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[Decoder, Tokenizer]:
    """Return the model, in eval mode, and the tokenizer of a finished run or of its `model` folder."""
    folder = find_model_dir(Path(path))
    stored = _read_model_config(folder)
    model = Decoder(stored["model"], device="meta").to_empty(device=device)
    _load_weights(model, folder / WEIGHTS_NAME, device)
    tokenizer = _load_tokenizer(folder / TOKENIZER_NAME, stored["eos_token_id"], stored["bos_token_id"])
    return model.eval(), tokenizer


def load_model_config(path: str | Path) -> ModelConfig:
    """Return the config of the model of a finished run or of its `model` folder."""
    config: ModelConfig = _read_model_config(find_model_dir(Path(path)))["model"]
    return config


def load_model_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a finished run or of its `model` folder."""
    folder = find_model_dir(Path(path))
    stored = _read_model_config(folder)
    return _load_tokenizer(folder / TOKENIZER_NAME, stored["eos_token_id"], stored["bos_token_id"])


def trained_seq_len(path: str | Path) -> int | None:
    """Return the number of tokens per window that a model was trained on; None if it is not known."""
    seq_len: int | None = _read_model_config(find_model_dir(Path(path)))["seq_len"]
    return seq_len


def transformers_config(path: str | Path) -> dict[str, Any]:
    """Return the fields of a `transformers` config besides the shape: special tokens and trained length."""
    stored = _read_model_config(find_model_dir(Path(path)))
    eos, seq_len = stored["eos_token_id"], stored["seq_len"]
    special = {"eos_token_id": eos, "pad_token_id": eos, **(stored["special_tokens"] or {})}
    return special if seq_len is None else {**special, "max_position_embeddings": seq_len}


def tokenizer_spec(path: str | Path) -> str:
    """Return the tokenizer of a model in the form that `qkflow.data.prepare` takes."""
    folder = find_model_dir(Path(path))
    is_bytes = _read_json(folder / TOKENIZER_NAME).get("type") == "bytes"
    return "bytes" if is_bytes else str(folder / TOKENIZER_NAME)


def find_model_dir(path: Path) -> Path:
    """Return the model folder at `path`: itself, or its subfolder `model`."""
    for folder in (path, path / "model"):
        if (folder / MODEL_CONFIG_NAME).is_file():
            return folder
    if (path / "config.yaml").is_file():
        raise InputError(
            f"the run in {path} is not finished: `qkflow train {path}` resumes it", code="run-not-finished"
        )
    if not path.exists():
        raise InputError(
            f"there is no model at {path}: pass the folder of a run that `qkflow train` finished",
            code="model-not-found",
        )
    raise InputError(
        f"{path} contains no model: neither it nor its folder 'model' has a {MODEL_CONFIG_NAME}",
        code="not-a-model-folder",
    )


def check_finite_weights(source: str | Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise InputError for weights that contain NaN or infinity."""
    for name, tensor in weights:
        values = tensor.float() if tensor.itemsize == 1 else tensor  # torch has no isfinite for 8-bit floats
        if not bool(values.isfinite().all()):
            raise InputError(
                f"{source} cannot be used: '{name}' contains NaN or infinite values",
                code="non-finite-weights",
            )


def _read_model_config(folder: Path) -> dict[str, Any]:
    """Return config.json with `model` as a ModelConfig; missing optional entries are None."""
    path = folder / MODEL_CONFIG_NAME
    stored = _read_json(path)
    if stored.get("format") == OLD_MODEL_FORMAT:
        raise InputError(
            f"{path} was saved by an older version of qkflow: use that version, or train the model again",
            code="model-format",
        )
    if stored.get("format") != MODEL_FORMAT:
        raise InputError(
            f"{path} does not describe a qkflow model: convert a transformers folder with "
            f"`qkflow import {folder} OUT`",
            code="not-a-qkflow-model",
        )
    for name, kind, required in (
        ("model", dict, True),
        ("eos_token_id", int, True),
        ("bos_token_id", int, False),
        ("seq_len", int, False),
        ("special_tokens", dict, False),
    ):
        value = stored.setdefault(name)
        is_kind = isinstance(value, kind) and (not isinstance(value, int) or 0 <= value <= MAX_STORED_INT)
        if not is_kind and (required or value is not None):
            raise InputError(f"{path} is damaged: '{name}' is {value!r}", code="corrupt-model")
    try:
        stored["model"] = ModelConfig.from_dict(stored["model"])
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}", code="corrupt-model") from None
    return stored


def _load_weights(model: Decoder, path: Path, device: torch.device | str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        open_regular(path).close()  # raises for a device or a pipe
        weights = load_file(path, device=str(device))
        check_finite_weights(path, weights.items())
        model.load_state_dict(weights)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}", code="corrupt-model") from None
    except RuntimeError as error:
        raise InputError(
            f"the weights in {path} do not fit its config: {str(error).splitlines()[-1].strip()}",
            code="weights-do-not-fit",
        ) from None


def _load_tokenizer(path: Path, eos_token_id: int, bos_token_id: int | None) -> Tokenizer:
    try:
        return tokenizer_from_str(read_text(path), eos_token_id, bos_token_id)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise InputError(f"cannot read {path} as a tokenizer: {error}", code="corrupt-tokenizer") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path, code="corrupt-model")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}", code="corrupt-model") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} does not describe a qkflow model", code="not-a-qkflow-model")
    return values
