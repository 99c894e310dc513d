"""Batched QK and OV circuits: many independent runs train in one computation.

The first axis of every tensor, R, indexes the runs. A circuit is a matrix W (R, M, N), trained directly
(`CollapsedCircuit`) or as a product of two factors (`FactorizedCircuit`). `sgd_step` takes the gradient of W;
a factorized circuit applies the chain rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkflow.papers.faster_qk.controlled_task import VOCAB_SIZE

IDENTITY_SCALE = 1e-6


class CollapsedCircuit:
    """The parameter is W (R, M, N)."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def value(self) -> Tensor:
        return self.matrix

    def sgd_step(self, scaled_grad: Tensor) -> None:
        """Subtract `scaled_grad`, the learning rate times ∂L/∂W."""
        self.matrix.sub_(scaled_grad)

    def select_runs(self, index: Tensor) -> None:
        self.matrix = self.matrix[index]


class FactorizedCircuit:
    """W = left·right, so ∂L/∂left = ∂L/∂W·rightᵀ and ∂L/∂right = leftᵀ·∂L/∂W."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    def value(self) -> Tensor:
        return torch.bmm(self.left, self.right)

    def sgd_step(self, scaled_grad: Tensor) -> None:
        left = torch.baddbmm(self.left, scaled_grad, self.right.mT, alpha=-1)
        self.right = torch.baddbmm(self.right, self.left.mT, scaled_grad, alpha=-1)
        self.left = left

    def select_runs(self, index: Tensor) -> None:
        self.left, self.right = self.left[index], self.right[index]


Circuit = CollapsedCircuit | FactorizedCircuit


def identity_init(n_runs: int, dtype: torch.dtype) -> Tensor:
    """Return 1e-6·I (R, 50, 50)."""
    return (IDENTITY_SCALE * torch.eye(VOCAB_SIZE, dtype=dtype)).expand(n_runs, -1, -1).clone()


def uniform_init(
    generators: Sequence[torch.Generator], *shape: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return U(±1/√50) (R, *shape), the init of `nn.Linear(50, …)`, with one generator per run.

    Sampled in float32, so that every dtype has the same values.
    """
    bound = VOCAB_SIZE**-0.5
    samples = [torch.empty(shape).uniform_(-bound, bound, generator=each) for each in generators]
    return torch.stack(samples).to(dtype)
