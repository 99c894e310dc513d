from __future__ import annotations

import pytest

from qkflow.attention import InitScheme
from qkflow.errors import InputError
from qkflow.studies.variants import (
    ComponentRegistry,
    Variant,
    parse_variant,
    parse_variants,
    registered_components,
)

GPT2, FAN_IN, MIMETIC = InitScheme("gpt2"), InitScheme("fan_in"), InitScheme.parse("mimetic")


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("standard", Variant()),
        ("softmax", Variant()),
        ("euler", Variant(coupling="euler")),
        ("leapfrog:n=7", Variant(coupling="leapfrog:n=7")),
        ("leapfrog:n=7:conservative=true", Variant(coupling="leapfrog:n=7:conservative=true")),
        ("affine+differential", Variant(coupling="affine", scoring="differential")),
        ("differential+affine", Variant(coupling="affine", scoring="differential")),
        ("slow:closed", Variant(slow_path="slow:closed")),
        ("slow:warm-gate", Variant(slow_path="slow:warm-gate")),
        ("dense-matched", Variant(slow_path="dense-matched")),
        ("euler+slow:P=8", Variant(coupling="euler", slow_path="slow:P=8")),
        ("standard+pace=4", Variant(pace="4")),
        ("euler+pace=0.5", Variant(coupling="euler", pace="0.5")),
        ("symmetric", Variant(symmetric="1")),
        ("symmetric:c=3", Variant(symmetric="3")),
        ("euler@fan_in", Variant(coupling="euler", init=FAN_IN)),
        ("standard@fan_in+symmetric=1", Variant(init=InitScheme("fan_in", "symmetric", 1.0))),
    ],
)
def test_reads_every_form_and_writes_it_back(text: str, variant: Variant) -> None:
    assert parse_variant(text) == variant
    assert parse_variant(variant.name) == variant


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("eulr", "did you mean 'euler'"),
        ("leapfrog:n=", "cannot read option 'n='"),
        ("leapfrog:", "write e.g. leapfrog:n=7"),
        ("leapfrog=7", "options follow a colon, e.g. leapfrog:n=7"),
        ("leap frog", "cannot read 'leap frog'"),
        ("euler+drift", "two of one kind"),
        ("euler+", "cannot read ''"),
        ("@fan_in", "is empty"),
        ("euler@", "names no start"),
        ("euler@fanin", "did you mean 'fan_in'"),
        ("euler@fan_in+symetric=1", "did you mean 'fan_in+symmetric'"),
        ("euler@fan_in+symmetric=x", "'x' is not a number"),
        ("euler@fan_in+symmetric=1+mimetic", "unknown start"),
        ("standard+pace", "pace needs one number"),
        ("standard+pace=0", "pace needs one number"),
        ("symmetric:c=x", "symmetric takes one number"),
        ("symmetric:c=1e999", "symmetric takes one number"),
        ("standard+pace=1e400", "pace needs one number"),
    ],
)
def test_says_what_is_wrong_with_a_variant(text: str, hint: str) -> None:
    with pytest.raises(InputError, match="(?s)" + hint.replace("+", r"\+")):
        parse_variant(text)


def test_lists_are_split_at_commas_and_repeats_dropped() -> None:
    names = [v.name for v in parse_variants(["standard,euler", "differential+affine", "affine+differential"])]
    assert names == ["standard", "euler", "affine+differential"]


@pytest.mark.parametrize(
    "texts",
    [
        ["symmetric", "symmetric:c=1.0", "symmetric:c=1e0"],
        ["symmetric:c=0.25", "symmetric:c=2.5e-1"],
        ["standard+pace=4", "standard+pace=4.0"],
        ["standard+pace=1e20", "standard+pace=100000000000000000000"],
    ],
)
def test_a_number_has_one_spelling(texts: list[str]) -> None:
    (variant,) = parse_variants(texts)
    assert parse_variant(variant.name) == variant


def test_a_registered_name_is_known() -> None:
    parts = ComponentRegistry({**registered_components().names, "coupling": ["swirl"]})
    assert parse_variant("swirl:n=2", parts).coupling == "swirl:n=2"
    with pytest.raises(InputError, match="unknown variant 'euler'"):
        parse_variant("euler", parts)


def test_options_are_checked_by_their_registry() -> None:
    def check(spec: str) -> None:
        raise InputError(f"no such option in {spec}")

    parts = ComponentRegistry(registered_components().names, {"coupling": check})
    assert parse_variant("differential", parts).scoring == "differential"
    with pytest.raises(InputError, match="no such option in leapfrog:m=7"):
        parse_variant("leapfrog:m=7", parts)


def test_where_a_variant_starts_from() -> None:
    asked = [GPT2, FAN_IN]
    assert parse_variant("euler").resolve_inits(asked) == asked
    assert parse_variant("euler@mimetic").resolve_inits(asked) == [MIMETIC]
    symmetric = parse_variant("symmetric:c=3").resolve_inits([*asked, MIMETIC])
    assert [str(start) for start in symmetric] == ["gpt2+symmetric=3", "fan_in+symmetric=3"]
    with pytest.raises(InputError, match="needs a plain start"):
        parse_variant("symmetric").resolve_inits([MIMETIC])


def test_the_model_is_what_is_left_without_its_start() -> None:
    assert parse_variant("symmetric@fan_in").model_name == "standard"
    assert parse_variant("euler+pace=4@gpt2").model_name == "euler+pace=4"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("gpt2", "gpt2"),
        ("fan_in+symmetric=0.5", "fan_in+symmetric=0.5"),
        ("symmetric=1", "fan_in+symmetric=1"),
        ("mimetic", "gpt2+mimetic"),
        ("fan_in+mimetic", "fan_in+mimetic"),
        ("scaled_identity=1e-6", "gpt2+scaled_identity=1e-06"),
    ],
)
def test_starts_have_one_spelling(text: str, canonical: str) -> None:
    assert str(InitScheme.parse(text)) == canonical
    assert InitScheme.parse(canonical) == InitScheme.parse(text)
