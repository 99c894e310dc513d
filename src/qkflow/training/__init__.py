"""Training: one readable loop, exact resume, one process or many."""

from qkflow.training.config import DataConfig, RunConfig, TrainConfig
from qkflow.training.loop import Callback, StoppedError, Trainer, train
from qkflow.training.pretrained import load_model
from qkflow.training.step import NonFiniteError

__all__ = [
    "Callback",
    "DataConfig",
    "NonFiniteError",
    "RunConfig",
    "StoppedError",
    "TrainConfig",
    "Trainer",
    "load_model",
    "train",
]
