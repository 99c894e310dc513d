"""The OV circuit trained under fixed attention on the controlled task.

Attention is fixed: α spread evenly over the distinct tokens of a sequence, 1 − α over the others. Only the OV
circuit is trained; its final loss L falls with α. The marginal gain [L(α) − L(α + δ)]/δ, δ = 0.005, measures
the incentive for the QK circuit to sharpen attention. It is large for a collapsed OV circuit and small for a
factorized one; Vashisht & Ramaswamy (ICML 2026, arXiv 2608.06776) explain with it why the two attend
differently.

The circuits of this experiment have biases: [W | b] is applied to the attended counts with a 1 appended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkflow.errors import InputError, unknown
from qkflow.papers.faster_qk.batched_circuits import (
    Circuit,
    CollapsedCircuit,
    FactorizedCircuit,
    uniform_init,
)
from qkflow.papers.faster_qk.controlled_task import (
    LABEL_IDS,
    N_COMMON,
    VOCAB_SIZE,
    BatchStream,
)

ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
# Final losses printed by the authors' notebooks: SGD .01, 125,000 steps, batch size 128, T = 64, seed 1234.
PUBLISHED_LOSSES = {
    "collapsed": dict(zip(ALPHAS, (0.598, 0.158, 0.0645, 0.0346, 0.0216), strict=True)),
    "factorized": dict(zip(ALPHAS, (0.00379, 0.00148, 0.000892, 0.000633, 0.000486), strict=True)),
}
DEFAULT_STEPS = 125_000
DELTA = 0.005
_CHUNK = 250


class FactorizedCircuitWithBias(FactorizedCircuit):
    """W_O·(W_V·p + b_V) + b_O: `right` is [W_V | b_V], and b_O is added to the last column of the product."""

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor) -> None:
        super().__init__(left, right)
        self.bias = bias

    def value(self) -> Tensor:
        product = super().value()
        product[..., -1] += self.bias
        return product

    def sgd_step(self, scaled_grad: Tensor) -> None:
        super().sgd_step(scaled_grad)
        self.bias.sub_(scaled_grad[..., -1])


@dataclass(frozen=True)
class FixedAttentionResult:
    """The final loss under one α, its marginal gain, and the loss history."""

    kind: str
    alpha: float
    loss: float
    gain: float | None  # None at α = 1
    history: list[tuple[int, float]]  # (step, loss)


def build_circuit(kind: str, seeds: Sequence[int], n_alphas: int, dtype: torch.dtype) -> Circuit:
    """Build the OV circuits [W | b] of the runs [seed × α]; all α of a seed share the init.

    Sampled in the order of the authors' nn.Linear modules.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def linear() -> tuple[Tensor, Tensor]:
        weight = uniform_init(generators, VOCAB_SIZE, VOCAB_SIZE, dtype=dtype)
        bias = uniform_init(generators, VOCAB_SIZE, dtype=dtype)
        return weight.repeat_interleave(n_alphas, 0), bias.repeat_interleave(n_alphas, 0)

    value, value_bias = linear()
    right = torch.cat([value, value_bias[..., None]], -1)
    if kind == "collapsed":
        return CollapsedCircuit(right)
    output, output_bias = linear()
    return FactorizedCircuitWithBias(output, right, output_bias)


def normalize_counts(counts: Tensor) -> Tensor:
    """Return (…, 51): shares of the common tokens, shares of the distinct tokens, and a constant 1."""
    common, distinct = counts[..., :N_COMMON], counts[..., N_COMMON:]
    ones = torch.ones_like(counts[..., :1])
    # clamp_min: a sequence may have no distinct token (probability 1e-12 at T = 64)
    parts = [
        common / common.sum(-1, keepdim=True),
        distinct / distinct.sum(-1, keepdim=True).clamp_min(1),
        ones,
    ]
    return torch.cat(parts, -1)


def apply_fixed_attention(normalized_counts: Tensor, alphas: Tensor) -> Tensor:
    """Return [p | 1] under every α: (S, B, 51) → (S·A, B, 51) for S seeds and A values of α."""
    weights = alphas.new_ones(len(alphas), 1, VOCAB_SIZE + 1)
    weights[..., :N_COMMON] = (1 - alphas)[:, None, None]
    weights[..., N_COMMON:VOCAB_SIZE] = alphas[:, None, None]
    return (normalized_counts[:, None] * weights).flatten(0, 1)


