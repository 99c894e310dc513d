"""Training: one readable loop, exact resume, one process or many."""

from qkflow.training.config import DataConfig, RunConfig, TrainConfig
from qkflow.training.loop import Listener, Run, StoppedError, train
from qkflow.training.pretrained import load_model
from qkflow.training.step import NonFiniteError

__all__ = [
    "DataConfig",
    "Listener",
    "NonFiniteError",
    "Run",
    "RunConfig",
    "StoppedError",
    "TrainConfig",
    "load_model",
    "train",
]
