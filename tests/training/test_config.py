from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from input_errors import raises_code
from qkflow.training.config import RunConfig, TrainConfig

Settings = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("pace", [4, "increasing:40", {"ratio": 2}])
def test_yaml_round_trip(settings: Settings, pace: Any) -> None:
    config = RunConfig.from_dict(settings(lr=1e-3, writers=["tensorboard"], pace=pace))
    assert RunConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    assert config.train.writers == ("tensorboard",)


def test_numbers_that_yaml_reads_as_strings() -> None:
    values = yaml.safe_load("train: {tokens: 1M, lr: 3e-3, warmup: 0}")
    assert RunConfig.from_dict(values).train == TrainConfig(tokens=1_000_000, lr=3e-3, warmup=0.0)


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        ({"train": {"lerning_rate": 1}}, "unknown-key", "lerning_rate"),
        ({"train": {"schedul": "wsd"}}, "unknown-key", "'schedule'"),
        ({"train": {"schedule": "linear"}}, "unknown-schedule", "linear"),
        ({"train": {"lr": "fast"}}, "wrong-type", "train.lr"),
        ({"train": {"lr": -1}}, "below-minimum", "train.lr"),
        ({"train": {"warmup": -1}}, "below-minimum", "train.warmup"),
        ({"train": {"beta2": 1.5}}, "above-maximum", "train.beta2"),
        ({"train": {"tokens": "a few"}}, "wrong-type", "train.tokens"),
        ({"train": {"tokens": 5, "steps": 5}}, "several-budgets", "tokens and steps"),
        ({"train": {"batch_size": 6, "accumulate": 4}}, "batch-not-divisible", "train.accumulate 4"),
        ({"train": {"writers": ["mlflow"]}}, "unknown-writers", "tensorboard, trackio, wandb"),
        ({"train": {"writers": "wandb"}}, "wrong-type", "[tensorboard, trackio, wandb], not 'wandb'"),
        ({"train": {"seed": True}}, "wrong-type", "train.seed"),
        ({"train": {"seed": 2**64}}, "above-maximum", "train.seed"),
        ({"train": {"tokens": "1e999"}}, "wrong-type", "train.tokens"),
        ({"train": {"lr": 10**400}}, "wrong-type", "train.lr"),
        ({"train": {"pace": 0}}, "invalid-ratio", "not 0"),
        ({"train": {"pace": "increasing"}}, "invalid-ratio", "'increasing'"),
        ({"train": {"pace": {"rate": 2}}}, "unknown-key", "rate"),
        ({"train": {"pace": "increasing:4:steps=9", "minutes": 1}}, "pace-needs-steps", "train.minutes"),
        ({"model": {"vocab_size": "x"}}, "wrong-type", "model.vocab_size"),
        ({"data": {"corpos": "x"}}, "unknown-key", "'corpus'"),
        ({"model": {"n_layerz": 2}}, "unknown-key", "'n_layers'"),
        ({"model": {"attention": {"copling": "euler"}}}, "unknown-key", "'coupling'"),
        ({"model": {"preset": "tinny"}}, "unknown-preset", "'tiny'"),
        ({"model": [1]}, "not-a-mapping", "'model'"),
        ({"trian": {}}, "unknown-section", "'train'"),
        ("text", "not-a-mapping", "text"),
    ],
)
def test_bad_keys_and_values_are_named(values: Any, code: str, named: str) -> None:
    with raises_code(code) as caught:
        RunConfig.from_dict(values)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"train: {lr: [}", "invalid-yaml"),
        (b"\xff\xfe", "config-not-text"),
        (None, "config-not-found"),
        (b"train: {keep: 3}", "renamed-key"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with raises_code(code) as caught:
        RunConfig.load(path)
    assert str(path) in str(caught.value)


def test_fingerprint_ignores_keys_that_do_not_change_training(settings: Settings) -> None:
    def fingerprint(data_fingerprint: str = "tokens", **options: Any) -> str:
        return RunConfig.from_dict(settings(**options)).fingerprint(data_fingerprint)

    same = fingerprint(save_every=3, keep_latest_k=9, eval_every=2, device="cpu", compile=True)
    assert fingerprint() == same
    for changed in ({"lr": 1e-4}, {"seed": 1}, {"model": {"dim": 32}}, {"data": {"seq_len": 8}}):
        assert fingerprint(**changed) != fingerprint()  # type: ignore[arg-type]
    assert fingerprint(data_fingerprint="others") != fingerprint()


def test_differences_have_key_paths_and_both_values(settings: Settings) -> None:
    old = RunConfig.from_dict(settings(model={"slow": {"ratio": 4}}))
    new = RunConfig.from_dict(settings(lr=0.5, keep_latest_k=3, model={"attention": {"coupling": "drift"}}))
    found = old.differences(new)
    assert found["train.lr"] == (3e-3, 0.5)
    assert found["train.keep_latest_k"] == (2, 3)
    assert found["model.attention.coupling"] == ("none", "drift")
    assert found["model.slow.ratio"] == (4, None)
    assert old.differences(old) == {}


def test_next_token_training_needs_a_causal_model(settings: Settings) -> None:
    with raises_code("model-not-causal"):
        RunConfig.from_dict(settings(model={"causal": False}))


def test_vocab_size_smaller_than_the_tokenizer(settings: Settings) -> None:
    config = RunConfig.from_dict(settings(model={"vocab_size": 100}))
    with raises_code("vocab-too-small") as caught:
        config.model_config(257)
    assert "257" in str(caught.value)
    assert RunConfig.from_dict(settings(model={"vocab_size": 512})).model_config(257).vocab_size == 512
