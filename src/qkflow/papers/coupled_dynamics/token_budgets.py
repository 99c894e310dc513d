"""Does a gain last as the budget of tokens grows, or is it a head start?

The stored studies of `BUDGETS` train the same arms on several budgets, each with its own schedule. Three
hypotheses with one parameter, fitted on all budgets but the largest, predict the difference at the largest:

    same difference    d(t) = d                      a lasting gain
    same factor        d(t) = L(c·t) − L(t)          the arm learns c times as fast
    same saving        d(t) = L(t + s) − L(t)        the arm is s tokens ahead

L is the loss of the arm compared with, linear in log t between the budgets and beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from qkflow.papers.claims import Measurement, Results, compare_arms, describe_scale, find_arm, training_hours
from qkflow.papers.coupled_dynamics.arms import (
    DIFFERENTIAL,
    EULER,
    FIXED_DIFFERENTIAL,
    FIXED_EULER,
    FIXED_SYMMETRIC,
    INCREASING_PACE,
    PLAIN_DIFFERENTIAL,
    PLAIN_EULER,
    PLAIN_REFERENCE,
    REFERENCE,
    STUDY,
    TUNED_PACE,
    TUNED_PLAIN_DIFFERENTIAL,
    TUNED_PLAIN_EULER,
    TUNED_PLAIN_REFERENCE,
    TUNED_REFERENCE,
    TUNED_STUDY,
    WEAK_EULER,
    WEAK_REFERENCE,
    WEAK_SYMMETRIC,
)
from qkflow.report.document import format_count
from qkflow.report.tables import format_change
from qkflow.studies import Comparison
from qkflow.studies.sentences import format_percent
from qkflow.studies.stats import PairedDifference, perplexity_percent_change

BUDGETS = (
    *("tokens-250k", "tokens-500k", STUDY, "tokens-2M", "tokens-4M", "tokens-16M"),
    *("pace-lm", TUNED_STUDY),  # 500k and 1M tokens
)
MIN_BUDGETS = 3  # two to fit, one to predict
HYPOTHESES = ("same difference", "same factor", "same saving")


@dataclass(frozen=True)
class Gain:
    """What is followed over the budgets. An arm may have another name in studies that fix its rate."""

    label: str
    arm: tuple[str, ...]
    against: tuple[str, ...]


WEAK, TUNED = (WEAK_REFERENCE,), (TUNED_REFERENCE, REFERENCE)
PLAIN = (TUNED_PLAIN_REFERENCE, PLAIN_REFERENCE)
WEAK_EULER_GAIN = Gain("euler, fan_in, AdamW", (WEAK_EULER, FIXED_EULER), WEAK)
EULER_GAIN = Gain("euler, modern, Muon", (EULER,), (REFERENCE,))
GAINS = (
    WEAK_EULER_GAIN,
    Gain("symmetric init, fan_in, AdamW", (WEAK_SYMMETRIC, FIXED_SYMMETRIC), WEAK),
    EULER_GAIN,
    Gain("differential, modern, Muon", (DIFFERENTIAL, FIXED_DIFFERENTIAL), (REFERENCE,)),
    Gain("increasing pace, modern, Muon", (TUNED_PACE, INCREASING_PACE), TUNED),
    Gain("plain feed-forward, modern, Muon", (TUNED_PLAIN_REFERENCE, PLAIN_REFERENCE), TUNED),
    Gain("euler, plain feed-forward", (TUNED_PLAIN_EULER, PLAIN_EULER), PLAIN),
    Gain("differential, plain feed-forward", (TUNED_PLAIN_DIFFERENTIAL, PLAIN_DIFFERENTIAL), PLAIN),
    Gain("modern and Muon instead of fan_in and AdamW", (REFERENCE,), WEAK),
)


@dataclass(frozen=True)
class Point:
    """One budget: the difference of the arm, and the loss of the arm it is compared with."""

    tokens: float
    difference: PairedDifference
    against_loss: float


@dataclass(frozen=True)
class Prediction:
    """What a hypothesis says of the largest budget, and whether the measured interval contains it."""

    hypothesis: str
    difference: float  # nats
    is_inside: bool

    def __str__(self) -> str:
        change = format_percent(perplexity_percent_change(self.difference))
        return f"{change}, {'inside' if self.is_inside else 'outside'}"


@dataclass(frozen=True)
class TokenFactor:
    """How many times the tokens of the arm the arm compared with needs for the same loss.

    The curve of the latter has one point per budget, each with its own schedule: a loss in the middle of a
    schedule is higher than that of a shorter run.
    """

    record: str
    gain: Gain
    published: float

    def read(self, results: Results) -> Measurement:
        points = read_points(results, self.gain)
        comparison = results.comparison(self.record)
        point = next(each for each in points if each.tokens == comparison.summary.config.tokens)
        factors = token_factors(points, point)
        text = "{}: standard needs {:.2f}× ({:.2f}…{:.2f}) the tokens".format(self.gain.label, *factors)
        _, low, high = factors
        return Measurement(
            text=text,
            scale=describe_scale(comparison),
            seeds=point.difference.pairs,
            supports=None if low < self.published < high else low >= self.published,
            command=comparison.summary.command,
            core_hours=training_hours(comparison),
        )


def token_factors(points: Sequence[Point], point: Point) -> tuple[float, float, float]:
    """Return the factor of tokens that the difference at `point` is worth, and its interval."""
    curve = _loss_curve([each.tokens for each in points], [each.against_loss for each in points])

    def factor(difference: float) -> float:
        def excess(c: float) -> float:
            return float(curve(np.array([point.tokens * np.exp(c)]))[0]) - point.against_loss - difference

        return float(np.exp(brentq(excess, -10.0, 10.0)))

    low, high = point.difference.high, point.difference.low  # a lower loss is worth more tokens
    assert low is not None
    assert high is not None
    return factor(point.difference.mean), factor(low), factor(high)


def token_budget_rows(results: Results) -> list[dict[str, str]]:
    """Return every gain by budget, and the predictions of the largest budget."""
    points_by_gain = {gain.label: points for gain in GAINS if (points := read_points(results, gain))}
    budgets = sorted({point.tokens for points in points_by_gain.values() for point in points})
    rows = []
    for label, points in points_by_gain.items():
        changes = {point.tokens: format_change(point.difference) for point in points}
        predictions = {each.hypothesis: each for each in predict_largest(points)}
        rows.append(
            {
                "change by": label,
                **{format_count(tokens): changes.get(tokens, "–") for tokens in budgets},
                **{
                    f"predicted: {name}": str(predictions[name]) if predictions else "–"
                    for name in HYPOTHESES
                },
            }
        )
    return rows


def read_points(results: Results, gain: Gain) -> list[Point]:
    """Return the budgets at which both arms were trained on enough seeds, in order."""
    points = []
    for name in BUDGETS:
        if not results.has(name):
            continue
        comparison = results.comparison(name)
        arm, against = (_find(comparison, names) for names in (gain.arm, gain.against))
        if arm is None or against is None:
            continue
        difference, _ = compare_arms(comparison, arm, against)
        if difference is not None and comparison.summary.config.tokens:
            loss = float(np.mean(_losses(comparison, against)))
            points.append(Point(float(comparison.summary.config.tokens), difference, loss))
    return sorted(points, key=lambda point: point.tokens)


def predict_largest(points: Sequence[Point]) -> list[Prediction]:
    """Fit every hypothesis on all points but the last and predict the last. Empty with too few points."""
    if len(points) < MIN_BUDGETS:
        return []
    *fitted, last = points
    tokens = np.array([point.tokens for point in fitted])
    observed = np.array([point.difference.mean for point in fitted])
    errors = np.array([_standard_error(point.difference) for point in fitted])
    curve = _loss_curve([point.tokens for point in points], [point.against_loss for point in points])
    hypotheses: list[tuple[Callable[[float, np.ndarray], np.ndarray], tuple[float, float]]] = [
        (lambda d, t: np.full_like(t, d), (-3.0, 3.0)),
        (lambda c, t: curve(t * np.exp(c)) - curve(t), (-5.0, 5.0)),
        (lambda s, t: curve(np.maximum(t + s, 1.0)) - curve(t), (-0.9 * tokens[0], float(tokens[-1]))),
    ]
    predictions = []
    for name, (difference, bounds) in zip(HYPOTHESES, hypotheses, strict=True):
        best = minimize_scalar(
            lambda parameter, difference=difference: float(
                (((difference(parameter, tokens) - observed) / errors) ** 2).sum()
            ),
            bounds=bounds,
            method="bounded",
        ).x
        predicted = float(difference(best, np.array([last.tokens]))[0])
        low, high = last.difference.low, last.difference.high
        is_inside = low is not None and high is not None and low <= predicted <= high
        predictions.append(Prediction(name, predicted, is_inside))
    return predictions


def _loss_curve(tokens: Sequence[float], losses: Sequence[float]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the loss as a function of tokens, linear in log t, continued with the first and last slopes."""
    x, y = np.log(tokens), np.asarray(losses)
    slopes = np.diff(y) / np.diff(x)

    def loss(t: np.ndarray) -> np.ndarray:
        z = np.log(t)
        segment = np.clip(np.searchsorted(x, z) - 1, 0, len(slopes) - 1)
        line: np.ndarray = y[segment] + slopes[segment] * (z - x[segment])
        return line

    return loss


def _standard_error(difference: PairedDifference) -> float:
    return max((difference.sd or 0.0) / difference.pairs**0.5, 1e-6)


def _find(comparison: Comparison, names: Sequence[str]) -> str | None:
    trained = {arm.variant for arm in comparison.summary.arms if arm.losses}
    return next((name for name in names if name in trained), None)


def _losses(comparison: Comparison, name: str) -> tuple[float, ...]:
    return find_arm(comparison, name).loss_by_seed
