"""Slow path variants by name: their overrides, FLOP matching and input checks."""

from __future__ import annotations

from typing import Any

import pytest

from input_errors import raises_code
from qkflow.models import Decoder, ModelConfig, preset
from qkflow.models.cost import flops_per_token
from qkflow.roles import freeze_roles
from qkflow.studies.slow_path_variants import ConfigOverrides, slow_path_variant

TINY: dict[str, Any] = {"preset": "tiny", "attention": {"coupling": "euler"}, "init": "fan_in"}


def build(name: str, base: dict[str, Any] = TINY, seq_len: int = 128) -> tuple[Any, ConfigOverrides]:
    overrides = slow_path_variant(name, base, seq_len)
    values = {**base, **overrides.model}
    model = Decoder(preset(values.pop("preset"), **values), seed=0)
    freeze_roles(model, overrides.train.get("freeze", []))
    return model, overrides


@pytest.mark.parametrize(
    ("name", "gate_init", "freezes"),
    [
        ("slow", 0.0, []),
        ("slow:closed", 0.0, ["slow", "gate"]),
        ("slow:frozen", 0.0, ["slow"]),
        ("slow:warm-gate", 0.1, []),
        ("slow:warm-gate:gate_init=0.3", 0.3, []),
        ("slow:gate_init=0.2:frozen", 0.2, ["slow"]),
    ],
)
def test_overrides_of_each_ablation(name: str, gate_init: float, freezes: list[str]) -> None:
    model, overrides = build(name)
    assert model.slow.gates["0"].value.item() == pytest.approx(gate_init)
    assert overrides.train == ({"freeze": freezes} if freezes else {})
    assert model.slow.ratio == 8
    assert len(model.slow.blocks) == 2  # half of the fast layers
    assert model.slow.blocks[0].attention.coupling_spec.name == "euler"
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if name.startswith("slow.") and ("gate" if "gates" in name else "slow") in freezes
    }


def test_options_and_an_existing_slow_path() -> None:
    assert slow_path_variant("slow:P=4:inject=each:gate=vector", TINY, 128).model["slow"] == {
        "ratio": 4, "n_layers": 2, "hidden_dim": None, "gate": "vector", "gate_init": 0.0, "pool_after": 0,
        "inject": "each", "output_init": "random", "attention": {},
    }  # fmt: skip
    base = preset(
        "tiny", slow={"ratio": 3, "n_layers": 1, "gate_init": 0.5, "attention": {"coupling": "drift"}}
    )
    kept = slow_path_variant("slow:frozen:n_layers=4", base, 128).model["slow"]
    assert (kept["ratio"], kept["n_layers"], kept["gate_init"]) == (3, 4, 0.5)
    assert kept["attention"] == {"coupling": "drift"}
    assert slow_path_variant("slow:closed", base, 128).model["slow"]["gate_init"] == 0.0
    assert slow_path_variant("dense-matched", base, 128).model["slow"] is None


@pytest.mark.parametrize(
    ("options", "seq_len"),
    [
        ("", 128),
        (":pool_after=1", 128),
        (":ratio=2:n_layers=4", 128),
        (":ratio=3:n_layers=1", 50),
        (":ratio=2:n_layers=9", 64),
    ],
)
def test_dense_matched_has_the_flops_of_the_slow_path(options: str, seq_len: int) -> None:
    slow, _ = build(f"slow{options}", seq_len=seq_len)
    dense, overrides = build(f"dense-matched{options}", seq_len=seq_len)
    assert dense.slow is None
    plain = preset("tiny", attention=TINY["attention"])
    for training in (False, True):
        expected, matched, without_slow = (
            flops_per_token(config, seq_len, training=training)
            for config in (slow.config, dense.config, plain)
        )
        assert matched == pytest.approx(expected, rel=0.01)
        assert matched > without_slow
    assert (overrides.model["n_layers"] > 4) is ("n_layers=9" in options or "n_layers=4" in options)


@pytest.mark.parametrize("name", ["small", "60m"])
def test_dense_matched_at_other_presets(name: str) -> None:
    base = preset(name)
    slow = ModelConfig.from_dict({**base.to_dict(), **slow_path_variant("slow", base, 512).model})
    dense = ModelConfig.from_dict({**base.to_dict(), **slow_path_variant("dense-matched", base, 512).model})
    assert flops_per_token(dense, 512) == pytest.approx(flops_per_token(slow, 512), rel=0.01)
    assert dense.resolved_hidden_dim % 8 == 0


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("slo", "unknown-slow-path-variant"),
        ("slow:clsed", "unknown-option"),
        ("slow:closed:frozen", "conflicting-ablations"),
        ("slow:closed:gate_init=0.1", "conflicting-ablations"),
        ("slow:rati=4", "unknown-key"),
        ("slow:warm-gate:start=0.3", "renamed-key"),
        ("slow:layers=2", "renamed-key"),
        ("slow:ratio=1", "invalid-pooling-ratio"),
        ("slow:ratio=129", "ratio-exceeds-length"),
        ("slow:inject=ech", "unknown-inject"),
        ("slow:output_init=zero", "slow-path-cannot-train"),
        ("dense-matched:closed", "unknown-option"),
        ("dense-matched:ratio=500", "ratio-exceeds-length"),
    ],
)
def test_invalid_variants_raise(name: str, code: str) -> None:
    with raises_code(code):
        slow_path_variant(name, TINY, 128)


def test_dense_matched_raises_for_a_narrow_model() -> None:
    base = {"vocab_size": 8, "n_layers": 8, "dim": 2, "n_heads": 1, "feed_forward": "gelu"}
    with raises_code("dense-match-impossible"):
        slow_path_variant("dense-matched:n_layers=1", base, 16)
