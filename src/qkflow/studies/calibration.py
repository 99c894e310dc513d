"""Calibration: whole studies simulated with the code that judges real ones.

A simulated run has the loss  μ(arm, init) + seed effect + noise(arm, init).  A study has a pool of baselines
and several arms, each with several inits; it screens, retires inits, looks, corrects and decides like
`compare`. A verdict is false if it contradicts the difference between the arm's best init and the best
baseline, so choosing the wrong init counts against the procedure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from qkflow.config_io import Count, Positive, check_ranges, dataclass_from_dict
from qkflow.studies.design import (
    DECIDED,
    SCREENING_SEEDS,
    Array,
    SeedDesign,
    TestResult,
    Verdict,
    decide,
    in_the_race,
)
from qkflow.studies.stats import holm

DesignName = Literal["fixed", "adaptive"]
SEED_COUNTS = (3, 5, 10, 20)
EFFECTS = (0.5, 1.0, 2.0, 3.0, 5.0)  # percent of perplexity
NOISE = 0.015  # standard deviation of the loss of one run, beyond what its seed explains
SEED_EFFECT = 0.02  # standard deviation of what runs of one seed share
_BATCH = 500  # studies simulated at a time


@dataclass(frozen=True)
class Scenario:
    """What is simulated, as differences of losses.

    effect      of the first arm, or of all arms with `all_arms`; negative: it helps
    init_gaps   loss of each init above the best one of its arm
    noise       of each init, and of each init of the baselines where it differs
    pool        baselines, if there are more of them than inits of an arm
    """

    name: str
    effect: float = 0.0
    arms: int = 5
    init_gaps: tuple[float, ...] = (0.0, 0.15, 0.3)
    noise: tuple[float, ...] = (NOISE,) * 3
    baseline_noise: tuple[float, ...] | None = None
    pool: int | None = None
    seed_effect: float = SEED_EFFECT
    heavy_tails: bool = False
    all_arms: bool = False

    @property
    def effects(self) -> Array:
        """The effect of every arm."""
        return np.where(np.arange(self.arms) < (self.arms if self.all_arms else 1), self.effect, 0.0)

    def draw(self, studies: int, seeds: int, rng: np.random.Generator) -> Array:
        """Return losses (studies, 1 + arms, cells, seeds), the pool first; a missing cell is infinite."""
        inits = len(self.init_gaps)
        cells = max(inits, self.pool or inits)
        gaps = np.full((1 + self.arms, cells), math.inf)
        noise = np.ones((1 + self.arms, cells))
        gaps[:, :inits], noise[:, :inits] = self.init_gaps, self.noise
        if self.baseline_noise:
            noise[0, :inits] = self.baseline_noise
        if self.pool:
            gaps[0], noise[0] = np.resize(self.init_gaps, cells), np.resize(noise[0, :inits], cells)
        gaps[1:] += self.effects[:, None]
        shape = (studies, 1 + self.arms, cells, seeds)
        # Student's t with 4 degrees of freedom has a variance of 2
        e = rng.standard_t(4, shape) / math.sqrt(2) if self.heavy_tails else rng.standard_normal(shape)
        blocks = rng.normal(0, self.seed_effect, (studies, 1, 1, seeds))
        return gaps[None, :, :, None] + blocks + noise[None, :, :, None] * e


NULL_SCENARIOS = (
    Scenario("one init clearly best"),
    Scenario("inits tied", init_gaps=(0.0,) * 3),
    Scenario("inits close", init_gaps=(0.0, 0.015, 0.015)),
    Scenario("seeds correlated", init_gaps=(0.0,) * 3, seed_effect=0.1),
    Scenario("variances unequal by init", init_gaps=(0.0,) * 3, noise=(0.005, 0.015, 0.08)),
    Scenario("variants noisier", init_gaps=(0.0,) * 3, noise=(0.08,) * 3, baseline_noise=(NOISE,) * 3),
    Scenario("baselines noisier", init_gaps=(0.0,) * 3, baseline_noise=(0.08,) * 3),
    Scenario("pool of 12, one init", init_gaps=(0.0,), noise=(NOISE,), pool=12),
    Scenario("heavy tails", heavy_tails=True),
    Scenario("one comparison", arms=1),
)


def effect_scenarios(effects: Sequence[float] = EFFECTS) -> list[Scenario]:
    """Return scenarios in which the first arm lowers perplexity by each of `effects` percent."""
    return [Scenario(f"effect {e:g}%", effect=math.log1p(-e / 100)) for e in effects]


def noise_scenarios(effect: float = 3.0, noise: Sequence[float] = (0.0035, 0.007, 0.014)) -> list[Scenario]:
    """Return scenarios of one effect in all arms at several noises, unknown beforehand."""
    base = Scenario("", effect=math.log1p(-effect / 100), arms=3, all_arms=True)
    names = (f"effect {effect:g}% in all arms, noise {100 * sd:g}%" for sd in noise)
    return [replace(base, name=name, noise=(sd,) * 3) for name, sd in zip(names, noise, strict=True)]


@dataclass(frozen=True)
class CalibrationRow:
    """Outcome of many studies of one scenario and design."""

    scenario: str
    seeds: int  # of a fixed design; the most of an adaptive one
    design: DesignName
    studies: Count
    false_verdicts: float  # share of studies with a false helps or hurts
    false_equivalent: float  # share of studies with a false equivalent
    power: float | None  # share of arms with an effect that are found
    undecided: float  # share of arms
    mean_runs: float
    mean_seeds: float  # judged seeds of an arm

    def __post_init__(self) -> None:
        check_ranges(self, "rows")

    @property
    def standard_error(self) -> float:
        """Of `false_verdicts`."""
        share = min(max(self.false_verdicts, 1 / self.studies), 0.5)
        return math.sqrt(share * (1 - share) / self.studies)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "standard_error": self.standard_error}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CalibrationRow:
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return dataclass_from_dict(cls, known, "rows")


@dataclass
class _Tally:
    studies: int = 0
    false_verdicts: int = 0
    false_equivalent: int = 0
    detected: float = 0.0
    undecided: int = 0
    runs: float = 0.0
    seeds: float = 0.0


def calibrate(
    scenario: Scenario,
    seeds: int,
    design: DesignName,
    *,
    studies: int = 10_000,
    margin: float = 1.0,
    confidence: float = 0.95,
    screening: int = SCREENING_SEEDS,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> CalibrationRow:
    """Simulate `studies` studies. `margin` is in percent of perplexity."""
    rng = np.random.default_rng([seed, seeds, design == "adaptive"])
    bound = math.log1p(margin / 100)
    seed_design = (
        SeedDesign.adaptive(seeds, confidence, bound)
        if design == "adaptive"
        else SeedDesign.fixed(confidence, bound)
    )
    tally = _Tally()
    while tally.studies < studies:
        count = min(_BATCH, studies - tally.studies)
        _simulate(scenario, seeds, seed_design, count, screening, rng, tally)
        if on_progress:
            on_progress(count)
    n = tally.studies
    return CalibrationRow(
        scenario=scenario.name,
        seeds=seeds,
        design=design,
        studies=n,
        false_verdicts=tally.false_verdicts / n,
        false_equivalent=tally.false_equivalent / n,
        power=tally.detected / n if scenario.effect else None,
        undecided=tally.undecided / (n * scenario.arms),
        mean_runs=tally.runs / n,
        mean_seeds=tally.seeds / (n * scenario.arms),
    )


def _simulate(
    scenario: Scenario,
    seeds: int,
    design: SeedDesign,
    studies: int,
    screening: int,
    rng: np.random.Generator,
    tally: _Tally,
) -> None:
    has_choice = scenario.pool or len(scenario.init_gaps) > 1
    screening = screening if has_choice else 0
    losses = scenario.draw(studies, screening + seeds, rng)
    exists = np.isfinite(losses[..., 0])
    leaders, racing = choose_leaders(losses[..., : max(1, screening)], exists)
    judged = losses[..., screening:]
    runs = screening * exists.sum(axis=(1, 2)).astype(float)
    verdicts = np.full((studies, scenario.arms), Verdict.UNDECIDED.value, dtype="<U12")
    arm_seeds = np.zeros((studies, scenario.arms))
    last = TestResult(*(np.ones((studies, scenario.arms)) for _ in range(3)))
    by_look = judge_arms(judged, leaders, racing, design)
    before = 0
    for look, n in enumerate(design.looks or (seeds,)):
        open_arms = ~np.isin(verdicts, DECIDED)
        active = open_arms.any(axis=1)
        cells = np.where(open_arms, racing[:, 1:].sum(axis=2), 0).sum(axis=1)
        # one more run per seed than the cells in the race: the noise floor
        runs += (n - before) * np.where(active, cells + racing[:, 0].sum(axis=1) + 1, 0)
        arm_seeds += (n - before) * open_arms
        last = TestResult(
            np.where(open_arms, by_look.p[..., look], last.p),
            np.where(open_arms, by_look.direction[..., look], last.direction),
            np.where(open_arms, by_look.p_equivalent[..., look], last.p_equivalent),
        )
        corrected = replace(last, p=holm(last.p), p_equivalent=holm(last.p_equivalent))
        decided = decide(corrected, _mean_differences(judged[..., :n], leaders), design)
        verdicts = np.where(open_arms, decided, verdicts)
        before = n
    _count(scenario, design, verdicts, arm_seeds, runs, tally)


def choose_leaders(screened: Array, exists: Array) -> tuple[Array, Array]:
    """Return the leading cell (S, A) of every arm and the cells (S, A, C) still in the race."""
    leaders = screened.mean(axis=-1).argmin(axis=-1)
    best = np.take_along_axis(screened, leaders[..., None, None], axis=2)[:, :, 0]
    finite = np.where(exists[..., None], screened, 0.0)
    return leaders, exists & in_the_race(best, finite)


def judge_arms(judged: Array, leaders: Array, racing: Array, design: SeedDesign) -> TestResult:
    """Test every arm after every look: (S, arms, K)."""
    lead = np.take_along_axis(judged, leaders[..., None, None], axis=2)[:, :, 0]  # (S, A, n)
    # A cell out of the race is replaced by the leader of its arm, whose test counts anyway.
    inside = np.where(racing[..., None], judged, lead[:, :, None])
    against_pool = lead[:, 1:, None] - inside[:, :1]  # (S, arms, pool, n)
    against_leader = inside[:, 1:] - lead[:, :1, None]  # (S, arms, cells, n)
    cells = range(judged.shape[2])
    return design.test([against_pool[:, :, c] for c in cells], [against_leader[:, :, c] for c in cells])


def _mean_differences(judged: Array, leaders: Array) -> Array:
    lead = np.take_along_axis(judged, leaders[..., None, None], axis=2)[:, :, 0].mean(axis=-1)
    return lead[:, 1:] - lead[:, :1]


def _count(
    scenario: Scenario, design: SeedDesign, verdicts: Array, arm_seeds: Array, runs: Array, tally: _Tally
) -> None:
    effects = scenario.effects
    false = ((verdicts == Verdict.HELPS.value) & (effects >= 0)) | (
        (verdicts == Verdict.HURTS.value) & (effects <= 0)
    )
    outside = np.abs(effects) >= (design.margin or math.inf)
    tally.studies += len(verdicts)
    tally.false_verdicts += int(false.any(axis=1).sum())
    tally.false_equivalent += int(((verdicts == Verdict.EQUIVALENT.value) & outside).any(axis=1).sum())
    with_effect = verdicts[:, effects != 0]
    expected = Verdict.HELPS.value if scenario.effect < 0 else Verdict.HURTS.value
    tally.detected += float((with_effect == expected).mean(axis=1).sum()) if with_effect.size else 0.0
    tally.undecided += int((verdicts == Verdict.UNDECIDED.value).sum())
    tally.runs += float(runs.sum())
    tally.seeds += float(arm_seeds.sum())


@dataclass(frozen=True)
class Saving:
    """Runs of adaptive studies against fixed designs with the same error rates at the worst noise."""

    effect_percent: float
    worst_power: float  # of the adaptive design over the noises
    adaptive_runs: Positive  # mean over the noises
    fixed_seeds: int  # the least with that power at the worst noise
    fixed_runs: float  # with these seeds, inits screened
    full_grid_runs: float  # with these seeds for every init

    def __post_init__(self) -> None:
        check_ranges(self, "saving")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Saving:
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return dataclass_from_dict(cls, known, "saving")

    def to_dict(self) -> dict[str, float]:
        return {
            **asdict(self),
            "ratio": self.full_grid_runs / self.adaptive_runs,
            "ratio_screened": self.fixed_runs / self.adaptive_runs,
        }


def runs_saved(
    effect: float = 3.0,
    max_seeds: int = 20,
    studies: int = 10_000,
    on_progress: Callable[[int], None] | None = None,
) -> Saving:
    """Compare adaptive studies with fixed ones at an effect in percent and noises unknown beforehand.

    A fixed design has to plan for the worst noise. It gets the fewest seeds that reach the adaptive design's
    power there, within its simulation error.
    """
    scenarios = noise_scenarios(effect)
    adaptive = [
        calibrate(s, max_seeds, "adaptive", studies=studies, on_progress=on_progress) for s in scenarios
    ]
    worst, power = scenarios[-1], min(row.power or 0.0 for row in adaptive)
    tolerance = math.sqrt(power * (1 - power) / studies)
    fixed = None
    for seeds in range(3, max_seeds + 1):
        fixed = calibrate(worst, seeds, "fixed", studies=studies, on_progress=on_progress)
        if (fixed.power or 0.0) >= power - tolerance:
            break
    assert fixed is not None
    cells = (1 + worst.arms) * len(worst.init_gaps)
    mean_runs = sum(row.mean_runs for row in adaptive) / len(adaptive)
    full = float((cells + 1) * fixed.seeds)
    return Saving(effect, power, mean_runs, fixed.seeds, fixed.mean_runs, full)
