"""`compare`: does a variant beat the best-started standard model on this corpus, at this size?

What is done, in order:
1. measure what a step of every model costs, if the budget is in minutes or matched by time or FLOPs;
2. with `tune_lr`, give every variant from every start the same learning-rate search, on a seed of its own;
3. run every variant from every start with the same seeds;
4. judge: the reference is the standard model from its best start, each variant stands at its best start.
Everything lies in the study's folder, and everything that is there already is not done again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from qkflow.config_io import mapping, parse_count, read
from qkflow.data import EvalWindows, TrainWindows, prepare
from qkflow.errors import InputError, unknown
from qkflow.studies.analysis import RunData, analyse, best_rate, load_runs
from qkflow.studies.grid import (
    CALIBRATION_SEEDS,
    CALIBRATION_STEPS,
    TUNING_SEED,
    Grid,
    Question,
    Run,
    build_grid,
    check_models,
)
from qkflow.studies.runner.engines import ENGINES, Engine
from qkflow.studies.runner.execution import Stopped, Watched, execute
from qkflow.studies.runner.study_dir import STUDY, StudyFolder
from qkflow.studies.variants import STANDARD, Parts
from qkflow.training.distributed import find_device

if TYPE_CHECKING:
    import pandas

DEFAULT_TOKENS = 200_000
# What one folder holds one answer to; variants, seeds, starts and tuning may grow from call to call.
_OF_THE_FOLDER = (
    "data",
    "preset",
    "tokenizer",
    "length",
    "batch",
    "schedule",
    "tokens",
    "minutes",
    "match",
    "lr",
    "device",
)

Prepare = Callable[[Question], Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """The answer: `summary` as in summary.json, `rows` flat for tables, `verdicts` in words."""

    folder: Path
    summary: dict[str, Any]
    runs: list[RunData]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One flat dict per variant, the reference first."""
        from qkflow.report.tables import flat_row

        reference = self.summary["reference"]
        return [flat_row(row) for row in [*([reference] if reference else []), *self.summary["variants"]]]

    @property
    def verdicts(self) -> dict[str, str]:
        return {row["variant"]: row["sentence"] for row in self.summary["variants"]}

    @property
    def complete(self) -> bool:
        return bool(self.summary["runs"]["finished"] == self.summary["runs"]["planned"])

    def to_dataframe(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.rows)


def compare(
    data: str = Question.data,
    *,
    out: str | Path | None = None,
    engine: str = "local",
    jobs: int | None = None,
    threads: int = 1,
    worker: Sequence[str] | None = None,
    parts: Parts | None = None,
    prepare: Prepare | None = None,
    **settings: Any,
) -> Comparison:
    """Compare variants on a corpus; `settings` are those of `Question` (variants, seeds, tokens, preset, …).

    >>> answer = compare("speeches", variants="standard,euler", tokens="200k")   # doctest: +SKIP
    >>> answer.verdicts["euler"]                                                   # doctest: +SKIP
    """
    question = read_question(data, settings)
    if engine not in ENGINES:
        raise unknown("--engine", engine, ENGINES)
    if (jobs is not None and jobs < 1) or threads < 1:
        raise InputError("--jobs and --threads must be at least 1")
    grid = build_grid(question, parts)
    if parts is None:  # other parts than ours are known to other workers than ours
        check_models(grid)
    folder = StudyFolder(Path(out) if out else default_folder(question))
    folder.check()
    _check_same(question, folder)
    if engine == "local":
        find_device(question.device)
    corpus = dict((prepare or prepare_corpus)(question))  # its errors come before anything is written
    started = ENGINES[engine](worker, threads, question.device)
    try:
        with folder.locked():
            _Study(grid, folder, started, jobs, corpus).run()
            return rebuild(folder.path)
    finally:
        started.close()


def rebuild(folder: str | Path) -> Comparison:
    """Analyse what a study's folder holds and write its outputs anew; works while it is still running."""
    from qkflow.report import write_outputs

    place = StudyFolder(Path(folder))
    study = load_study(place)
    runs = load_runs(place, study)
    comparison = Comparison(place.path, analyse(study, runs), runs)
    write_outputs(place.path, comparison.summary, [run for run in runs if run.phase == "compare"])
    return comparison


