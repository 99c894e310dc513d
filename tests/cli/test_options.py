"""Options of `compare` and `reproduce`, derived from `ComparisonConfig`."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import tyro

from qkflow.cli import main
from qkflow.cli.commands.compare import compare
from qkflow.cli.commands.reproduce import reproduce
from qkflow.cli.help import annotate_for_tyro
from qkflow.cli.options import options_from

COMPARE_FLAGS = {
    "data", "variants", "controls", "inits", "seeds", "preset", "tokens", "minutes", "out", "tokenizer",
    "seq_len", "batch_size", "lr", "schedule", "tune_lr", "lr_factors", "match", "verdict", "confidence",
    "device", "engine", "jobs", "threads", "json",
}  # fmt: skip
REPRODUCE_FLAGS = {
    "study", "data", "tokens", "seeds", "stages", "preset", "out", "tokenizer", "seq_len", "batch_size", "lr",
    "device", "engine", "jobs", "threads", "json",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A config.

    mode    Which mode.
    names   Some names.
    count   A count.
    steps   Steps.
    """

    mode: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ("x", "y")
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
    assert run() == {"mode": "a", "names": ("x", "y"), "count": None, "json": False}


def test_choices_lists_and_counts_are_passed_as_text() -> None:
    values = run("--mode", "c", "--names", "u,v", "--count", "2k", "--steps", "5", "--json")
    assert values == {"mode": "c", "names": ("u,v",), "count": "2k", "steps": 5, "json": True}


@pytest.mark.parametrize(
    ("subject", "flags"),
    [(compare, COMPARE_FLAGS), (reproduce, REPRODUCE_FLAGS)],
    ids=["compare", "reproduce"],
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
        assert re.search(rf"--{shown}[ ,].*\w", text), flag
