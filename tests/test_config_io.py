from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from input_errors import raises_code
from qkflow.attention.rope import RotaryEmbedding
from qkflow.config_io import RENAMED_KEYS, Range, check_utf8, dataclass_from_dict, parse_count
from qkflow.models.config import ModelConfig
from qkflow.models.presets import preset
from qkflow.training import RunConfig


@dataclass
class Section:
    count: int = 0
    share: float = 0.0
    name: str | None = None
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    kinds: tuple[Literal["a", "b"], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def test_values_are_converted_to_the_declared_types() -> None:
    values = {"count": "1M", "share": "3e-3", "name": None, "flag": True, "kind": "b", "kinds": ["a", "b"]}
    assert dataclass_from_dict(Section, values, "s") == Section(1_000_000, 3e-3, None, True, "b", ("a", "b"))


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([], "not-a-mapping"),
        ({"cuont": 1}, "unknown-key"),
        ({"count": "many"}, "wrong-type"),
        ({"count": True}, "wrong-type"),
        ({"share": "half"}, "wrong-type"),
        ({"flag": 1}, "wrong-type"),
        ({"kind": "c"}, "unknown-kind"),
        ({"options": 3}, "wrong-type"),
    ],
)
def test_wrong_values_are_refused(values: Any, code: str) -> None:
    with raises_code(code):
        dataclass_from_dict(Section, values, "s")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("50000", 50_000),
        ("50_000", 50_000),
        ("200k", 200_000),
        ("1.1M", 1_100_000),
        ("1.5m", 1_500_000),
        ("3B", 3_000_000_000),
        ("3e6", 3_000_000),
        (7, 7),
    ],
)
def test_parse_count_reads_suffixes(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "-5k", "1.5", "1e400", "k", "1kk", "10kb", "many"])
def test_parse_count_refuses(text: str) -> None:
    with raises_code("invalid-count"):
        parse_count(text)


@pytest.mark.parametrize(
    "old", [key for key in RENAMED_KEYS if key.split(".")[0] in ("model", "data", "train")]
)
def test_renamed_key_names_the_new_one(old: str) -> None:
    nested: Any = 1
    for part in reversed(old.split(".")):
        nested = {part: nested}
    with raises_code("renamed-key") as caught:
        RunConfig.from_dict(nested)
    assert str(caught.value).endswith(RENAMED_KEYS[old])


def test_renamed_keys_of_a_model_config_and_a_preset() -> None:
    with raises_code("renamed-key"):
        ModelConfig.from_dict({"width": 64})
    with raises_code("renamed-key"):
        preset("tiny", heads=2)
    with raises_code("renamed-key"):
        RotaryEmbedding.from_option({"low": 2})


def test_seed_out_of_range() -> None:
    RunConfig.from_dict({"train": {"seed": -(2**63)}})
    with raises_code("above-maximum"):
        RunConfig.from_dict({"train": {"seed": 2**64}})


def test_ranges_of_numbers() -> None:
    bounds = Range(1, 9, cost="that takes a year")
    bounds.check("--n", 9)
    with raises_code("below-minimum"):
        bounds.check("--n", 0)
    with raises_code("above-maximum") as caught:
        bounds.check("--n", 10)
    assert "that takes a year" in str(caught.value)
    for value in (float("nan"), float("inf")):
        with raises_code("not-finite"):
            bounds.check("--n", value)
    with raises_code("below-minimum"):
        Range(above=0).check("--lr", 0.0)


def test_argument_that_is_not_utf8() -> None:
    with raises_code("not-utf8"):
        check_utf8("--prompt", "\udcff")
