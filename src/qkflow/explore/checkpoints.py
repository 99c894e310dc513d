"""A checkpoint of a run that is still training or was stopped, in the explorer."""

from __future__ import annotations

from pathlib import Path

import torch

from qkflow.errors import InputError
from qkflow.explore.decoder_model import DecoderModel
from qkflow.models import Decoder
from qkflow.training.checkpoint import (
    CHECKPOINT_FORMAT,
    MANIFEST_FILE,
    CorruptCheckpointError,
    load_checkpoint,
    verify_checkpoint,
)
from qkflow.training.config import RunConfig
from qkflow.training.run_dir import CHECKPOINTS_DIR, RUN_CONFIG_FILE


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is RUN/checkpoints/step-….`"""
    return path.parent.name == CHECKPOINTS_DIR and (path / MANIFEST_FILE).is_file()


def find_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the oldest first; none if the run is finished."""
    return sorted(path for path in (run / CHECKPOINTS_DIR).glob("step-*") if is_checkpoint(path))


def open_checkpoint(path: Path, device: torch.device | str) -> DecoderModel:
    """Open one checkpoint. The tokenizer comes from the cache of prepared corpora, as in training."""
    from qkflow import data

    path = path.resolve()
    run = path.parents[1]
    config = RunConfig.load(run / RUN_CONFIG_FILE)
    tokens = data.prepare(config.data.corpus, config.data.tokenizer)
    decoder = Decoder(config.model_config(tokens.vocab_size), device="meta").to_empty(device=device)
    weights = {f"model.{name}": tensor for name, tensor in decoder.state_dict().items()}
    try:
        checkpoint = verify_checkpoint(path)
        if checkpoint.manifest["format"] != CHECKPOINT_FORMAT:
            raise CorruptCheckpointError(f"{path} was written by another version of qkflow")
        load_checkpoint(checkpoint, weights)
    except CorruptCheckpointError as error:
        raise InputError(str(error), code="corrupt-checkpoint") from None
    return DecoderModel(f"{run.name}, step {checkpoint.step:,}", decoder, tokens.tokenizer)
