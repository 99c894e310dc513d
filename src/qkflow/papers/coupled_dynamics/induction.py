"""When do induction heads form, and does a symmetric init bring them forward?

The stored study `induction` trains two layers on `names`, whose words only an induction head can predict: a
model that knows which ten words a document has is left with a loss of ln 10 = 2.30.
"""

from __future__ import annotations

from qkflow.papers.claims import Results
from qkflow.report.document import format_count
from qkflow.studies.run_data import RunData

RECORD = "induction"
FORMED = 2.15  # nats: below what the words of a document alone allow


def induction_rows(results: Results) -> list[dict[str, str]]:
    """Return one row per seed: tokens until the loss of each init is below `FORMED`, and its final loss."""
    comparison = results.comparison(RECORD)
    runs = {arm.best_init: comparison.runs_of(arm.cell) for arm in comparison.summary.arms}
    return [
        {
            "seed": str(seed),
            **{f"{init}: {k}": v for init, found in runs.items() for k, v in _cells(found[i])},
        }
        for i, seed in enumerate(run.seed for run in next(iter(runs.values())))
    ]


def _cells(run: RunData) -> list[tuple[str, str]]:
    formed = next((tokens for _, tokens, _, loss in run.curve() if loss < FORMED), None)
    return [
        ("tokens", "not reached" if formed is None else format_count(formed)),
        ("loss", f"{run.loss:.2f}"),
    ]
