"""The largest learning rate that still trains, by model: a measure of stability.

The stored study `lr-limits` sweeps `train.lr` for several models. A rate trains if every seed finishes and
the mean loss is within `MAX_EXCESS` nats of the best rate of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qkflow.papers.claims import Results
from qkflow.studies import Comparison
from qkflow.studies.sentences import format_signed
from qkflow.studies.stats import perplexity_percent_change
from qkflow.studies.variants import Variant, parse_variant

RECORD = "lr-limits"
MAX_EXCESS = 0.5
LR = "train.lr"


@dataclass(frozen=True)
class Trial:
    """One model at one learning rate. `loss` is the mean over seeds, None if a seed failed."""

    lr: float
    loss: float | None


@dataclass(frozen=True)
class LrLimit:
    """The trials of one model, by rate."""

    model: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        return min((trial for trial in self.trials if trial.loss is not None), key=_loss)

    @property
    def largest(self) -> Trial:
        """The largest rate up to which every rate trains."""
        allowed = _loss(self.best) + MAX_EXCESS
        largest = self.best
        for trial in self.trials:
            if trial.lr > self.best.lr:
                if trial.loss is None or trial.loss > allowed:
                    break
                largest = trial
        return largest

    @property
    def is_censored(self) -> bool:
        """Whether the largest rate of the sweep still trains."""
        return self.largest == self.trials[-1]

    def __str__(self) -> str:
        return f"{'≥ ' if self.is_censored else ''}{self.largest.lr:g}"


def read_limits(comparison: Comparison) -> list[LrLimit]:
    """Return every model of a sweep over `train.lr`, in the order of the study."""
    trials: dict[str, list[Trial]] = {}
    for model, trial in _read_trials(comparison):
        trials.setdefault(model, []).append(trial)
    return [
        LrLimit(model, tuple(sorted(found, key=lambda trial: trial.lr)))
        for model, found in trials.items()
        if len(found) > 1 and any(trial.loss is not None for trial in found)
    ]


def lr_limit_rows(results: Results) -> list[dict[str, str]]:
    """Return the limits as a table. The cell of a rate is the change of perplexity to the model's best."""
    limits = read_limits(results.comparison(RECORD))
    rates = sorted({trial.lr for limit in limits for trial in limit.trials})
    rows = []
    for limit in limits:
        changes = {trial.lr: _describe(trial, limit.best) for trial in limit.trials}
        row = {"model": limit.model, "largest that trains": str(limit)}
        rows.append(row | {f"{lr:g}": changes.get(lr, "–") for lr in rates})
    return rows


def _read_trials(comparison: Comparison) -> Iterator[tuple[str, Trial]]:
    for arm in comparison.summary.arms:
        variant = parse_variant(arm.variant)
        lr = variant.override(LR)
        if lr is None or not (arm.losses or arm.failed_seeds):
            continue
        yield _without_lr(variant, arm.best_init), Trial(lr, None if arm.failed_seeds else arm.loss)


def _without_lr(variant: Variant, init: str) -> str:
    kept = tuple((key, text) for key, text in variant.overrides if key != LR)
    return f"{replace(variant, overrides=kept, init=None).name}@{init}"


def _describe(trial: Trial, best: Trial) -> str:
    if trial.loss is None:
        return "fails"
    if trial == best:
        return "best"
    change = perplexity_percent_change(_loss(trial) - _loss(best))
    return "fails" if change is None else f"{format_signed(change)}%"


def _loss(trial: Trial) -> float:
    assert trial.loss is not None
    return trial.loss
