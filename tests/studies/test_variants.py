from __future__ import annotations

import pytest

from input_errors import raises_code
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
        ("symmetric", Variant(init_modifier="symmetric")),
        ("symmetric:c=3", Variant(init_modifier="symmetric:c=3")),
        ("euler@fan_in", Variant(coupling="euler", init=FAN_IN)),
        ("standard@fan_in+symmetric=1", Variant(init=InitScheme("fan_in", "symmetric", 1.0))),
    ],
)
def test_parse_and_name_round_trip(text: str, variant: Variant) -> None:
    assert parse_variant(text) == variant
    assert parse_variant(variant.name) == variant


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("eulr", "unknown-variant", "'euler'"),
        ("leapfrog:n=", "variant-option-syntax", "'n='"),
        ("leapfrog:", "variant-option-syntax", "leapfrog:n=7"),
        ("leapfrog=7", "variant-option-syntax", "leapfrog:n=7"),
        ("leap frog", "variant-syntax", "'leap frog'"),
        ("euler+drift", "duplicate-component", "euler, drift"),
        ("euler+", "variant-syntax", "''"),
        ("@fan_in", "variant-empty", "'@fan_in'"),
        ("euler@", "variant-init-missing", "euler@fan_in"),
        ("euler@fanin", "unknown-init", "'fan_in'"),
        ("euler@fan_in+symetric=1", "unknown-init", "'fan_in+symmetric'"),
        ("euler@fan_in+symmetric=1+mimetic", "unknown-init", "mimetic"),
        ("standard+pace", "invalid-pace", "pace=4"),
        ("standard+pace=0", "invalid-pace", "pace=4"),
        ("standard+pace=1e400", "invalid-pace", "pace=4"),
        ("symmetric:c=x", "bad-init-strength", "'x'"),
        ("symmetric:c=1e999", "bad-init-strength", "1e999"),
        ("symmetric:n=3", "unknown-option", "symmetric:c=NUMBER"),
    ],
)
def test_parse_rejects_with_a_hint(text: str, code: str, hint: str) -> None:
    with raises_code(code) as error:
        parse_variant(text)
    assert hint in str(error.value)


def test_parse_rejects_an_init_strength_that_is_not_a_number() -> None:
    with pytest.raises(InputError) as error:
        parse_variant("euler@fan_in+symmetric=x")
    assert "'x'" in str(error.value)


def test_parse_variants_splits_at_commas_and_drops_duplicates() -> None:
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
def test_numbers_are_canonical(texts: list[str]) -> None:
    (variant,) = parse_variants(texts)
    assert parse_variant(variant.name) == variant


def test_components_come_from_the_registry() -> None:
    components = ComponentRegistry({**registered_components().names, "coupling": ["swirl"]})
    assert parse_variant("swirl:n=2", components).coupling == "swirl:n=2"
    with raises_code("unknown-variant"):
        parse_variant("euler", components)


def test_options_are_checked_by_their_registry() -> None:
    def check(spec: str) -> None:
        raise InputError(f"no such option in {spec}", code="rejected")

    components = ComponentRegistry(registered_components().names, {"coupling": check})
    assert parse_variant("differential", components).scoring == "differential"
    with raises_code("rejected") as error:
        parse_variant("leapfrog:m=7", components)
    assert "leapfrog:m=7" in str(error.value)


def test_resolve_inits() -> None:
    requested = [GPT2, FAN_IN]
    assert parse_variant("euler").resolve_inits(requested) == requested
    assert parse_variant("euler@mimetic").resolve_inits(requested) == [MIMETIC]
    symmetric = parse_variant("symmetric:c=3").resolve_inits([*requested, MIMETIC])
    assert [str(init) for init in symmetric] == ["gpt2+symmetric=3", "fan_in+symmetric=3"]
    with raises_code("no-base-init"):
        parse_variant("symmetric").resolve_inits([MIMETIC])


def test_model_name_has_no_init() -> None:
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
def test_init_names_are_canonical(text: str, canonical: str) -> None:
    assert str(InitScheme.parse(text)) == canonical
    assert InitScheme.parse(canonical) == InitScheme.parse(text)