def load_study(place: StudyFolder) -> dict[str, Any]:
    """What `study.yaml` says, with everything in it that `qkflow compare` writes there."""
    study, path = place.load(), place.path / STUDY
    parts = {
        "question": ([study["question"]], {field.name for field in fields(Question)}),
        "contestants": (study["contestants"], {"name", "role", "cells"}),
        "runs": (study["runs"], {"id", "phase", "cell", "seed", "lr", "tokens"}),
    }
    for name, (values, keys) in parts.items():
        for value in values:
            missing = sorted(keys - mapping(value, f"{path}: {name}").keys())
            if missing:
                raise InputError(f"{path} is damaged: '{name}' does not say '{missing[0]}'")
    try:
        read(Question, study["question"], "question")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return study


def prepare_corpus(question: Question) -> dict[str, Any]:
    """Tokenise once, before many workers need it; runs are told apart by the text, not by its name."""
    tokens = prepare(question.data, question.tokenizer)
    TrainWindows(tokens.tokens("train"), question.length, question.batch, seed=0)  # refuses too short a text
    EvalWindows(tokens.tokens("validation"), question.length, question.batch)
    return {"fingerprint": tokens.fingerprint}


def read_question(data: str, settings: Mapping[str, Any]) -> Question:
    """A question from loosely typed settings: lists as comma-separated text, tokens as `200k`."""
    values: dict[str, Any] = {"data": data, **settings}
    for name in ("variants", "controls", "starts", "lr_factors"):
        if name in values:
            values[name] = _items(values[name])
    if "lr_factors" in values:
        try:
            values["lr_factors"] = tuple(float(item) for item in values["lr_factors"])
        except ValueError:
            raise InputError("--lr-factors must be numbers, e.g. 0.5,1,2") from None
    if values.get("tokens") is not None:
        values["tokens"] = parse_count(values["tokens"])
    question = Question.from_dict(values)
    if question.tokens is None and question.minutes is None:
        question = replace(question, tokens=DEFAULT_TOKENS)
    return question


def _items(value: str | Iterable[Any]) -> tuple[Any, ...]:
    """`a,b` or `["a", "b,c"]` as a tuple; `none` as an empty one."""
    texts = [value] if isinstance(value, str) else [str(item) for item in value]
    items = tuple(item.strip() for text in texts for item in text.split(",") if item.strip())
    return () if items == ("none",) else items


def default_folder(question: Question) -> Path:
    """The same question has the same folder, so that the same command goes on where it stopped."""
    budget = f"{question.minutes:g}min" if question.minutes else f"{question.tokens}"
    words = f"{question.data}-{question.preset}-{budget}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", words).strip("-.")


def _check_same(question: Question, folder: StudyFolder) -> None:
    earlier = load_study(folder)["question"] if folder.exists else {}
    for name in _OF_THE_FOLDER:
        before, now = earlier.get(name), getattr(question, name)
        if earlier and before != now:
            raise InputError(
                f"{folder.path} holds a comparison with {name} {before}, not {now}; give another --out"
            )


