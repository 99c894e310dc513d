"""Run a pace study in a folder. A finished run is never repeated; seeds and ratios may be added later.

FOLDER/study.yaml   config, recipe and planned runs     FOLDER/data-….json   encoded examples
FOLDER/runs/…       one folder per run, as in `qkflow compare`
FOLDER/summary.json                                     FOLDER/summary.csv, report.html: `report.pace`
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from qkflow.errors import InputError
from qkflow.files import write_json
from qkflow.studies.grid import RunSpec
from qkflow.studies.pace import dataset
from qkflow.studies.pace.analysis import analyze
from qkflow.studies.pace.config import (
    BASELINE_RATIO,
    GENERATED_SOURCE,
    PaceRunConfig,
    PaceStudyConfig,
    PaceTrainConfig,
    is_pace_study,
)
from qkflow.studies.pace.recipes import Recipe
from qkflow.studies.pace.results import PaceStudyResult, StudyFacts
from qkflow.studies.runner.engines import LocalEngine
from qkflow.studies.runner.execution import execute_runs
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.training.pace import parse_ratio_schedule
from qkflow.training.pretrained import find_model_dir, load_model_config

WORKER_MODULE = "qkflow.studies.pace.worker"
_EXTENDABLE_FIELDS = ("seeds", "ratios", "confidence")  # may change between two calls on one folder


def run_pace_study(
    config: PaceStudyConfig, out: Path | None = None, jobs: int | None = None
) -> PaceStudyResult:
    """Run every unfinished run of the study, then analyze the study and write summary.json.

    `qkflow.report.pace.write_report` writes the report from the result.
    """
    config.check()
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {jobs}", code="below-minimum")
    study_dir = StudyDir(out or _default_folder(config))
    study_dir.check_usable()
    recipe = config.resolve_recipe()
    _check_compatible(config, study_dir)
    limits = dataset.DataLimits(config.as_published, config.examples, config.test, config.window)
    pretrained = None
    if config.pretrained is not None:
        pretrained = str(find_model_dir(Path(config.pretrained)).resolve())
        recipe = recipe.with_model(load_model_config(pretrained))
    data = dataset.prepare_task_data(config.task, config.source, recipe, limits, pretrained)
    steps = config.steps or max(1, round(recipe.epochs * len(data.train) / recipe.batch_size))
    for ratio in recipe.ratios:
        parse_ratio_schedule(ratio, steps)
    facts = StudyFacts(
        steps, len(data.train), len(data.test), data.majority_accuracy(), data.vocab_size, data.issue_counts
    )
    with study_dir.lock():
        file = dataset.save_task_data(data, study_dir.path)
        runs = plan_runs(config, recipe, file, data.mean_length, steps, pretrained)
        study_dir.save(
            {
                "config": config.to_dict(),
                "command": config.to_command(study_dir.path),
                "arms": list(recipe.ratios),
                "recipe": recipe.to_dict(),
                "facts": asdict(facts),
                "runs": [run.to_dict() for run in runs],
            }
        )
        with closing(LocalEngine(device="cpu", module=WORKER_MODULE)) as engine:
            execute_runs(f"pace on {config.task}", runs, study_dir, engine, jobs)
        return rebuild_pace_study(study_dir.path)


def rebuild_pace_study(folder: str | Path) -> PaceStudyResult:
    """Analyze the runs in a study's folder and write summary.json again. Trains nothing."""
    study_dir = StudyDir(Path(folder))
    study = study_dir.load()
    if not is_pace_study(study):
        raise InputError(f"{folder} is not a pace study", code="not-a-pace-study")
    summary = analyze(study_dir, study)
    write_json(study_dir.path / "summary.json", summary.to_dict())
    return PaceStudyResult(study_dir.path, summary)


def plan_runs(
    config: PaceStudyConfig,
    recipe: Recipe,
    data_file: str,
    mean_length: int,
    steps: int,
    pretrained: str | None = None,
) -> list[RunSpec]:
    """Return every ratio with every seed, seed by seed, so that paired differences exist early."""
    runs = []
    for seed in range(config.seeds):
        for ratio in recipe.ratios:
            train = _train_config(config, recipe, ratio, steps, seed)
            run_config = PaceRunConfig(
                config.task, recipe, data_file, mean_length, train, config.as_published, pretrained
            )
            tokens = steps * recipe.batch_size * mean_length
            runs.append(RunSpec("pace", f"r={ratio}", seed, recipe.lr, tokens, run_config.to_dict()))
    return runs


def _train_config(
    config: PaceStudyConfig, recipe: Recipe, ratio: str, steps: int, seed: int
) -> PaceTrainConfig:
    """Return the training config of a run. The published confounds apply to every ratio but 1."""
    train = PaceTrainConfig(
        ratio, steps, recipe.batch_size, recipe.optimizer, recipe.lr, recipe.weight_decay, seed
    )
    if not config.as_published or ratio == BASELINE_RATIO:
        return train
    confounds = recipe.confounds
    return replace(
        train,
        other_lr_scale=confounds.other_lr_scale,
        scale_embed_lr=confounds.scale_embed_lr,
        freeze=confounds.freeze,
        weight_decay=train.weight_decay if confounds.weight_decay is None else confounds.weight_decay,
    )


def _check_compatible(config: PaceStudyConfig, study_dir: StudyDir) -> None:
    """Raise InputError if the folder holds a study with other settings."""
    if not study_dir.exists:
        return
    earlier = study_dir.load()["config"]
    for name, value in config.to_dict().items():
        if name not in _EXTENDABLE_FIELDS and earlier.get(name) != value:
            raise InputError(
                f"{study_dir.path} holds a study with {name} {earlier.get(name)}, not {value}; "
                "give another --out",
                code="other-study",
            )


def _default_folder(config: PaceStudyConfig) -> Path:
    """Return a folder named after the config, so that the same command resumes the same study."""
    source = "" if config.source == GENERATED_SOURCE else f"-{Path(config.source).stem}"
    words = f"pace-{config.task}{source}" + ("-as-published" if config.as_published else "")
    return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", words)
