"""The runs of a study as read from their folders."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qkflow.studies.plan import Metric, StudyPlan
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.stability import Stability, measure_stability

THROUGHPUT_QUANTILE = 0.9  # of the logged tokens per second of a run


@dataclass(frozen=True)
class RunData:
    """One run as read from its folder."""

    id: str
    phase: str
    cell: str
    seed: int
    lr: float
    tokens: int
    result: dict[str, Any] | None
    metrics: dict[str, list[dict[str, Any]]]
    last_log_line: str = ""

    @property
    def loss(self) -> float | None:
        """The final validation loss; None unless the run finished with a finite one."""
        if self.result is None or self.result.get("status") != "finished":
            return None
        return finite_or_none(self.result.get("loss"))

    def score(self, metric: Metric) -> float | None:
        """Return the loss, or the logarithm of bits per byte: differences are relative changes of either."""
        if metric == "perplexity" or self.loss is None:
            return self.loss
        bits = finite_or_none((self.result or {}).get("bits_per_byte"))
        return math.log(bits) if bits else None

    @property
    def status(self) -> str:
        if self.result is None:
            return "not finished"
        return "finished" if self.loss is not None else "failed"

    @property
    def error(self) -> str:
        return str((self.result or {}).get("error") or self.last_log_line or "no finite loss")

    def throughput(self) -> float | None:
        """Return tokens per second, as a high quantile: pauses and a shared CPU core must not count."""
        rows = self.metrics.get("train", [])
        speeds = [speed for row in rows if (speed := finite_or_none(row.get("tokens_per_second")))]
        return float(np.quantile(speeds, THROUGHPUT_QUANTILE)) if speeds else None

    def stability(self) -> Stability | None:
        """Return the stability of the run, which a record has in place of the training log."""
        stored = (self.result or {}).get("stability")
        return Stability(**stored) if stored else measure_stability(self.metrics.get("train", []))

    def curve(self) -> list[tuple[float, float, float, float]]:
        """Return (step, tokens, seconds, loss) of every evaluation; seconds follow from `throughput`."""
        speed = self.throughput()
        rows = []
        for row in self.metrics.get("eval", []):
            step, *values = (finite_or_none(row.get(name)) for name in ("step", "tokens", "seconds", "loss"))
            tokens, seconds, loss = values
            if step is not None and tokens is not None and seconds is not None and loss is not None:
                rows.append((step, tokens, tokens / speed if speed else seconds, loss))
        return rows


def load_runs(study_dir: StudyDir, plan: StudyPlan) -> list[RunData]:
    """Read every planned run; metrics only of the runs that are compared."""
    runs = []
    for planned in plan.runs:
        run = study_dir.run_dir(planned.id)
        metrics = run.metrics() if planned.phase in ("screen", "compare") else {}
        runs.append(
            RunData(
                **asdict(planned), result=run.result(), metrics=metrics, last_log_line=run.last_log_line()
            )
        )
    return runs


def model_throughputs(runs: Iterable[RunData]) -> dict[str, float]:
    """Return tokens per second by model, of its fastest run: init and seed do not change the speed."""
    speeds: dict[str, float] = {}
    for run in runs:
        model = model_name(run.cell)
        speeds[model] = max(speeds.get(model, 0.0), run.throughput() or 0.0)
    return {model: speed for model, speed in speeds.items() if speed}


def model_name(cell: str) -> str:
    """Return the part of a cell's name before its init."""
    return cell.rpartition("@")[0]


def mean_finite(values: Iterable[float | None]) -> float | None:
    finite = [number for value in values if (number := finite_or_none(value)) is not None]
    return float(np.mean(finite)) if finite else None


def finite_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
