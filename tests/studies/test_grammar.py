"""The text of variants: overrides of config keys, sweeps, canonical names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from input_errors import raises_code
from qkflow.studies.config import split_list
from qkflow.studies.grammar import VariantText, split_outside_braces
from qkflow.studies.overrides import format_value
from qkflow.studies.variants import parse_variant, parse_variants


def names(*texts: str) -> list[str]:
    return [variant.name for variant in parse_variants(texts)]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("euler{step=0.1}", "euler:step=0.1"),
        ("euler:step=1e-1", "euler:step=0.1"),
        ("euler{step = 1E-1}", "euler:step=0.1"),
        ("leapfrog{conservative=True,steps=7}", "leapfrog:n=7:conservative=true"),
        ("leapfrog:conservative=true:n=7", "leapfrog:n=7:conservative=true"),
        ("standard{ train.lr = 3e-3 , attention.bias=yes }", "standard{attention.bias=true,train.lr=0.003}"),
        ("standard{model.attention.rope=false}", "standard{attention.rope=false}"),
        ("standard{attention.rope={base: 1e4}}", "standard{attention.rope={base: 10000}}"),
        ("standard{model.n_kv_heads=~}", "standard{model.n_kv_heads=null}"),
        ("standard{train.freeze=[mlp, embed]}", "standard{train.freeze=[mlp,embed]}"),
        ("standard{data.tokenizer=bpe:512}", "standard{data.tokenizer=bpe:512}"),
        ("standard{data.tokenizer='a,b.json'}", "standard{data.tokenizer='a,b.json'}"),
        ('standard{data.tokenizer="0\\u00a0"}', 'standard{data.tokenizer="0\\U000000a0"}'),
        ("standard{data.tokenizer=it's.json}", "standard{data.tokenizer=it's.json}"),
        ("standard{train.pace=4.0}", "standard+pace=4"),
        ("standard{train.pace=increasing:40}", "standard{train.pace=increasing:40}"),
        ("slow{P=4}", "slow:P=4"),
        ("slow:closed{slow.ratio=4}", "slow:closed:P=4"),
        ("slow{slow.inject=[0, 2]}", "slow:inject=[0,2]"),
        ("symmetric{c=-1}", "symmetric:c=-1"),
        ("symmetric:c=1", "symmetric"),
        ("mimetic", "mimetic"),
        ("symmetric+affine{model.causal=true}@fan_in", "affine+symmetric{model.causal=true}@fan_in"),
        ("leapfrog:n=7+differential{train.lr=1}@gpt2", "leapfrog:n=7+differential{train.lr=1}@gpt2"),
    ],
)  # fmt: skip
def test_canonical_names(text: str, canonical: str) -> None:
    variant = parse_variant(text)
    assert variant.name == canonical
    assert parse_variant(canonical) == variant
    assert hash(variant) == hash(parse_variant(canonical))


def test_sweeps_multiply() -> None:
    assert names("euler{step=0,0.1,1}") == ["euler:step=0", "euler:step=0.1", "euler:step=1"]
    assert names("standard{attention.qk_norm=false,true, train.schedule=cosine,wsd}") == [
        "standard{attention.qk_norm=false,train.schedule=cosine}",
        "standard{attention.qk_norm=false,train.schedule=wsd}",
        "standard{attention.qk_norm=true,train.schedule=cosine}",
        "standard{attention.qk_norm=true,train.schedule=wsd}",
    ]
    assert names("euler{step=1,1.0}") == ["euler:step=1"]
    with raises_code("unexpected-sweep"):
        parse_variant("euler{step=0,1}")


def test_lists_split_outside_braces() -> None:
    assert split_list("a{x=1,2},b@c{d=0,e=1}+f, none{y=[1,2]}") == (
        "a{x=1,2}",
        "b@c{d=0,e=1}+f",
        "none{y=[1,2]}",
    )
    assert split_list(["a,b", "c{d=1,2}"]) == ("a", "b", "c{d=1,2}")
    assert split_outside_braces("a{x='}',y=2},b", ",") == ["a{x='}',y=2}", "b"]
    assert VariantText.parse("a{x=1}@b{c=2,d=3}+e").init == "b{c=2,d=3}+e"


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("standard{train.lrr=1}", "unknown-key", "'lr'"),
        ("standard{trian.lr=1}", "unknown-key", "'train.lr'"),
        ("standard{lr=1e-3}", "unknown-option", "train.lr"),
        ("standard{train.batch=8}", "renamed-key", "train.batch_size"),
        ("euler{stp=1}", "unknown-option", "'step'"),
        ("euler+slow{hidden_dim=4}", "ambiguous-option", "euler and slow"),
        ("standard{attention.qk_norm=3}", "wrong-type", "qk_norm"),
        ("standard{train.schedule=cosin}", "unknown-schedule", "'cosine'"),
        ("euler{step=}", "empty-sweep", "step=1"),
        ("euler{step=0,,1}", "empty-sweep", "step"),
        ("euler{}", "variant-syntax", "euler{step=0.1"),
        ("euler{0.1}", "variant-syntax", "'0.1' has no key"),
        ("euler{step=0.1", "variant-syntax", "not balanced"),
        ("euler{step=0.1}+differential", "variant-syntax", "'+differential'"),
        ("standard{train.lr=1,train.lr=2}", "duplicate-key", "train.lr"),
        ("standard{attention.bias=true,model.attention.bias=false}", "duplicate-key", "attention.bias"),
        ("euler:step=1{step=2}", "duplicate-key", "step"),
        ("leapfrog:n=1:steps=2", "duplicate-key", "steps"),
        ("standard+pace=2{train.pace=3}", "duplicate-key", "pace"),
        ("standard:n=3", "unknown-option", "standard takes no options"),
        ("dense-matched{slow.attention={coupling: euler}}", "no-slow-path", "slow.attention"),
        *(
            (f"standard{{{key}=1}}", "key-set-by-study", hint)
            for key, hint in {
                "train.tokens": "--tokens",
                "train.steps": "--tokens",
                "train.minutes": "--minutes",
                "train.seed": "--seeds",
                "train.device": "--device",
                "train.evaluations": "all runs",
                "data.corpus": "--data",
                "model.preset": "--preset",
                "model.init": "standard@fan_in",
                "model.attention.coupling": "component",
                "attention.scoring": "component",
                "model.attention": "attention.KEY",
            }.items()
        ),
    ],
)
def test_refusals(text: str, code: str, hint: str) -> None:
    with raises_code(code) as error:
        parse_variants([text])
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "attention.qk_norm": st.booleans(),
    "attention.rope": st.booleans() | st.fixed_dictionaries({"base": st.floats(1, 1e9)}),
    "data.seq_len": st.integers(2, 10**6),
    "data.tokenizer": TEXT,
    "model.n_kv_heads": st.none() | st.integers(1, 8),
    "train.lr": st.floats(1e-12, 1e12),
    "train.freeze": st.lists(st.sampled_from(["q", "mlp"]), max_size=2),
    "train.schedule": st.sampled_from(["cosine", "wsd"]),
}
COMPONENTS = st.sampled_from(
    [
        "standard",
        "euler",
        "leapfrog:n=7",
        "differential+euler{R}",
        "symmetric:c=-2",
        "slow:P=4",
        "euler+pace=2",
    ]
).map(lambda text: text.replace("{R}", ":step=0.5"))


@settings(max_examples=150, deadline=None)
@given(
    components=COMPONENTS,
    overrides=st.fixed_dictionaries({}, optional=VALUES),
    init=st.sampled_from(["", "@gpt2", "@fan_in+symmetric=0.5"]),
    data=st.data(),
)
def test_names_round_trip(components: str, overrides: dict[str, Any], init: str, data: st.DataObject) -> None:
    items = [f"{key} = {format_value(value)}" for key, value in overrides.items()]
    braces = "{" + " , ".join(data.draw(st.permutations(items))) + "}" if items else ""
    variant = parse_variant(components + braces + init)
    assert parse_variant(variant.name) == variant
    assert parse_variants([variant.name, variant.name]) == [variant]
    for key, value in overrides.items():
        stored = variant.override(key)
        assert (list(stored) if isinstance(stored, tuple) else stored) == value


def test_override_of_a_variant() -> None:
    variant = parse_variant("standard{train.lr=1e-3}")
    assert variant.override("train.lr") == 0.001
    assert variant.override("data.seq_len", 128) == 128
