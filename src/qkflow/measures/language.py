"""How well a model predicts text: loss in nats a token, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qkflow.data import EvalWindows
    from qkflow.models import Decoder


MAX_EXPONENT = 700  # exp of more, as per cent, is no number


def perplexity(loss: float) -> float | None:
    """exp(loss); None where a run went so wrong that there is no such number."""
    return math.exp(loss) if loss < MAX_EXPONENT else None


def format_eval_result(result: Mapping[str, Any]) -> str:
    """`loss 3.2100, perplexity 24.78, 1.8102 bits per byte`, of what `Score.to_dict` gives."""
    size = math.inf if result["perplexity"] is None else result["perplexity"]
    said = f"loss {result['loss']:.4f}, perplexity {size:{'.2f' if size < 1e9 else '.3g'}}"
    return said + (f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else "")


@dataclass(frozen=True)
class EvalResult:
    loss: float  # nats a token
    n_tokens: int
    n_bytes: int | None  # of text that the tokens stand for

    @property
    def bits_per_byte(self) -> float | None:
        """Independent of the tokenizer, so that models with different ones can be compared."""
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
    """The model's score on fixed windows, each predicted token once.

    `loss_sum(inputs, targets)` may replace the model's own, for one that is spread over processes.
    """
    from qkflow.models.loss import linear_cross_entropy

    device = next(model.parameters()).device
    training = model.training
    model.eval()

    def own(inputs: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(model(inputs), model.output_weight, targets, reduction="sum")

    total = 0.0
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            for inputs, targets in progress(windows):
                batch = (torch.from_numpy(part).to(device) for part in (inputs, targets))
                total += float((loss_sum or own)(*batch))
    finally:
        model.train(training)
    return EvalResult(total / windows.n_targets, windows.n_targets, windows.n_target_bytes)
