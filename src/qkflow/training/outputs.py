"""What a finished run leaves in its folder: the trained model, then result.json, which is written last."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkflow import files
from qkflow.measures.language import EvalResult
from qkflow.system import collect_env, peak_memory
from qkflow.training import pretrained
from qkflow.training.run_dir import MODEL_DIR, RESULT_FILE

if TYPE_CHECKING:
    from qkflow.training.loop import Trainer


def build_result(trainer: Trainer, evaluation: EvalResult) -> dict[str, Any]:
    """Return the content of result.json."""
    device, processes = trainer.dist_context.device, trainer.dist_context.world_size
    step_durations = trainer.step_durations or [trainer.train_seconds / max(1, trainer.step)]
    return {
        "status": "finished",
        "error": None,
        **evaluation.to_dict(),
        "tokens": trainer.tokens,
        "steps": trainer.step,
        "seconds": trainer.train_seconds,
        "step_seconds": statistics.median(step_durations),
        "peak_memory_bytes": peak_memory(device),
        "parameters": sum(trainer.parameters_by_role.values()),
        "parameters_by_role": trainer.parameters_by_role,
        "flops_per_token": trainer.flops_per_token,
        "data": {"name": trainer.data.name, "fingerprint": trainer.data.fingerprint},
        "environment": {**collect_env(device), "processes": processes},
    }


def save_outputs(trainer: Trainer, weights: dict[str, Tensor], result: dict[str, Any]) -> None:
    """Write model and result. On a full disk remove all checkpoints but the last, and try once more."""
    try:
        _write(trainer, weights, result)
    except OSError as error:
        if not (files.is_disk_full(error) and trainer.checkpoints.remove_older()):
            raise
        _write(trainer, weights, result)


def _write(trainer: Trainer, weights: dict[str, Tensor], result: dict[str, Any]) -> None:
    pretrained.save_model(
        trainer.folder / MODEL_DIR,
        trainer.model_config,
        weights,
        trainer.data.tokenizer,
        seq_len=trainer.config.data.seq_len,
    )
    files.write_json(trainer.folder / RESULT_FILE, result)