def gradient(inputs: Tensor, targets: Tensor, matrix: Tensor) -> Tensor:
    """Return B·∂L/∂[W | b] (R, 50, 51) for inputs [p | 1] (R, B, 51) and one-hot classes (B, 4)."""
    error = torch.softmax(torch.bmm(inputs, matrix.mT), -1)
    error[..., LABEL_IDS] -= targets
    return torch.bmm(error.mT, inputs)


def losses(ov: Circuit, normalized_counts: Tensor, targets: Tensor, alphas: Tensor) -> Tensor:
    """Return the loss (A,) under each α, averaged over seeds and the instances (1, B, 51)."""
    matrix = ov.value().double()
    inputs = apply_fixed_attention(normalized_counts, alphas).repeat(len(matrix) // len(alphas), 1, 1)
    log_probs = torch.log_softmax(torch.bmm(inputs, matrix.mT), -1)[..., LABEL_IDS]
    return -(log_probs * targets).sum(-1).mean(-1).view(-1, len(alphas)).mean(0)


def train_fixed_attention(
    kind: str,
    seeds: Sequence[int],
    steps: int = DEFAULT_STEPS,
    lr: float = 0.01,
    batch_size: int = 128,
    seq_len: int = 64,
    alphas: Sequence[float] = ALPHAS,
    on_progress: Callable[[int], None] = lambda steps: None,
    dtype: torch.dtype = torch.float32,
) -> list[FixedAttentionResult]:
    """Train the OV circuit under each α and average over seeds; all α of a seed share the batches."""
    if kind not in PUBLISHED_LOSSES:
        raise unknown("circuit", kind, PUBLISHED_LOSSES)
    if steps < 1 or not lr > 0:
        raise InputError(f"steps and lr must be positive, not {steps} and {lr}", code="option-not-positive")
    if any(not 0 <= alpha <= 1 for alpha in alphas):
        raise InputError(
            f"alpha must lie between 0 and 1, not {', '.join(map(str, alphas))}", code="alpha-out-of-range"
        )
    streams = [BatchStream(seed, seq_len, batch_size, balanced=True) for seed in seeds]
    alpha_values = torch.tensor(alphas, dtype=torch.float64)
    counts, targets = BatchStream(2**32, seq_len, 40_000, balanced=True).next_batches(1, torch.float64)
    held_out = normalize_counts(counts)
    history: list[tuple[int, Tensor]] = []
    with torch.inference_mode():
        ov = build_circuit(kind, seeds, len(alphas), dtype)
        for start in range(0, steps, _CHUNK):
            chunk = min(_CHUNK, steps - start)
            batches = [stream.next_batches(chunk, dtype) for stream in streams]
            _train_chunk(ov, batches, alpha_values.to(dtype), lr)
            on_progress(chunk)
            if (start // _CHUNK) % max(1, steps // _CHUNK // 25) == 0:
                history.append((start + chunk, losses(ov, held_out[:, ::10], targets[:, ::10], alpha_values)))
        final = losses(ov, held_out, targets, alpha_values)
        sharper = losses(ov, held_out, targets, alpha_values + DELTA)
    if not bool(final.isfinite().all()):
        raise InputError(f"the {kind} circuit diverged: lower the learning rate {lr:g}", code="diverged")
    gains = ((final - sharper) / DELTA).tolist()
    curves = [[(step, float(values[index])) for step, values in history] for index in range(len(alphas))]
    return [
        FixedAttentionResult(kind, alpha, loss, gain if alpha + DELTA <= 1 else None, [*curve, (steps, loss)])
        for alpha, loss, gain, curve in zip(alphas, final.tolist(), gains, curves, strict=True)
    ]


def _train_chunk(ov: Circuit, batches: list[tuple[Tensor, Tensor]], alphas: Tensor, lr: float) -> None:
    """Take one SGD step per batch; balanced batches all have the same targets (B, 4)."""
    inputs = torch.stack([normalize_counts(counts) for counts, _ in batches], 1)
    targets = batches[0][1][0]
    for step in inputs:
        grad = gradient(apply_fixed_attention(step, alphas), targets, ov.value())
        ov.sgd_step(grad.mul_(lr / len(targets)))
