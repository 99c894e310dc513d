"""A comparison as one small JSON file: its plan, and what every run measured.

A record stands for the folder of a study, which has the weights and logs as well: `load_comparison` reads
either, and judges the runs of a record as it judges those of a folder. Curves are kept, probes reduced over
layers, and training logs only as their stability.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from qkflow.errors import InputError
from qkflow.files import write_atomic, write_json
from qkflow.plain_data import read_json
from qkflow.studies.plan import PlannedRun, StudyPlan
from qkflow.studies.run_data import RunData
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.training.metrics_log import plain_row
from qkflow.training.run_dir import METRICS_FILE, RESULT_FILE, check_result

RECORD_KIND = "qkflow comparison"
_RESULT_KEYS = (
    *("status", "error", "loss", "bits_per_byte", "tokens", "seconds", "step_seconds"),
    *("peak_memory_bytes", "parameters", "flops_per_token"),
)
_CURVE_KEYS = ("step", "tokens", "seconds", "loss")
# Probes by layer are reduced to one number: the mean, or the largest where one head matters.
_PROBES: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(("attention_entropy", "qk_scale", "ov_scale", "qk_symmetry", "qk_directionality"), fmean),
    **dict.fromkeys(("induction_score", "previous_token_score", "max_logit"), max),
    **dict.fromkeys(("slow_gate", "slow_share"), max),
    "copy_gain": float,  # of the whole model
}
_SIGNIFICANT_DIGITS = 6


def write_record(plan: StudyPlan, runs: list[RunData], path: Path) -> None:
    """Write a comparison as a record, one run per line."""
    environments = [run.result["environment"] for run in runs if run.result and "environment" in run.result]
    head = {key: value for key, value in plan.to_dict().items() if key != "runs"}
    lines = [json.dumps(_run_to_dict(run), allow_nan=False, separators=(",", ":")) for run in runs]
    text = json.dumps(
        {"kind": RECORD_KIND, **head, "environment": _common(environments)}, allow_nan=False, indent=1
    )
    write_atomic(path, text.removesuffix("\n}") + ',\n "runs": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


def read_record(path: Path) -> tuple[StudyPlan, list[RunData]]:
    """Return the plan and the runs of a record. Raise InputError if the file is not one."""
    try:
        values = read_json(path, code="corrupt-record")
    except OSError as error:
        raise InputError(f"{path} cannot be read as JSON ({error})", code="corrupt-record") from None
    if not isinstance(values, dict) or values.get("kind") != RECORD_KIND:
        raise InputError(
            f"{path} is not the record of a comparison: `qkflow report FOLDER --record FILE` writes one",
            code="not-a-record",
        )
    names = PlannedRun.__dataclass_fields__
    listed = values.get("runs")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    planned = [{name: row.get(name) for name in names} for row in rows]
    plan = StudyPlan.from_dict({**values, "runs": planned}, path)
    try:
        environment = dict(values.get("environment") or {})
        runs = [_run_from_dict(run, row, environment) for run, row in zip(plan.runs, rows, strict=True)]
    except InputError as error:
        raise InputError(f"{path}: {error}", code="corrupt-record") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path} has a damaged run ({error})", code="corrupt-record") from None
    return plan, runs


def restore_runs(plan: StudyPlan, runs: Sequence[RunData], study_dir: StudyDir) -> None:
    """Write the plan and the finished runs of a record as a study's folder, without weights.

    `qkflow compare` then counts these runs as finished, and trains only what is added.
    """
    for run in runs:
        if run.result is None or run.result.get("status") != "finished":
            continue
        folder = study_dir.run_dir(run.id).path
        rows = [{"kind": kind, **row} for kind, kept in run.metrics.items() for row in _with_steps(kept, run)]
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        write_atomic(folder / METRICS_FILE, text)
        write_json(folder / RESULT_FILE, run.result)  # last, as in a run
    plan.save(study_dir)


def _with_steps(rows: Sequence[dict[str, Any]], run: RunData) -> list[dict[str, Any]]:
    """Return rows with their step. Probes of a record have only tokens; the curve has both."""
    last = next(iter(reversed(run.metrics.get("eval", ()))), None)
    per_token = last["step"] / last["tokens"] if last else 0.0
    return [row if "step" in row else {"step": round(row["tokens"] * per_token), **row} for row in rows]


def _common(environments: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all environments have in common."""
    first, *others = environments or [{}]
    return {key: value for key, value in first.items() if all(each.get(key) == value for each in others)}


def _run_to_dict(run: RunData) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(run, name) for name in PlannedRun.__dataclass_fields__}
    if run.result is not None:
        row |= {key: _rounded(run.result[key]) for key in _RESULT_KEYS if run.result.get(key) is not None}
    if run.phase != "compare":
        return row
    if stability := run.stability():
        row["stability"] = _rounded(asdict(stability))
    row["tokens_per_second"] = _rounded(run.throughput())
    row["curve"] = [
        [_rounded(point.get(key)) for key in _CURVE_KEYS] for point in run.metrics.get("eval", [])
    ]
    row["probes"] = _probes_to_columns(run.metrics.get("probe", []))
    return row


def _run_from_dict(run: PlannedRun, row: Mapping[str, Any], environment: Mapping[str, Any]) -> RunData:
    result = {key: row[key] for key in (*_RESULT_KEYS, "stability") if key in row}
    check_result(result, f"run {run.id}")
    if result:
        result["environment"] = dict(environment)
    metrics: dict[str, list[dict[str, Any]]] = {}
    if run.phase == "compare":
        stored = {
            "eval": [dict(zip(_CURVE_KEYS, point, strict=True)) for point in row.get("curve", ())],
            "probe": _probes_from_columns(row.get("probes", {})),
            "train": [{"step": 0, "tokens_per_second": row.get("tokens_per_second")}],
        }
        metrics = {kind: [plain_row(each) for each in rows] for kind, rows in stored.items()}
    return RunData(**asdict(run), result=result or None, metrics=metrics)


def _probes_to_columns(probes: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the tokens of the probes, and a list of one number per probe by measure."""
    probes = [probe for probe in probes if probe.get("tokens") is not None]
    columns: dict[str, list[float]] = {"tokens": [probe["tokens"] for probe in probes]}
    for name, reduce in _PROBES.items():
        kind = (int, float) if reduce is float else list
        values = [probe.get(name) for probe in probes]
        if values and all(isinstance(value, kind) and value != [] for value in values):
            columns[name] = _rounded([float(reduce(value)) for value in values])
    return columns


def _probes_from_columns(columns: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    lists = [name for name, reduce in _PROBES.items() if reduce is not float]
    return [{**row, **{name: [row[name]] for name in lists if name in row}} for row in rows]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    if isinstance(value, list):
        return [float(f"{item:.3g}") if isinstance(item, float) else _rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value
