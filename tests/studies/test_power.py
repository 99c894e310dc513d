from __future__ import annotations

import numpy as np
import pytest

from qkflow.studies.design import SeedDesign
from qkflow.studies.power import detectable_effect, pooled_sd, seeds_to_decide
from qkflow.studies.sequential import one_sided_p

FIXED = SeedDesign.fixed(margin=0.01)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_detectable_effect_is_found_with_the_stated_power(seeds: int) -> None:
    effect = detectable_effect(FIXED, seeds, n_comparisons=4)
    d = np.random.default_rng(0).normal(-effect, 1.0, (20_000, seeds))
    assert (one_sided_p(d) < 0.025 / 4).mean() == pytest.approx(0.8, abs=0.01)


def test_more_seeds_and_fewer_comparisons_show_smaller_effects() -> None:
    effects = [detectable_effect(FIXED, n, 3) for n in (3, 5, 10, 20)]
    assert effects == sorted(effects, reverse=True)
    assert detectable_effect(FIXED, 5, 1) < detectable_effect(FIXED, 5, 10)
    assert detectable_effect(SeedDesign.adaptive(20), 20, 3) > effects[-1]


def sample(mean: float, sd: float) -> np.ndarray:
    """Return four differences with exactly this mean and standard deviation."""
    return mean + sd * np.asarray([-1.0, 1.0, -1.0, 1.0]) * np.sqrt(3) / 2


def needed(mean: float, sd: float, design: SeedDesign = FIXED) -> int | None:
    d = sample(mean, sd)
    return seeds_to_decide([d if mean < 0 else -d], [d, -d], 1, design)


def test_seeds_to_decide() -> None:
    few, many = needed(-0.03, 0.01), needed(-0.03, 0.03)
    assert few is not None
    assert many is not None
    assert 3 <= few < many <= 20
    assert needed(0.03, 0.03) == many
    inside = needed(0.0, 0.01)  # decided by equivalence
    assert inside is not None
    assert inside < 15
    assert needed(0.0, 0.01, SeedDesign.fixed()) is None
    assert needed(0.011, 1.0) is None
    assert needed(0.0, 0.0) == 3
    adaptive = needed(-0.03, 0.03, SeedDesign.adaptive(20, margin=0.01))
    assert adaptive is not None
    assert adaptive > many


def test_a_tied_rival_needs_more_seeds() -> None:
    clear, tied = sample(-0.1, 0.01), sample(0.001, 0.01)
    assert seeds_to_decide([clear], [clear], 1, SeedDesign.fixed()) == 3
    assert seeds_to_decide([clear, tied], [clear, tied], 1, SeedDesign.fixed()) is None


def test_pooled_sd() -> None:
    assert pooled_sd([3.0, 4.0]) == pytest.approx(np.sqrt(12.5))
    assert pooled_sd([]) is None
