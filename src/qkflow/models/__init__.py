"""Decoder models with any registered attention."""

from qkflow.models.config import AttentionConfig, ModelConfig
from qkflow.models.decoder import Block, Decoder
from qkflow.models.presets import PRESETS, preset

__all__ = ["PRESETS", "AttentionConfig", "Block", "Decoder", "ModelConfig", "preset"]
