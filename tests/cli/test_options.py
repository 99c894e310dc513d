"""Options of `compare`, `reproduce` and `pace study`, derived from their config dataclasses."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import tyro

from qkflow.cli import main
from qkflow.cli.commands.compare import compare
from qkflow.cli.commands.pace_study import study
from qkflow.cli.commands.reproduce import reproduce
from qkflow.cli.help import annotate_for_tyro
from qkflow.cli.options import options_from
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.hardware.config import HardwareConfig

COMPARE_FLAGS = {
    "data", "variants", "controls", "inits", "seeds", "preset", "tokens", "minutes", "out", "tokenizer",
    "seq_len", "batch_size", "lr", "schedule", "tune_lr", "lr_factors", "match", "verdict", "confidence",
    "device", "engine", "jobs", "threads", "json", "baselines", "dry_run", "max_seeds", "screening_seeds",
    "margin", "pilot", "reuse", "live", "precision", "tune_tokens", "finetune", "finetune_data",
    "finetune_epochs", "finetune_lr", "finetune_examples", "optimizer", "processes_per_run", "cpus_per_run",
    "gpus_per_run", "address", "slurm_options", "accumulate",
}  # fmt: skip
REPRODUCE_FLAGS = {
    "study", "data", "tokens", "seeds", "stages", "preset", "out", "tokenizer", "seq_len", "batch_size", "lr",
    "accumulate", "device", "json", "scale", "plan", "show", "markdown",
    *ExecutionConfig.__dataclass_fields__, *HardwareConfig.__dataclass_fields__,
}  # fmt: skip


PACE_STUDY_FLAGS = {
    "task", "data", "as_published", "seeds", "ratios", "lr", "optimizer", "steps", "epochs", "batch_size",
    "pretrained", "n_layers", "dim", "n_heads", "examples", "window", "test", "measured", "confidence", "out",
    "jobs", "json",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A config.

    target  A required argument.
    mode    Which mode.
    names   Some names.
    count   A count.
    steps   Steps.
    """

    target: str
    mode: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ("x", "y")
    extra: tuple[str, ...] | None = None  # More names.
    count: int | None = None
    steps: int = 3


RECEIVED: list[dict[str, Any]] = []


@options_from(Settings, as_text=("count",), unset=("steps",))
def command(settings: dict[str, Any], json: bool = False) -> int:
    """A command.

    Args:
        json: Print JSON.
    """
    RECEIVED.append({**settings, "json": json})
    return 0


def run(*arguments: str) -> dict[str, Any]:
    tyro.cli(annotate_for_tyro(command), args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))
    return RECEIVED.pop()


def test_defaults_come_from_the_dataclass() -> None:
    defaults = {"mode": "a", "names": ("x", "y"), "extra": None, "count": None, "json": False}
    assert run("here") == {"target": "here", **defaults}


def test_choices_lists_and_counts_are_passed_as_text() -> None:
    options = ["--names", "u,v", "--extra", "w", "--count", "2k", "--steps", "5", "--json"]
    lists = {"names": ("u,v",), "extra": ("w",)}
    values = run("here", "--mode", "c", *options)
    assert values == {"target": "here", "mode": "c", **lists, "count": "2k", "steps": 5, "json": True}


@pytest.mark.parametrize(
    ("subject", "flags"),
    [(compare, COMPARE_FLAGS), (reproduce, REPRODUCE_FLAGS), (study, PACE_STUDY_FLAGS)],
    ids=["compare", "reproduce", "pace study"],
)
def test_flags(subject: Any, flags: set[str]) -> None:
    assert set(inspect.signature(subject).parameters) == flags


@pytest.mark.parametrize(
    ("name", "flags"), [("compare", COMPARE_FLAGS), ("reproduce", REPRODUCE_FLAGS - {"study"})]
)
def test_help_describes_every_flag(name: str, flags: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.dispatch([name, "--help"])
    text = capsys.readouterr().out
    assert f"qkflow {name} " in text.split("examples:")[1]
    for flag in flags:
        shown = "no-verdict" if flag == "verdict" else flag.replace("_", "-")
        assert re.search(rf"--{shown}[ ,].*(\w|\n[│\s]+\w)", text), flag
