"""Circuits of many independent runs, trained side by side: the first axis of every tensor is the lane, one
run.

A circuit is a matrix that learns, either directly (`Collapsed`) or as a product of two (`Factorised`). Both
are told the gradient of the matrix alone; the chain rule through the product is the only difference between
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkflow.papers.faster_qk.controlled_task import VOCAB_SIZE

IDENTITY_SCALE = 1e-6  # scale of the identity start


class CollapsedCircuit:
    """W itself is the parameter."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def value(self) -> Tensor:
        return self.matrix

    def sgd_step(self, scaled_grad: Tensor) -> None:
        """Take one step of gradient descent; `step` is the learning rate times ∂L/∂W."""
        self.matrix.sub_(scaled_grad)

    def select_runs(self, index: Tensor) -> None:
        self.matrix = self.matrix[index]


class FactorisedCircuit:
    """W = left · right, so ∂L/∂left = ∂L/∂W · rightᵀ and ∂L/∂right = leftᵀ · ∂L/∂W."""

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


Circuit = CollapsedCircuit | FactorisedCircuit


def identity_init(n_runs: int, dtype: torch.dtype) -> Tensor:
    return (IDENTITY_SCALE * torch.eye(VOCAB_SIZE, dtype=dtype)).expand(n_runs, -1, -1).clone()


def uniform_init(
    generators: Sequence[torch.Generator], *shape: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """U(±1/√50), the start of `nn.Linear(50, …)`; drawn in float32, so it is the same in any dtype."""
    bound = VOCAB_SIZE**-0.5
    drawn = [torch.empty(shape).uniform_(-bound, bound, generator=each) for each in generators]
    return torch.stack(drawn).to(dtype)
