"""Language modeling loss: nats per token, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkflow.attention.inference import eval_mode

if TYPE_CHECKING:
    from qkflow.data import EvalWindows
    from qkflow.models import Decoder


MAX_EXPONENT = 700  # 100·exp of more overflows float64


def perplexity(loss: float) -> float | None:
    """Return exp(loss), or None if it overflows."""
    return math.exp(loss) if loss < MAX_EXPONENT else None


def format_eval_result(result: Mapping[str, Any]) -> str:
    """Format the values of `EvalResult.to_dict`: `loss 3.2100, perplexity 24.78, 1.8102 bits per byte`."""
    value = math.inf if result["perplexity"] is None else result["perplexity"]
    text = f"loss {result['loss']:.4f}, perplexity {value:{'.2f' if value < 1e9 else '.3g'}}"
    return text + (f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else "")


@dataclass(frozen=True)
class EvalResult:
    """Mean loss over the predicted tokens of an evaluation."""

    loss: float  # nats per token
    n_tokens: int
    n_bytes: int | None  # of the text of these tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text, comparable across tokenizers."""
        return self.loss / math.log(2) * self.n_tokens / self.n_bytes if self.n_bytes else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "perplexity": perplexity(self.loss),
            "bits_per_byte": self.bits_per_byte,
        }


def evaluate_loss(
    model: Decoder,
    windows: EvalWindows,
    *,
    precision: str = "fp32",
    loss_sum: Callable[[Tensor, Tensor], Tensor] | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> EvalResult:
    """Evaluate the model on fixed windows; every target token is counted once.

    `loss_sum(inputs, targets)` replaces the summed loss of `model`, e.g. for a sharded model.
    """
    device = next(model.parameters()).device

    def default_loss_sum(inputs: Tensor, targets: Tensor) -> Tensor:
        return model.loss(model(inputs), targets, reduction="sum")

    total = 0.0
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with eval_mode(model), torch.no_grad(), autocast:
        for inputs, targets in progress(windows):
            batch = (torch.from_numpy(part).to(device) for part in (inputs, targets))
            total += float((loss_sum or default_loss_sum)(*batch))
    return EvalResult(total / windows.n_targets, windows.n_targets, windows.n_target_bytes)
