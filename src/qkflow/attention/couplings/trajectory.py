"""n steps in latent space: the sums β of the kicks and A of the drifts, with their gradients by hand.

Plain autograd would keep every step; the function here keeps u and the drift, recomputes the steps in the
backward pass (they are r numbers a head) and runs the adjoint recursion. `trajectory_reference` is the same
in plain operations, and is what the compiler sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Scheme = Literal["euler", "leapfrog"]
Activation = Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class Path:
    """β, A (None where it stays zero), and the same two sums for σ ≡ 1."""

    beta: Tensor
    area: Tensor | None
    kicks: float
    reach: float


def trajectory(
    u: Tensor,
    drift: Tensor | None,
    mix: Tensor,
    pull: Tensor | None,
    scheme: Scheme,
    steps: int,
    activation: Activation,
) -> Path:
    """u, drift (G, ρ, N), mix (G, ρ, ρ), pull (G, ρ, 1); see `latent` for what they mean."""
    kicks, reach = float(steps), float(_reaches(scheme, steps)[-1])
    if scheme == "euler" and steps == 1:
        return Path(_apply(activation, u), None, kicks, reach)
    if torch.compiler.is_compiling():
        return trajectory_reference(u, drift, mix, pull, scheme, steps, activation)
    assert drift is not None
    beta, area = _Trajectory.apply(u, drift, mix, pull, scheme, steps, activation)
    return Path(beta, area, kicks, reach)


def trajectory_reference(
    u: Tensor,
    drift: Tensor | None,
    mix: Tensor,
    pull: Tensor | None,
    scheme: Scheme,
    steps: int,
    activation: Activation,
) -> Path:
    _, _, beta, area = _walk(u, drift, mix, pull, scheme, steps, activation)
    return Path(beta, area, float(steps), float(_reaches(scheme, steps)[-1]))


def _apply(activation: Activation, u: Tensor) -> Tensor:
    return F.silu(u) if activation == "silu" else torch.sigmoid(u)


def _slope(activation: Activation, grad: Tensor, u: Tensor) -> Tensor:
    """grad · σ'(u)."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, u)
    return torch.ops.aten.sigmoid_backward(grad, torch.sigmoid(u))


def _reaches(scheme: Scheme, steps: int) -> list[float]:
    """A_j for σ ≡ 1, j = 0 … n."""
    if scheme == "euler":
        return [j * (j - 1) / 2 for j in range(steps + 1)]
    return [j * j / 2 for j in range(steps + 1)]


def _walk(
    u: Tensor,
    drift: Tensor | None,
    mix: Tensor,
    pull: Tensor | None,
    scheme: Scheme,
    steps: int,
    activation: Activation,
) -> tuple[list[Tensor], list[Tensor | None], Tensor, Tensor | None]:
    """All u_j and the A_j that moved them there, then the final β and A.

    euler     A += β ; β += σ(u) ; u moves: all from the old values
    leapfrog  half a kick, then drift and kick in turn, half a kick at the end
    """
    leap = scheme == "leapfrog"
    reaches = _reaches(scheme, steps)
    first = _apply(activation, u)
    beta = 0.5 * first if leap else first
    area: Tensor | None = beta if leap else None
    places: list[Tensor] = [u]
    areas: list[Tensor | None] = [None]
    for step in range(1, steps + leap):
        assert drift is not None
        place = torch.add(u, drift, alpha=step)
        if pull is not None:
            place = place + reaches[step] * pull
        if area is not None:
            place = torch.baddbmm(place, mix, area)
        places.append(place)
        areas.append(area)
        kick = _apply(activation, place)
        if not leap:
            area = beta if area is None else area + beta
            beta = beta + kick
        elif step < steps:
            beta = beta + kick
            assert area is not None
            area = area + beta
        else:
            beta = torch.add(beta, kick, alpha=0.5)
    return places, areas, beta, area


class _Trajectory(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        u: Tensor,
        drift: Tensor,
        mix: Tensor,
        pull: Tensor | None,
        scheme: Scheme,
        steps: int,
        activation: Activation,
    ) -> tuple[Tensor, Tensor]:
        _, _, beta, area = _walk(u, drift, mix, pull, scheme, steps, activation)
        assert area is not None
        # a single leapfrog step ends with A equal to the first half kick, never the same tensor as β
        return beta, area

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        u, drift, mix, pull, ctx.scheme, ctx.steps, ctx.activation = inputs
        ctx.save_for_backward(u, drift, mix, pull)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        u, drift, mix, pull = ctx.saved_tensors
        scheme, steps, activation = ctx.scheme, ctx.steps, ctx.activation
        leap = scheme == "leapfrog"
        reaches = _reaches(scheme, steps)
        places, areas, _, _ = _walk(u, drift, mix, pull, scheme, steps, activation)
        to_beta, to_area = grads
        to_u = to_drift = to_mix = to_pull = None
        back = mix.transpose(1, 2)
        for step in range(len(places) - 1, 0, -1):
            if leap and step == steps:
                to_kick = 0.5 * to_beta
            elif leap:
                to_beta = to_beta + to_area
                to_kick = to_beta
            else:
                to_kick = to_beta
                to_beta = to_beta + to_area
            to_place = _slope(activation, to_kick, places[step])
            to_u = to_place if to_u is None else to_u + to_place
            moved = step * to_place if to_drift is None else torch.add(to_drift, to_place, alpha=step)
            to_drift = moved
            area = areas[step]
            if area is not None:
                across = area.transpose(1, 2)
                to_mix = (
                    torch.bmm(to_place, across) if to_mix is None else torch.baddbmm(to_mix, to_place, across)
                )
                to_area = torch.baddbmm(to_area, back, to_place)
            if pull is not None:
                share = reaches[step] * to_place.sum(-1, keepdim=True)
                to_pull = share if to_pull is None else to_pull + share
        if leap:
            to_beta = 0.5 * (to_beta + to_area)
        start = _slope(activation, to_beta, u)
        to_u = start if to_u is None else to_u + start
        if to_mix is None:
            to_mix = torch.zeros_like(mix)
        return to_u, to_drift, to_mix, to_pull, None, None, None
