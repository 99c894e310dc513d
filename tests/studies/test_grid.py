from __future__ import annotations

import functools
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import tyro

from qkflow.cli.commands.compare import compare as command
from qkflow.config_io import parse_count
from qkflow.errors import InputError
from qkflow.studies.compare import default_study_dir, parse_comparison_config
from qkflow.studies.grid import ComparisonConfig, build_grid, build_run_config

ASK = ComparisonConfig(variants=("standard", "euler"), tokens=4096, seq_len=64, batch_size=4)


def cells(question: ComparisonConfig) -> dict[str, list[str]]:
    return {one.variant.name: [cell.name for cell in one.cells] for one in build_grid(question).arms}


def test_every_variant_and_control_runs_from_every_start() -> None:
    assert cells(ASK) == {
        "standard": ["standard@gpt2", "standard@fan_in"],
        "euler": ["euler@gpt2", "euler@fan_in"],
        "symmetric": ["standard@gpt2+symmetric=1", "standard@fan_in+symmetric=1"],
        "uncoupled": ["uncoupled@gpt2", "uncoupled@fan_in"],
    }
    assert [one.role for one in build_grid(ASK).arms] == ["reference", "variant", "control", "control"]


def test_standard_also_runs_from_starts_that_variants_are_held_to() -> None:
    held = replace(
        ASK, variants=("euler@fan_in", "standard@fan_in+symmetric=2"), inits=("gpt2",), controls=()
    )
    assert cells(held) == {
        "standard": ["standard@gpt2", "standard@fan_in", "standard@fan_in+symmetric=2"],
        "euler@fan_in": ["euler@fan_in"],
    }


def test_a_cell_that_stands_for_two_contestants_is_run_once() -> None:
    twice = replace(ASK, inits=("fan_in", "fan_in+symmetric=1"), variants=("symmetric@fan_in",), controls=())
    grid = build_grid(twice)
    assert [cell.name for cell in grid.cells] == ["standard@fan_in", "standard@fan_in+symmetric=1"]
    assert len(grid.build_runs("compare", range(3), tokens_by_model={"standard": 4096})) == 6


def test_runs_come_seed_by_seed_with_ids_by_content() -> None:
    grid = build_grid(ASK)
    tokens = dict.fromkeys(("standard", "euler", "uncoupled"), 4096)
    runs = grid.build_runs("compare", range(3), tokens_by_model=tokens)
    assert [run.seed for run in runs] == [0] * 8 + [1] * 8 + [2] * 8
    assert len({run.id for run in runs}) == 24
    assert {run.steps for run in runs} == {16}
    again = grid.build_runs("compare", range(3), tokens_by_model=tokens)
    assert [run.id for run in again] == [run.id for run in runs]
    other = build_grid(replace(ASK, lr=1e-3)).build_runs("compare", range(3), tokens_by_model=tokens)
    assert not {run.id for run in other} & {run.id for run in runs}
    assert all("/" not in run.id and ":" not in run.id for run in runs)


def test_the_config_a_worker_reads() -> None:
    question = replace(ASK, variants=("leapfrog:n=7+differential+slow:P=8+pace=4@fan_in",), controls=())
    cell = build_grid(question).arms[1].cells[0]
    config = build_run_config(
        question, cell, seed=2, lr=1e-3, tokens=4096, data_overrides={"fingerprint": "abc"}
    )
    slow = config["model"].pop("slow")
    assert (slow["ratio"], slow["n_layers"], slow["gate_init"]) == (8, 2, 0.0)
    assert config["model"] == {
        "preset": "tiny",
        "attention": {"coupling": "leapfrog:n=7", "scoring": "differential"},
        "init": "fan_in",
    }
    assert config["data"] == {
        "corpus": "speeches",
        "tokenizer": "bpe:2048",
        "seq_len": 64,
        "fingerprint": "abc",
    }
    assert (
        config["train"].items()
        >= {"tokens": 4096, "batch_size": 4, "lr": 1e-3, "seed": 2, "pace": 4.0}.items()
    )
    json.dumps(config)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"seeds": 1}, "a verdict needs at least 3 seeds"),
        ({"seeds": 2}, "--no-verdict"),
        ({"seeds": 0, "verdict": False}, "at least 1"),
        ({"minutes": 3.0}, "not both"),
        ({"tokens": None, "minutes": 0.0}, "above zero"),
        ({"tokens": None, "minutes": float("inf")}, "above zero"),
        ({"tokens": 100}, "less than one step"),
        ({"seq_len": 1}, "--seq-len must be at least 2"),
        ({"batch_size": 0}, "--batch must be at least 1"),
        ({"lr": 0.0}, "--lr must be a positive number"),
        ({"lr": float("nan")}, "--lr must be a positive number"),
        ({"match": "token"}, "did you mean 'tokens'"),
        ({"confidence": 95.0}, "between 0.5 and 1"),
        ({"inits": ()}, "no start given"),
        ({"inits": ("gpt3",)}, "did you mean 'gpt2'"),
        ({"variants": ("standard",), "controls": ()}, "nothing to compare"),
        ({"tune_lr": True, "lr_factors": (0.5, -1.0)}, "--lr-factors"),
    ],
)
def test_refuses_what_cannot_be_answered(change: dict[str, Any], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        build_grid(replace(ASK, **change))


def test_one_seed_is_allowed_without_a_verdict() -> None:
    build_grid(replace(ASK, seeds=1, verdict=False))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("200k", 200_000),
        ("1M", 10**6),
        ("1.5m", 1_500_000),
        ("50_000", 50_000),
        ("2e6", 2 * 10**6),
        ("3B", 3 * 10**9),
    ],
)
def test_reads_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["many", "-5k", "10kb", "", "1e999"])
def test_refuses_other_counts(text: str) -> None:
    with pytest.raises(InputError, match=r"write e\.g\. 200k"):
        parse_count(text)


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'variants'"):
        parse_comparison_config("speeches", {"variant": "euler"})


@pytest.mark.parametrize(
    "question",
    [
        ASK,
        replace(ASK, data="my texts/*.txt#body", controls=(), verdict=False, seeds=1, inits=("mimetic",)),
        replace(ASK, tokens=None, minutes=2.5, tune_lr=True, lr_factors=(0.25, 1.0), match="time", lr=1e-4),
    ],
)
def test_the_printed_command_asks_the_same_question(question: ComparisonConfig) -> None:
    """The command a report shows goes through the real command line and comes back as the same question."""
    words = shlex.split(question.to_command("some folder"))
    assert words[:2] == ["qkflow", "compare"]

    @functools.wraps(command)
    def record(**given: Any) -> dict[str, Any]:
        return given

    given = tyro.cli(record, args=words[2:], config=(tyro.conf.FlagCreatePairsOff,))
    assert str(given["out"]) == "some folder"
    asked = {name: value for name, value in given.items() if name in ComparisonConfig.__dataclass_fields__}
    assert parse_comparison_config(asked.pop("data"), asked) == question


def test_the_same_question_has_the_same_folder() -> None:
    assert str(default_study_dir(replace(ASK, data="../my texts/*.txt"))) == "runs/my-texts-.txt-tiny-4096"
    assert default_study_dir(ASK) == default_study_dir(replace(ASK, seeds=9))
