"""The output-value circuit alone, under attention that is given: what sharper attention buys.

The controlled task with attention fixed: α spread evenly over a sequence's distinct tokens, 1 − α over the
others. Only the OV circuit learns, and its loss after equal training falls with α. The marginal gain [L(α) −
L(α + δ)]/δ, δ = 0.005, is what a little more attention would be worth to the query-key circuit: large for a
collapsed OV circuit, which leaves much loss to be had, small for a factorised one, which does not. This is
Vashisht & Ramaswamy's account (ICML 2026, arXiv 2608.06776) of why the two attend differently.

Their circuits have biases here: [W | b] acts on the attended counts with a constant 1 appended.
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
    FactorisedCircuit,
    uniform_init,
)
from qkflow.papers.faster_qk.controlled_task import (
    FIRST_LABEL_ID,
    N_CLASSES,
    N_COMMON,
    VOCAB_SIZE,
    BatchStream,
)

ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
# Final losses printed by the authors' notebooks: SGD .01, 125,000 steps, batch 128, T = 64, seed 1234.
PUBLISHED_LOSSES = {
    "collapsed": dict(zip(ALPHAS, (0.598, 0.158, 0.0645, 0.0346, 0.0216), strict=True)),
    "factorised": dict(zip(ALPHAS, (0.00379, 0.00148, 0.000892, 0.000633, 0.000486), strict=True)),
}
DEFAULT_STEPS = 125_000
DELTA = 0.005
_CHUNK = 250
_LABELS = slice(FIRST_LABEL_ID, FIRST_LABEL_ID + N_CLASSES)


class FactorisedCircuitWithBias(FactorisedCircuit):
    """W_O·(W_V·p + b_V) + b_O: `right` is [W_V | b_V], and b_O adds to the last column of the product."""

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
    """One attention share: the loss after training, what more attention would gain, and the way there."""

    kind: str
    alpha: float
    loss: float
    gain: float | None  # None at α = 1, where there is no more to be had
    history: list[tuple[int, float]]  # (step, loss)


def build_circuit(kind: str, seeds: Sequence[int], n_alphas: int, dtype: torch.dtype) -> Circuit:
    """Lanes [seed × α], each seed's start repeated for every α; drawn in the order of nn.Linear modules."""
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
    return FactorisedCircuitWithBias(output, right, output_bias)


def normalize_counts(counts: Tensor) -> Tensor:
    """Each sequence's common tokens as shares of 1, its distinct tokens as shares of 1, and a constant 1."""
    common, distinct = counts[..., :N_COMMON], counts[..., N_COMMON:]
    ones = torch.ones_like(counts[..., :1])
    # A sequence without a distinct token has nothing to put α on: one in 10^12 at length 64.
    parts = [
        common / common.sum(-1, keepdim=True),
        distinct / distinct.sum(-1, keepdim=True).clamp_min(1),
        ones,
    ]
    return torch.cat(parts, -1)


def apply_fixed_attention(normalized_counts: Tensor, alphas: Tensor) -> Tensor:
    """[p | 1] under every α: (S, B, 51) → (S·A, B, 51)."""
    weights = alphas.new_ones(len(alphas), 1, VOCAB_SIZE + 1)
    weights[..., :N_COMMON] = (1 - alphas)[:, None, None]
    weights[..., N_COMMON:VOCAB_SIZE] = alphas[:, None, None]
    return (normalized_counts[:, None] * weights).flatten(0, 1)


def gradient(inputs: Tensor, targets: Tensor, matrix: Tensor) -> Tensor:
    """B times ∂L/∂[W | b] for inputs [p | 1] and one-hot classes."""
    error = torch.softmax(torch.bmm(inputs, matrix.mT), -1)
    error[..., _LABELS] -= targets
    return torch.bmm(error.mT, inputs)


def losses(ov: Circuit, normalized_counts: Tensor, targets: Tensor, alphas: Tensor) -> Tensor:
    """Mean loss under each α, over seeds and over the instances (1, B, 51)."""
    matrix = ov.value().double()
    inputs = apply_fixed_attention(normalized_counts, alphas).repeat(len(matrix) // len(alphas), 1, 1)
    logarithms = torch.log_softmax(torch.bmm(inputs, matrix.mT), -1)[..., _LABELS]
    return -(logarithms * targets).sum(-1).mean(-1).view(-1, len(alphas)).mean(0)


def train_fixed_attention(
    kind: str,
    seeds: Sequence[int],
    steps: int = DEFAULT_STEPS,
    lr: float = 0.01,
    batch: int = 128,
    length: int = 64,
    alphas: Sequence[float] = ALPHAS,
    on_progress: Callable[[int], None] = lambda steps: None,
    dtype: torch.dtype = torch.float32,
) -> list[FixedAttentionResult]:
    """Train the OV circuit under each α, averaged over seeds; every α of a seed sees the same batches."""
    if kind not in PUBLISHED_LOSSES:
        raise unknown("circuit", kind, PUBLISHED_LOSSES)
    if steps < 1 or not lr > 0:
        raise InputError(f"steps and learning rate must be positive, not {steps} and {lr}")
    if any(not 0 <= alpha <= 1 for alpha in alphas):
        raise InputError(f"an attention share lies between 0 and 1: {', '.join(map(str, alphas))}")
    streams = [BatchStream(seed, length, batch, balanced=True) for seed in seeds]
    shares = torch.tensor(alphas, dtype=torch.float64)
    counts, truth = BatchStream(2**32, length, 40_000, balanced=True).next_batches(1, torch.float64)
    fresh = normalize_counts(counts)
    history: list[tuple[int, Tensor]] = []
    with torch.inference_mode():
        ov = build_circuit(kind, seeds, len(alphas), dtype)
        for start in range(0, steps, _CHUNK):
            chunk = min(_CHUNK, steps - start)
            _train_chunk(ov, [stream.next_batches(chunk, dtype) for stream in streams], shares.to(dtype), lr)
            on_progress(chunk)
            if (start // _CHUNK) % max(1, steps // _CHUNK // 25) == 0:
                history.append((start + chunk, losses(ov, fresh[:, ::10], truth[:, ::10], shares)))
        final = losses(ov, fresh, truth, shares)
        sharper = losses(ov, fresh, truth, shares + DELTA)
    if not bool(final.isfinite().all()):
        raise InputError(f"the {kind} circuit diverged: lower the learning rate {lr:g}")
    gains = ((final - sharper) / DELTA).tolist()
    curves = [[(step, float(found[index])) for step, found in history] for index in range(len(alphas))]
    return [
        FixedAttentionResult(kind, alpha, loss, gain if alpha + DELTA <= 1 else None, [*curve, (steps, loss)])
        for alpha, loss, gain, curve in zip(alphas, final.tolist(), gains, curves, strict=True)
    ]


def _train_chunk(ov: Circuit, batches: list[tuple[Tensor, Tensor]], alphas: Tensor, lr: float) -> None:
    """One step of gradient descent per batch; balanced batches list their classes in one fixed order."""
    inputs = torch.stack([normalize_counts(counts) for counts, _ in batches], 1)
    truth = batches[0][1][0]
    for step in inputs:
        ov.sgd_step(gradient(apply_fixed_attention(step, alphas), truth, ov.value()).mul_(lr / len(truth)))
