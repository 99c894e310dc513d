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
from qkflow.studies.grid import RunSpec
from qkflow.studies.pace import dataset
from qkflow.studies.pace.recipes import Recipe, get_recipe
from qkflow.studies.runner.engines import LocalEngine
from qkflow.studies.runner.execution import execute_runs
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.training.pace import parse_ratio_schedule

STUDY_KIND = "pace study"
WORKER_COMMAND = (sys.executable, "-m", "qkflow.studies.pace.worker")
# What one folder holds one answer to; seeds and ratios may grow.
_EXTENDABLE_FIELDS = ("seeds", "ratios", "confidence")


@dataclass(frozen=True)
class PaceStudyConfig:
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
    batch_size: int | None = None
    n_layers: int | None = None
    dim: int | None = None
    n_heads: int | None = None
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

    def resolve_recipe(self) -> Recipe:
        names = ("ratios", "lr", "optimizer", "batch_size", "n_layers", "n_heads", "measured")
        changes: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.dim is not None:
            changes |= {"dim": self.dim, "hidden_dim": 4 * self.dim}
        if self.epochs is not None:
            changes["epochs"] = self.epochs
        return get_recipe(self.task, self.as_published, **changes)

    def check(self) -> None:
        """Refuse what cannot be answered, before anything is read or written."""
        if self.steps is not None and self.epochs is not None:
            raise InputError("give --steps or --epochs, not both")
        for name in (
            "seeds",
            "steps",
            "batch_size",
            "n_layers",
            "dim",
            "n_heads",
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
        for ratio in self.resolve_recipe().ratios:
            parse_ratio_schedule(ratio, self.steps or sys.maxsize)  # a positive number, or a schedule

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
class PaceStudyResult:
    """The answer: `summary` as in summary.json."""

    folder: Path
    summary: dict[str, Any]

    @property
    def complete(self) -> bool:
        return bool(self.summary["runs"]["finished"] == self.summary["runs"]["planned"])


def run_pace_study(
    config: PaceStudyConfig, out: Path | None = None, jobs: int | None = None
) -> PaceStudyResult:
    """Do what is not done yet, and answer."""
    config.check()
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {jobs}")
    folder = StudyDir(out or _default_folder(config))
    folder.check_usable()
    chosen = config.resolve_recipe()
    _check_compatible(config, folder)
    data = dataset.prepare_task_data(
        config.task, config.source, chosen, dataset.DataLimits.from_config(config)
    )
    steps = config.steps or max(1, round(chosen.epochs * len(data.train) / chosen.batch_size))
    for ratio in chosen.ratios:
        parse_ratio_schedule(ratio, steps)
    with folder.lock():
        file = dataset.save_task_data(data, folder.path)
        runs = plan_runs(config, chosen, file, data, steps)
        facts: dict[str, Any] = {"steps": steps, "train": len(data.train), "test": len(data.test)}
        facts |= {
            "majority": data.majority_accuracy(),
            "vocab_size": data.vocab_size,
            "notes": data.issue_counts,
        }
        folder.save(
            {
                "config": {"kind": STUDY_KIND, **_to_plain_dict(config)},
                "command": config.command(folder.path),
                "arms": list(chosen.ratios),
                "recipe": _to_plain_dict(chosen),
                "facts": facts,
                "runs": [run.to_dict() for run in runs],
            }
        )
        execute_runs(f"pace on {config.task}", runs, folder, LocalEngine(WORKER_COMMAND, device="cpu"), jobs)
        return rebuild_pace_study(folder.path)


def plan_runs(
    config: PaceStudyConfig, recipe: Recipe, data_file: str, data: dataset.TaskData, steps: int
) -> list[RunSpec]:
    """Every ratio with every seed, early seeds first, so that a first paired answer is there early."""
    runs = []
    for seed in range(config.seeds):
        for ratio in recipe.ratios:
            train = _train_config(config, recipe, ratio, steps) | {"seed": seed}
            run_config = {
                "task": config.task,
                "recipe": {**_to_plain_dict(recipe), "confounds": {}, "ratios": []},
                "data": {"file": data_file, "seq_len": data.mean_length},
                "train": train,
                "measure": {"published": config.as_published},
            }
            tokens = steps * recipe.batch_size * data.mean_length
            runs.append(RunSpec("pace", f"r={ratio}", seed, recipe.lr, tokens, run_config))
    return runs


def _train_config(config: PaceStudyConfig, recipe: Recipe, ratio: str, steps: int) -> dict[str, Any]:
    """The `train` section of a run; of a single-knob study all are alike but for `ratio`."""
    train: dict[str, Any] = {
        "ratio": ratio,
        "steps": steps,
        "batch_size": recipe.batch_size,
        "optimizer": recipe.optimizer,
        "lr": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "others": 1.0,
        "embed": False,
        "freeze": [],
    }
    if config.as_published and ratio != "1":
        changed = recipe.confounds
        train |= {
            "others": changed.other_lr_scale,
            "embed": changed.scale_embed_lr,
            "freeze": list(changed.freeze),
        }
        if changed.weight_decay is not None:
            train["weight_decay"] = changed.weight_decay
    return train


def rebuild_pace_study(folder: str | Path) -> PaceStudyResult:
    """Analyse what a study's folder holds and write its outputs anew."""
    from qkflow.report.pace import write_outputs
    from qkflow.studies.pace.analysis import analyse

    place = StudyDir(Path(folder))
    study = place.load()
    if not is_pace_study(study):
        raise InputError(f"{folder} is not a study of pace")
    summary = analyse(place, study)
    write_outputs(place.path, summary)
    return PaceStudyResult(place.path, summary)


def is_pace_study(study: dict[str, Any]) -> bool:
    return bool(study["config"].get("kind") == STUDY_KIND)


def _to_plain_dict(value: Any) -> dict[str, Any]:
    """A dataclass as YAML knows it."""
    return {
        name: list(each) if isinstance(each, tuple) else each
        for name, each in asdict(value).items()
        if not isinstance(each, dict)
    }


def _check_compatible(config: PaceStudyConfig, study_dir: StudyDir) -> None:
    if not study_dir.exists:
        return
    earlier = study_dir.load()["config"]
    for name, now in _to_plain_dict(config).items():
        if name not in _EXTENDABLE_FIELDS and earlier.get(name) != now:
            raise InputError(
                f"{study_dir.path} holds a study with {name} {earlier.get(name)}, not {now}; give another --out"
            )


def _default_folder(config: PaceStudyConfig) -> Path:
    """The same question has the same folder, so that the same command goes on where it stopped."""
    source = "" if config.source == "generate" else f"-{Path(config.source).stem}"
    words = f"pace-{config.task}{source}" + ("-as-published" if config.as_published else "")
    return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", words)
