"""Effects of the parts of an init, from losses with known effects."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from qkflow.papers.coupled_dynamics.factorial import PARTS, part_effects
from qkflow.studies import ComparisonConfig

OTHER = {"qk": "gpt2", "ov": "gpt2", "out": "zero", "embed": "gpt2"}


@dataclass
class Arm:
    best_init: str
    losses: dict[int, float]


def comparison(n_seeds: int = 5) -> SimpleNamespace:
    """Losses in which `out=zero` gains 0.5, symmetry 0.3, and symmetry nothing where `out` is zero."""
    noise = np.random.default_rng(0)
    arms = []
    for levels in itertools.product((False, True), repeat=len(PARTS)):
        changed = dict(zip(PARTS, levels, strict=True))
        text = ",".join(f"{part}={OTHER[part]}" for part, is_other in changed.items() if is_other)
        for is_symmetric in (False, True):
            gain = 0.5 * changed["out"] + 0.3 * (is_symmetric and not changed["out"])
            losses = {seed: 5 - gain + 0.1 * seed + 1e-3 * noise.normal() for seed in range(n_seeds)}
            init = f"fan_in{{{text}}}" if text else "fan_in"
            arms.append(Arm(init + ("+symmetric_score=2.77" if is_symmetric else ""), losses))
    return SimpleNamespace(summary=SimpleNamespace(arms=arms, config=ComparisonConfig()))


def test_effects_of_parts() -> None:
    effects = {effect.part: effect for effect in part_effects(comparison())}
    assert effects["out"].values == ("fan_in", "zero")
    assert effects["out"].alone.mean == pytest.approx(-0.5, abs=2e-3)
    assert [gain.mean for gain in effects["out"].gains] == pytest.approx([-0.3, 0.0], abs=2e-3)
    assert effects["out"].contrast.mean == pytest.approx(0.3, abs=2e-3)
    for part in ("qk", "ov", "embed"):
        assert effects[part].alone.mean == pytest.approx(0, abs=2e-3)
        assert [gain.mean for gain in effects[part].gains] == pytest.approx([-0.15, -0.15], abs=2e-3)


def test_an_incomplete_factorial_is_refused() -> None:
    incomplete = comparison()
    del incomplete.summary.arms[3]
    with pytest.raises(AssertionError, match="factorial"):
        part_effects(incomplete)
