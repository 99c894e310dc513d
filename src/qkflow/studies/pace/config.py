"""What a study asks, the runs that answer it, and its folder.

    FOLDER/study.yaml   the question and the planned runs          FOLDER/data-….json   the encoded texts
    FOLDER/runs/…       one folder a run, as in `qkflow compare`
    FOLDER/summary.json  summary.csv  report.html

A finished run is never repeated; the same command goes on with an interrupted study; more seeds or ratios may
be asked for later.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qkflow.errors import InputError
from qkflow.studies.grid import Run
from qkflow.studies.pace import dataset
from qkflow.studies.pace.recipes import Recipe, recipe
from qkflow.studies.runner.engines import LocalEngine
from qkflow.studies.runner.execution import execute
from qkflow.studies.runner.study_dir import StudyFolder
from qkflow.training.pace import ratio_schedule

KIND = "pace study"
WORKER = (sys.executable, "-m", "qkflow.studies.pace.worker")
# What one folder holds one answer to; seeds and ratios may grow.
_GROWING = ("seeds", "ratios", "confidence")


@dataclass(frozen=True)
class Settings:
    """The question, as asked on the command line; None stands for the recipe's own."""

    task: str
    data: str | None = None
    as_published: bool = False
    seeds: int = 3
    ratios: tuple[str, ...] | None = None
    lr: float | None = None
    optimizer: str | None = None
    steps: int | None = None
    epochs: float | None = None
    batch: int | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    examples: int | None = None
    window: int = 200
    test: int = 1000
    measured: int | None = None
    confidence: float = 0.95

    @property
    def source(self) -> str:
        if self.data is not None:
            return self.data
        if self.task == "agreement":
            return "generate"
        raise InputError(
            f"--data is needed: a file or folder with {self.task}, or hf to read it from the hub"
        )

    def recipe(self) -> Recipe:
        names = ("ratios", "lr", "optimizer", "batch", "layers", "heads", "measured")
        changes: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.width is not None:
            changes |= {"width": self.width, "hidden": 4 * self.width}
        if self.epochs is not None:
            changes["epochs"] = self.epochs
        return recipe(self.task, self.as_published, **changes)

    def check(self) -> None:
        """Refuse what cannot be answered, before anything is read or written."""
        if self.steps is not None and self.epochs is not None:
            raise InputError("give --steps or --epochs, not both")
        for name in (
            "seeds",
            "steps",
            "batch",
            "layers",
            "width",
            "heads",
            "examples",
            "window",
            "test",
            "measured",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name} must be at least 1, not {value}")
        for name in ("lr", "epochs"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"--{name} must be above zero, not {value}")
        if not 0.5 <= self.confidence < 1:
            raise InputError(f"--confidence must lie between 0.5 and 1, not {self.confidence:g}")
        for ratio in self.recipe().ratios:
            ratio_schedule(ratio, self.steps or sys.maxsize)  # a positive number, or a schedule

    def command(self, out: Path) -> str:
        words = [f"qkflow pace study {self.task}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "task" or value == field.default:
                continue
            flag = f"--{field.name.replace('_', '-')}"
            shown = ",".join(value) if isinstance(value, tuple) else value
            words.append(flag if value is True else f"{flag} {shown}")
        return " ".join([*words, f"--out {out}"])


@dataclass(frozen=True)
class PaceStudy:
    """The answer: `summary` as in summary.json."""

    folder: Path
    summary: dict[str, Any]

    @property
    def complete(self) -> bool:
        return bool(self.summary["runs"]["finished"] == self.summary["runs"]["planned"])


def run_study(settings: Settings, out: Path | None = None, jobs: int | None = None) -> PaceStudy:
    """Do what is not done yet, and answer."""
    settings.check()
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {jobs}")
    folder = StudyFolder(out or _default_folder(settings))
    folder.check()
    chosen = settings.recipe()
    _check_same(settings, folder)
    data = dataset.prepare(settings.task, settings.source, chosen, dataset.Wanted.of(settings))
    steps = settings.steps or max(1, round(chosen.epochs * len(data.train) / chosen.batch))
    for ratio in chosen.ratios:
        ratio_schedule(ratio, steps)
    with folder.locked():
        file = dataset.save(data, folder.path)
        runs = plan(settings, chosen, file, data, steps)
        facts: dict[str, Any] = {"steps": steps, "train": len(data.train), "test": len(data.test)}
        facts |= {"majority": data.majority(), "vocabulary": data.vocabulary, "notes": data.notes}
        folder.save(
            {
                "question": {"kind": KIND, **_plain(settings)},
                "command": settings.command(folder.path),
                "contestants": list(chosen.ratios),
                "recipe": _plain(chosen),
                "facts": facts,
                "runs": [run.to_dict() for run in runs],
            }
        )
        execute(f"pace on {settings.task}", runs, folder, LocalEngine(WORKER, device="cpu"), jobs)
        return rebuild(folder.path)


def plan(settings: Settings, chosen: Recipe, file: str, data: dataset.TaskData, steps: int) -> list[Run]:
    """Every ratio with every seed, early seeds first, so that a first paired answer is there early."""
    runs = []
    for seed in range(settings.seeds):
        for ratio in chosen.ratios:
            train = _train(settings, chosen, ratio, steps) | {"seed": seed}
            config = {
                "task": settings.task,
                "recipe": {**_plain(chosen), "confounds": {}, "ratios": []},
                "data": {"file": file, "length": data.mean_length},
                "train": train,
                "measure": {"published": settings.as_published},
            }
            tokens = steps * chosen.batch * data.mean_length
            runs.append(Run("pace", f"r={ratio}", seed, chosen.lr, tokens, config))
    return runs


def _train(settings: Settings, chosen: Recipe, ratio: str, steps: int) -> dict[str, Any]:
    """The `train` section of a run; of a single-knob study all are alike but for `ratio`."""
    train: dict[str, Any] = {
        "ratio": ratio,
        "steps": steps,
        "batch": chosen.batch,
        "optimizer": chosen.optimizer,
        "lr": chosen.lr,
        "weight_decay": chosen.weight_decay,
        "others": 1.0,
        "embed": False,
        "freeze": [],
    }
    if settings.as_published and ratio != "1":
        changed = chosen.confounds
        train |= {"others": changed.others, "embed": changed.embed, "freeze": list(changed.freeze)}
        if changed.weight_decay is not None:
            train["weight_decay"] = changed.weight_decay
    return train


def rebuild(folder: str | Path) -> PaceStudy:
    """Analyse what a study's folder holds and write its outputs anew."""
    from qkflow.report.pace import write_outputs
    from qkflow.studies.pace.analysis import analyse

    place = StudyFolder(Path(folder))
    study = place.load()
    if not is_pace_study(study):
        raise InputError(f"{folder} is not a study of pace")
    summary = analyse(place, study)
    write_outputs(place.path, summary)
    return PaceStudy(place.path, summary)


def is_pace_study(study: dict[str, Any]) -> bool:
    return bool(study["question"].get("kind") == KIND)


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass as YAML knows it."""
    return {
        name: list(each) if isinstance(each, tuple) else each
        for name, each in asdict(value).items()
        if not isinstance(each, dict)
    }


def _check_same(settings: Settings, folder: StudyFolder) -> None:
    if not folder.exists:
        return
    earlier = folder.load()["question"]
    for name, now in _plain(settings).items():
        if name not in _GROWING and earlier.get(name) != now:
            raise InputError(
                f"{folder.path} holds a study with {name} {earlier.get(name)}, not {now}; give another --out"
            )


def _default_folder(settings: Settings) -> Path:
    """The same question has the same folder, so that the same command goes on where it stopped."""
    source = "" if settings.source == "generate" else f"-{Path(settings.source).stem}"
    words = f"pace-{settings.task}{source}" + ("-as-published" if settings.as_published else "")
    return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", words)
