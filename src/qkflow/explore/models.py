"""Open what the user names: a run, an exported folder, a `transformers` folder, an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qkflow.errors import InputError
from qkflow.explore.base import ExplorableModel
from qkflow.explore.checkpoints import find_checkpoints, is_checkpoint, open_checkpoint
from qkflow.explore.decoder_model import DecoderModel
from qkflow.plain_data import read_json
from qkflow.training import pretrained

SAMPLE = "The Congress shall act, and the Congress has acted."


def open_model(
    source: str | Path, *, base: str | Path | None = None, device: torch.device | str = "cpu"
) -> ExplorableModel:
    """Open a model for the explorer, in eval mode.

    source    folder of a qkflow run, its `model` folder, one of its checkpoints, a `transformers` folder or
              Hub name, or an adapter folder that `hf.save_adapter` wrote. A run that is not finished opens
              with its last checkpoint.
    base      the model of an adapter; default: the one that the adapter names
    """
    path = Path(source)
    if is_checkpoint(path):
        return open_checkpoint(path, device)
    if _is_ours(path):
        if not _has_model(path) and (found := find_checkpoints(path)):
            return open_checkpoint(found[-1], device)
        decoder, tokenizer = pretrained.load_model(path, device=device)
        return DecoderModel(_display_name(path), decoder, tokenizer)
    from qkflow.hf import adapter_io  # imports transformers, which takes seconds

    if path.is_file():
        kind = "a pickle, which is never opened" if path.suffix in adapter_io.PICKLE_SUFFIXES else "a file"
        raise InputError(f"'{source}' is {kind}: give the folder of a model", code="not-a-folder")
    if (path / adapter_io.WEIGHTS_NAME).is_file():
        return _open_adapter(path, base, device)
    if path.is_dir() and not (path / pretrained.MODEL_CONFIG_NAME).is_file():
        pretrained.find_model_dir(path)  # raises, and says what is missing
    if not path.exists() and not _is_hub_name(str(source)):
        raise InputError(f"there is no model at {source}: give the folder of one", code="model-not-found")
    return _open_transformers(str(source), device)


def check_same_tokens(models: list[ExplorableModel], text: str = SAMPLE) -> None:
    """Raise unless all models split a text into the same tokens."""
    first, *others = ([model.decode([token]) for token in model.encode(text)] for model in models)
    for model, tokens in zip(models[1:], others, strict=True):
        if tokens != first:
            raise InputError(
                f"{models[0].name} and {model.name} split the text into different tokens ({len(first)} and "
                f"{len(tokens)}), so their attention cannot be compared: give models with the same tokenizer",
                code="different-tokenizers",
            )


def _open_adapter(folder: Path, base: str | Path | None, device: torch.device | str) -> ExplorableModel:
    from qkflow.hf import adapter_io

    if base is None:
        try:
            base = read_json(folder / adapter_io.CONFIG_NAME).get("base_model")
        except (OSError, ValueError, AttributeError):
            base = None
    if not base:
        raise InputError(
            f"the adapter in '{folder}' does not name its model: pass it as --base",
            code="adapter-without-base",
        )
    return _open_transformers(str(base), device, adapter=folder)


def _open_transformers(
    source: str, device: torch.device | str, adapter: Path | None = None
) -> ExplorableModel:
    from qkflow.hf import load_adapter, require_transformers

    require_transformers("exploring a transformers model")
    import transformers

    from qkflow.explore.transformers_model import TransformersModel
    from qkflow.hf.pretrained import from_fast_tokenizer, load_transformers

    head = _head_of(source)
    auto_class, purpose = {
        "causal": (transformers.AutoModelForCausalLM, "as a causal model"),
        "masked": (transformers.AutoModelForMaskedLM, "as a masked language model"),
        "classes": (transformers.AutoModelForSequenceClassification, "as a classifier"),
    }[head]
    model, tokenizer = load_transformers(source, auto_class, purpose)
    model.to(device)
    name = _display_name(Path(source)) + (f" + {adapter.name}" if adapter else "")
    if getattr(model.config, "model_type", "") == "qkflow":
        from qkflow.explore.decoder_classifier import DecoderClassifierModel

        tokens = from_fast_tokenizer(tokenizer)
        if head == "classes":
            return DecoderClassifierModel(name, model, tokens)
        return DecoderModel(name, model.model.decoder, tokens)
    if adapter is not None:
        load_adapter(model, adapter)
    return TransformersModel(name, model, tokenizer, head)


def _head_of(source: str) -> str:
    """Return the kind of output head from the architecture that config.json names."""
    try:
        config: Any = read_json(Path(source) / "config.json")
        architecture = str((config.get("architectures") or [""])[0])
    except (OSError, ValueError, AttributeError, TypeError):
        return "causal"  # a Hub name, or a folder whose error the loader explains
    if architecture.endswith("ForSequenceClassification"):
        return "classes"
    return "masked" if architecture.endswith("ForMaskedLM") else "causal"


def _is_ours(path: Path) -> bool:
    """Return whether a folder is a qkflow run or its `model` folder, finished and readable or not."""
    for folder in (path, path / "model"):
        file = folder / pretrained.MODEL_CONFIG_NAME
        if file.is_file():
            try:
                config = read_json(file)
            except (OSError, ValueError):
                return True  # our loader names the damage
            return not isinstance(config, dict) or "format" in config
    return (path / "config.yaml").is_file()


def _has_model(path: Path) -> bool:
    return any((folder / pretrained.MODEL_CONFIG_NAME).is_file() for folder in (path, path / "model"))


def _is_hub_name(source: str) -> bool:
    return "/" in source and not source.startswith((".", "/")) and source.count("/") == 1


def _display_name(path: Path) -> str:
    """Return the name of a run rather than `model`, the name of its subfolder."""
    path = path.resolve() if path.exists() else path
    return path.parent.name if path.name == "model" and path.parent.name else path.name
