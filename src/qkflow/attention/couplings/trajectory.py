"""n steps in latent space: the sums β of the kicks and A of the drifts, and the adjoint of both.

`walk` runs the steps, `adjoint` carries gradients back through them; `latent` explains the symbols.

    euler     A += β ; β += σ(u) ; u moves: all from the old values
    leapfrog  half a kick, then drift and kick in turn, half a kick at the end
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Scheme = Literal["euler", "leapfrog"]
Activation = Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class Rule:
    """Which trajectory: scheme, number of steps, and σ."""

    scheme: Scheme
    steps: int
    activation: Activation

    @property
    def moves(self) -> int:
        """How often u moves to a new place where σ is evaluated."""
        return self.steps if self.scheme == "leapfrog" else self.steps - 1

    def reach(self, step: int) -> float:
        """A after `step` drifts if σ were 1 throughout."""
        return step * step / 2 if self.scheme == "leapfrog" else step * (step - 1) / 2

    def kick(self, u: Tensor) -> Tensor:
        return F.silu(u) if self.activation == "silu" else torch.sigmoid(u)

    def kick_(self, u: Tensor) -> Tensor:
        """The same in place."""
        return F.silu(u, inplace=True) if self.activation == "silu" else u.sigmoid_()

    def kicks(self) -> list[float]:
        """The share in the final β of the kick at each place."""
        if self.scheme == "euler":
            return [1.0] * self.steps
        return [0.5, *[1.0] * (self.steps - 1), 0.5]

    def areas(self, step: int) -> list[float]:
        """The share in A after `step` drifts of the kick at each place; the later ones have none."""
        lag = 0 if self.scheme == "leapfrog" else 1  # euler drifts with what was kicked a step before
        return [max(0, step - lag - place) * share for place, share in enumerate(self.kicks())]

    def slope(self, grad: Tensor, u: Tensor) -> Tensor:
        """grad · σ'(u)."""
        if self.activation == "silu":
            return torch.ops.aten.silu_backward(grad, u)
        return torch.ops.aten.sigmoid_backward(grad, torch.sigmoid(u))


@dataclass
class Path:
    """The final β and A (None where it stays zero), and each u_j on the way with the A_j that moved it."""

    beta: Tensor
    area: Tensor | None
    places: list[Tensor] = field(default_factory=list)
    areas: list[Tensor | None] = field(default_factory=list)


def walk(rule: Rule, u: Tensor, drift: Tensor | None, mix: Tensor, pull: Tensor | None) -> Path:
    """From u (G, ρ, N), with drift (G, ρ, N) = Δ·w_0, mix (G, ρ, ρ) and pull (G, ρ, 1), the part of b2."""
    leap = rule.scheme == "leapfrog"
    beta = rule.kick(u)
    if leap:
        beta = 0.5 * beta
    area = beta if leap else None
    path = Path(beta, area)
    for step in range(1, rule.moves + 1):
        assert drift is not None
        place = torch.add(u, drift, alpha=step)
        if pull is not None:
            place += rule.reach(step) * pull
        if area is not None:
            place.baddbmm_(mix, area)
        path.places.append(place)
        path.areas.append(area)
        kick = rule.kick(place)
        last = leap and step == rule.steps
        if not leap:
            area = beta if area is None else area + beta
        share = 0.5 if last else 1.0
        # in place, but for the first β, which the path may keep as its first A
        beta = torch.add(beta, kick, alpha=share) if step == 1 else beta.add_(kick, alpha=share)
        if leap and not last:
            assert area is not None
            area = area + beta
    path.beta, path.area = beta, area
    return path


@dataclass
class Adjoint:
    """Gradients with respect to what `walk` takes."""

    u: Tensor
    drift: Tensor | None
    mix: Tensor | None
    pull: Tensor | None


def adjoint(
    rule: Rule,
    path: Path,
    u: Tensor,
    mix: Tensor,
    pull: Tensor | None,
    to_beta: Tensor,
    to_area: Tensor | None,
) -> Adjoint:
    """Carry the gradients of β and A back along the path."""
    leap = rule.scheme == "leapfrog"
    back = mix.transpose(1, 2)
    result = Adjoint(u, None, None, None)
    to_u: Tensor | None = None
    for step in range(rule.moves, 0, -1):
        place, area = path.places[step - 1], path.areas[step - 1]
        assert to_area is not None
        if leap and step == rule.steps:
            to_kick = 0.5 * to_beta
        elif leap:
            to_beta = to_kick = to_beta + to_area
        else:
            to_kick, to_beta = to_beta, to_beta + to_area
        to_place = rule.slope(to_kick, place)
        result.drift = _plus(result.drift, to_place, step)
        if area is not None:
            share = torch.bmm(to_place, area.transpose(1, 2))
            result.mix = share if result.mix is None else result.mix + share
            to_area = torch.baddbmm(to_area, back, to_place)
        if pull is not None:
            result.pull = _plus(result.pull, to_place.sum(-1, keepdim=True), rule.reach(step))
        to_u = to_place if to_u is None else to_u.add_(to_place)
    if leap:
        assert to_area is not None
        to_beta = 0.5 * (to_beta + to_area)
    start = rule.slope(to_beta, u)
    result.u = start if to_u is None else to_u + start
    return result


def _plus(total: Tensor | None, term: Tensor, factor: float) -> Tensor:
    return factor * term if total is None else total.add_(term, alpha=factor)
