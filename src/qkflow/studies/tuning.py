"""The search of learning rates: the same grid for every cell, widened until every optimum is interior.

A baseline whose best learning rate is at the edge of the grid is not tuned, and a gain over it proves little.
Whenever the best rate of any cell is at an edge, that edge is extended for all cells, so that every cell has
the same number of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qkflow.studies.analysis import best_lr

MAX_WIDENINGS = 4  # rounds after the first grid
WIDENING = 2.0  # ratio of a new rate to the edge it extends

Losses = Mapping[float, float | None]  # final loss by factor of the learning rate; None if the run diverged
RunTrials = Callable[[Sequence[float]], Mapping[str, Losses]]


def tune_lr(run_trials: RunTrials, factors: Sequence[float]) -> dict[str, float]:
    """Return the best factor of every cell.

    `run_trials` trains every cell with each of the given factors of the learning rate, and returns the
    losses by cell. A cell that diverged with all of them is left out.
    """
    losses: dict[str, dict[float, float | None]] = {}
    new = sorted(set(factors))
    for _ in range(1 + MAX_WIDENINGS):
        for cell, by_factor in run_trials(new).items():
            losses.setdefault(cell, {}).update(by_factor)
        new = wider_factors(losses)
        if not new:
            break
    best = {cell: best_lr(by_factor) for cell, by_factor in losses.items()}
    return {cell: factor for cell, factor in best.items() if factor is not None}


def wider_factors(losses: Mapping[str, Losses]) -> list[float]:
    """Return the factors beyond the edges at which a cell is best; none if every optimum is interior.

    Where all runs of a cell diverged, smaller factors are tried.
    """
    new: set[float] = set()
    for by_factor in losses.values():
        low, high = min(by_factor), max(by_factor)
        best = best_lr(by_factor)
        if best is None or best == low:
            new.add(low / WIDENING)
        if best is not None and best == high:
            new.add(high * WIDENING)
    return sorted(new)