class _Study:
    """One comparison at work: plans each phase, writes the plan down, runs it."""

    def __init__(
        self,
        grid: Grid,
        folder: StudyFolder,
        engine: Engine,
        jobs: int | None,
        data: dict[str, Any],
    ) -> None:
        self.grid, self.question, self.folder, self.engine = grid, grid.question, folder, engine
        self.jobs, self.data = jobs or engine.jobs(), data
        self.runs: list[Run] = []
        known = load_study(folder).get("budgets") if folder.exists else {}
        self.budgets: dict[str, int] = mapping(known, f"{folder.path / STUDY}: budgets")

    def run(self) -> None:
        self.budgets = self._budgets()
        rates = self._tune() if self.question.tune_lr else {}
        seeds = range(self.question.seeds)
        self._execute(
            "comparing", self.grid.runs("compare", seeds, lr=rates, tokens=self.budgets, data=self.data)
        )

    def _execute(self, title: str, runs: list[Run]) -> list[Watched]:
        self.runs += runs
        self._save()
        return execute(title, runs, self.folder, self.engine, self.jobs)

    def _save(self) -> None:
        self.folder.save(
            {
                "question": self.question.to_dict(),
                "command": self.question.command(str(self.folder.path)),
                "contestants": [one.to_dict() for one in self.grid.contestants],
                "budgets": self.budgets,
                "jobs": self.jobs,
                "runs": [run.to_dict() for run in self.runs],
            }
        )

    def _tune(self) -> dict[str, float]:
        """The learning rate of every cell: the best of the same grid for all."""
        factors = self.question.lr_factors
        runs = self.grid.runs("tune", [TUNING_SEED], factors=factors, tokens=self.budgets, data=self.data)
        tried: dict[str, dict[float, float | None]] = {}
        for one in _settled(self._execute("tuning learning rates", runs)):
            loss = (one.folder.result() or {}).get("loss") if one.folder.finished else None
            usable = loss is not None and math.isfinite(loss)
            tried.setdefault(one.run.cell, {})[one.run.lr] = loss if usable else None
        return {cell: best_rate(losses) or self.question.lr for cell, losses in tried.items()}

    def _budgets(self) -> dict[str, int]:
        """Tokens for every model: equal, or such that time or FLOPs are equal to the standard model's."""
        q, models = self.question, [cell.variant.model for cell in self.grid.one_cell_per_model()]
        known = self.budgets
        if all(model in known for model in models):
            return {model: known[model] for model in models}
        if q.minutes is None and q.match == "tokens":
            return dict.fromkeys(models, q.tokens or DEFAULT_TOKENS)
        costs = self._measure()
        base = known.get(STANDARD) or q.tokens or self._affordable(costs)
        step = q.batch * q.length
        budgets = {}
        for model in models:
            ratio = {
                "tokens": 1.0,
                "time": costs[STANDARD].step_seconds / costs[model].step_seconds,
                "flops": costs[STANDARD].flops_per_token / costs[model].flops_per_token,
            }[q.match]
            budgets[model] = known.get(model) or max(1, round(base * ratio / step)) * step
        return budgets

    def _measure(self) -> dict[str, Cost]:
        """Short runs of every model in turn, as many at once as there will be later."""
        steps = CALIBRATION_STEPS * self.question.batch * self.question.length
        cells = self.grid.one_cell_per_model()
        models = {cell.name: cell.variant.model for cell in cells}
        tokens = dict.fromkeys(models.values(), steps)
        runs = self.grid.runs("calibrate", CALIBRATION_SEEDS, cells=cells, tokens=tokens, data=self.data)
        measured: dict[str, list[Cost]] = {}
        for one in _settled(self._execute("measuring", runs)):
            if not one.folder.finished:
                raise InputError(f"{one.run.cell} could not be measured: {one.message}")
            result = one.folder.result() or {}
            training = result["step_seconds"] * CALIBRATION_STEPS
            around = max(0.0, (one.wall_seconds or training) - training)
            cost = Cost(result["step_seconds"], result["flops_per_token"], around)
            measured.setdefault(models[one.run.cell], []).append(cost)
        return {model: Cost.typical(costs) for model, costs in measured.items()}

    def _affordable(self, costs: dict[str, Cost]) -> int:
        """The tokens per run that fill `minutes`, start-up and evaluation included."""
        q, each = self.question, [costs[cell.variant.model] for cell in self.grid.cells]
        count = len(each) * (q.seeds + (len(q.lr_factors) if q.tune_lr else 0))
        average = Cost(*(sum(values) / len(each) for values in zip(*map(astuple, each), strict=True)))
        return affordable_steps(q.minutes or 0, count, self.jobs, average) * q.batch * q.length


@dataclass(frozen=True)
class Cost:
    """What a model costs: a step, a token, and everything around the steps (start-up, evaluation)."""

    step_seconds: float
    flops_per_token: float
    around: float

    @classmethod
    def typical(cls, costs: Sequence[Cost]) -> Cost:
        return cls(*(median(values) for values in zip(*map(astuple, costs), strict=True)))


def affordable_steps(minutes: float, runs: int, jobs: int, cost: Cost) -> int:
    """The steps each of `runs` runs can make, `jobs` at a time, for all to be done in `minutes`."""
    rounds = math.ceil(runs / jobs)
    steps = int((60 * minutes / rounds - cost.around) / cost.step_seconds)
    if steps < CALIBRATION_STEPS:
        need = rounds * (cost.around + CALIBRATION_STEPS * cost.step_seconds) / 60
        raise InputError(
            f"--minutes {minutes:g} is too short for {runs} runs, {jobs} at a time; "
            f"give at least {need:.2g}, or fewer variants, starts or seeds"
        )
    return steps


def _settled(watched: list[Watched]) -> list[Watched]:
    """What later phases rest on must not be half there; of the runs only their numbers are wanted."""
    if any(one.state == "interrupted" for one in watched):
        raise Stopped
    for one in watched:
        one.folder.drop_model()
    return watched
