"""Training: one loop, exact resume, one process or many."""

from qkflow.training.callbacks import Callback
from qkflow.training.config import DataConfig, RunConfig, TrainConfig
from qkflow.training.loop import StoppedError, Trainer, train
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
