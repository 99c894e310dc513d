"""What fine-tuning takes, before its tasks are read: runs and FLOPs of one trained model."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.models.config import ModelConfig
from qkflow.models.cost import hidden_flops_per_token
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.finetune.config import BATCH_SIZE, parse_tasks


@dataclass(frozen=True)
class TaskSize:
    """Training examples of a task, as published, and mean tokens per example, assumed for a BPE tokenizer."""

    examples: int
    tokens: int


TASK_SIZES = {
    "sst-2": TaskSize(67_349, 14),
    "cola": TaskSize(8_551, 12),
    "mrpc": TaskSize(3_668, 55),
    "rte": TaskSize(2_490, 75),
}


def finetune_flops(config: ComparisonConfig, model: ModelConfig) -> float:
    """Return the FLOPs of fine-tuning a model on all tasks of a comparison."""
    total = 0.0
    for task in parse_tasks(config.finetune):
        size = TASK_SIZES[task.key]
        seq_len = min(size.tokens, config.seq_len)
        examples = min(size.examples, config.finetune_examples or size.examples)
        steps = config.finetune_epochs * -(-examples // BATCH_SIZE)
        total += steps * BATCH_SIZE * seq_len * hidden_flops_per_token(model, seq_len)
    return total
