import pytest
import yaml

from qkflow.config_io import parse_count
from qkflow.errors import InputError
from qkflow.training.config import RunConfig, TrainConfig


def test_yaml_round_trip(settings):
    config = RunConfig.from_dict(settings(lr=1e-3, writers=["tensorboard"], pace=4))
    assert RunConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    assert config.train.writers == ("tensorboard",)


def test_numbers_as_yaml_reads_them():
    # YAML 1.1 takes 3e-3 and 1M for texts
    values = yaml.safe_load("train: {tokens: 1M, lr: 3e-3, warmup: 0}")
    assert RunConfig.from_dict(values).train == TrainConfig(tokens=1_000_000, lr=3e-3, warmup=0.0)


@pytest.mark.parametrize(
    ("text", "number"), [("200k", 200_000), ("1.5M", 1_500_000), ("3e6", 3_000_000), (7, 7)]
)
def test_counts(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"train": {"lerning_rate": 1}}, "unknown key of train 'lerning_rate'"),
        ({"train": {"schedul": "wsd"}}, "did you mean 'schedule'"),
        ({"train": {"schedule": "linear"}}, "unknown train.schedule 'linear'"),
        ({"train": {"lr": "fast"}}, "train.lr must be a number, not 'fast'"),
        ({"train": {"lr": -1}}, "train.lr must be above zero"),
        ({"train": {"tokens": "a few"}}, "train.tokens must be a whole number"),
        ({"train": {"tokens": 5, "steps": 5}}, "not tokens and steps together"),
        ({"train": {"batch_size": 6, "accumulate": 4}}, "cannot be accumulated"),
        ({"train": {"writers": ["mlflow"]}}, "known: tensorboard, trackio, wandb"),
        (
            {"train": {"writers": "wandb"}},
            r"must be a list, e\.g\. \[tensorboard, trackio, wandb\], not 'wandb'",
        ),
        ({"train": {"seed": True}}, "train.seed must be a whole number"),
        ({"train": {"seed": 2**64}}, r"train.seed must lie between -2\^63 and 2\^64"),
        ({"train": {"tokens": "1e999"}}, "train.tokens must be a whole number"),
        ({"train": {"lr": 10**400}}, "train.lr must be a number"),
        ({"model": {"vocabulary": "x"}}, "model.vocab_size must be a whole number, not 'x'"),
        ({"data": {"corpos": "x"}}, "did you mean 'corpus'"),
        ({"model": {"layerz": 2}}, "did you mean 'layers'"),
        ({"model": {"attention": {"copling": "euler"}}}, "did you mean 'coupling'"),
        ({"model": {"preset": "tinny"}}, "did you mean 'tiny'"),
        ({"model": [1]}, "'model' must be a mapping"),
        ({"trian": {}}, "did you mean 'train'"),
        ("text", "sections model, data and train"),
    ],
)
def test_bad_keys_and_values_are_named(values, words):
    with pytest.raises(InputError, match=words):
        RunConfig.from_dict(values)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"train: {lr: [}", "cannot be read as YAML"), (b"\xff\xfe", "not a text file"), (None, "there is no")],
)
def test_bad_files(tmp_path, content, words):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        RunConfig.load(path)


def test_only_what_decides_the_result_counts_for_the_fingerprint(settings):
    def fingerprint(data="tokens", **options):
        return RunConfig.from_dict(settings(**options)).fingerprint(data)

    assert fingerprint() == fingerprint(save_every=3, keep=9, eval_every=2, device="cpu", compile=True)
    for changed in ({"lr": 1e-4}, {"seed": 1}, {"model": {"dim": 32}}, {"data": {"seq_len": 8}}):
        assert fingerprint(**changed) != fingerprint()
    assert fingerprint(data_fingerprint="others") != fingerprint()


def test_a_vocabulary_smaller_than_the_tokenizers(settings):
    config = RunConfig.from_dict(settings(model={"vocab_size": 100}))
    with pytest.raises(InputError, match="too few for the tokenizer's 257 tokens"):
        config.model_config(257)
    assert RunConfig.from_dict(settings(model={"vocab_size": 512})).model_config(257).vocab_size == 512
