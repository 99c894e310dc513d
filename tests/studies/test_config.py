from __future__ import annotations

import functools
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import tyro

from input_errors import raises_code
from qkflow.cli.commands.compare import compare as command
from qkflow.cli.commands.registry import field_descriptions
from qkflow.models.presets import PRESETS
from qkflow.studies.config import DEFAULT_TOKENS, ComparisonConfig, ExecutionConfig, PresetName

CONFIG = ComparisonConfig(variants=("standard", "euler"), tokens=4096, seq_len=64, batch_size=4)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"seeds": 1}, "too-few-seeds"),
        ({"seeds": 2}, "too-few-seeds"),
        ({"seeds": 0, "verdict": False}, "below-minimum"),
        ({"minutes": 3.0}, "two-budgets"),
        ({"tokens": None, "minutes": 0.0}, "below-minimum"),
        ({"tokens": None, "minutes": float("inf")}, "not-finite"),
        ({"tokens": 100}, "tokens-below-one-step"),
        ({"seq_len": 1}, "below-minimum"),
        ({"batch_size": 0}, "below-minimum"),
        ({"lr": 0.0}, "below-minimum"),
        ({"lr": float("nan")}, "not-finite"),
        ({"match": "token"}, "unknown-match"),
        ({"confidence": 95.0}, "above-maximum"),
        ({"inits": ()}, "no-inits"),
        ({"variants": ()}, "no-variants"),
        ({"tune_lr": True, "lr_factors": (0.5, -1.0)}, "invalid-lr-factors"),
    ],
)
def test_check_rejects(change: dict[str, Any], code: str) -> None:
    with raises_code(code):
        replace(CONFIG, **change).check()


def test_one_seed_needs_no_verdict() -> None:
    replace(CONFIG, seeds=1, verdict=False).check()


@pytest.mark.parametrize("change", [{"engine": "locl"}, {"jobs": 0}, {"threads": 0}])
def test_execution_check_rejects(change: dict[str, Any]) -> None:
    (name,) = change
    with raises_code("unknown-engine" if name == "engine" else "below-minimum"):
        replace(ExecutionConfig(), **change).check()


def test_preset_names_match_the_presets() -> None:
    assert get_args(PresetName) == tuple(PRESETS)


@pytest.mark.parametrize("cls", [ComparisonConfig, ExecutionConfig])
def test_every_option_is_described_once(cls: type) -> None:
    descriptions = field_descriptions(cls)
    assert list(descriptions) == [field.name for field in fields(cls)]


def test_parse_lists_and_counts() -> None:
    config = ComparisonConfig.parse(
        data="a", variants="standard, euler", inits=["gpt2", "fan_in,mimetic"], controls="none", tokens="1.5M"
    )
    assert config.variants == ("standard", "euler")
    assert config.inits == ("gpt2", "fan_in", "mimetic")
    assert config.controls == ()
    assert config.tokens == 1_500_000
    assert ComparisonConfig.parse(data="a").tokens == DEFAULT_TOKENS
    assert ComparisonConfig.parse(data="a", minutes=2).tokens is None


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"variant": "euler"}, "unknown-setting"),
        ({"tokens": "lots"}, "invalid-count"),
        ({"lr_factors": "x"}, "invalid-lr-factors"),
        ({"schedule": "cosin"}, "unknown-schedule"),
        ({"seeds": "three"}, "invalid-seeds"),
        ({"seeds": 2.5}, "invalid-seeds"),  # a YAML file has any type
        ({"lr_factors": 2.5, "seeds": []}, "invalid-seeds"),
        ({"max_seeds": "many"}, "wrong-type"),
    ],
)
def test_parse_rejects(settings: dict[str, Any], code: str) -> None:
    with raises_code(code):
        ComparisonConfig.parse(**settings)


CONFIGS = [
    CONFIG,
    replace(CONFIG, data="my texts/*.txt#body", controls=(), verdict=False, seeds=1, inits=("mimetic",)),
    replace(CONFIG, tokens=None, minutes=2.5, tune_lr=True, lr_factors=(0.25, 1.0), match="time", lr=1e-4),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_dict_round_trip(config: ComparisonConfig) -> None:
    assert ComparisonConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("config", CONFIGS)
def test_command_round_trip(config: ComparisonConfig) -> None:
    """The command that a report shows is parsed by the real command line into the same config."""
    words = shlex.split(config.to_command("some folder"))
    assert words[:2] == ["qkflow", "compare"]

    @functools.wraps(command)
    def record(**options: Any) -> dict[str, Any]:
        return options

    options = tyro.cli(record, args=words[2:], config=(tyro.conf.FlagCreatePairsOff,))
    assert str(options["out"]) == "some folder"
    settings = {name: options[name] for name in ComparisonConfig.__dataclass_fields__}
    assert ComparisonConfig.parse(**settings) == config


def test_default_folder_depends_on_data_preset_and_budget() -> None:
    assert replace(CONFIG, data="../my texts/*.txt").default_folder() == Path("runs/my-texts-.txt-tiny-4096")
    assert CONFIG.default_folder() == replace(CONFIG, seeds=9).default_folder()
