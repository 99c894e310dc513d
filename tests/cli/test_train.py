"""`qkflow train`, `eval`, `generate` and `probe`, as a user would type them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from input_errors import raises_code
from qkflow import console, files
from qkflow.cli.commands.train import RECOMMENDED, add_defaults
from qkflow.cli.main import dispatch
from qkflow.data import prepare
from qkflow.models import Decoder
from qkflow.training import Trainer, pretrained, worker
from qkflow.training.config import RunConfig

Command = Callable[..., tuple[int, str]]
SMALL_MODEL = ("model.n_layers=1", "model.dim=16", "model.n_heads=2")


def set_flags(*assignments: str) -> list[str]:
    return [word for text in assignments for word in ("--set", text)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one run, trained by the first test that needs it."""
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command and returns its exit code and stdout."""

    def call(*arguments: object) -> tuple[int, str]:
        code = dispatch([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def model(trained: Path, corpus: Path, command: Command) -> Path:
    if not trained.exists():
        code, out = command(
            "train", trained, "--data", corpus, "--tokenizer", "bpe:300", "--seq-len", 16,
            "--coupling", "drift", "--steps", 6, "--batch-size", 4,
            *set_flags(*SMALL_MODEL, "train.eval_tokens=512"), "--json",
        )  # fmt: skip
        assert code == 0
        assert json.loads(out)["status"] == "finished"
    return trained


def test_train_shows_a_finished_run(model: Path, command: Command) -> None:
    assert yaml.safe_load((model / "config.yaml").read_text())["model"]["attention"] == {"coupling": "drift"}
    code, out = command("train", model)
    assert code == 0
    assert "perplexity" in out
    assert "bits per byte" in out


def test_a_new_run_has_the_recommended_optimizer_and_init(model: Path) -> None:
    config = RunConfig.load(model / "config.yaml")
    assert (config.train.optimizer, config.train.lr) == ("muon", 0.012)
    assert config.model["init"] == "modern"


def test_learning_rate_follows_the_optimizer() -> None:
    flags = {"train": {"optimizer": "adamw"}}
    assert add_defaults(flags, RECOMMENDED)["train"] == {"optimizer": "adamw", "lr": 0.003}
    assert add_defaults({"train": {"lr": 0.5}}, RECOMMENDED)["train"] == {"optimizer": "muon", "lr": 0.5}
    assert add_defaults({}, {})["train"] == {"lr": 0.003}  # a config file without an optimizer
    with raises_code("unknown-train-optimizer"):
        add_defaults({"train": {"optimizer": "sgd"}}, {})
    with raises_code("unknown-train-optimizer"):
        add_defaults({"train": {"optimizer": ["muon"]}}, {})  # --set takes any YAML


def test_brackets_in_paths_are_not_markup(
    model: Path, corpus: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "of[/b]")
    assert "of[/b]: " in command("train", "of[/b]")[1]
    Path("[ab]").mkdir()
    shutil.copy(corpus, "[ab]/a.jsonl")
    assert "of[/b] on [ab]/a.jsonl" in command("eval", "of[/b]", "--data", "[ab]/a.jsonl")[1]
    options = ("--data", corpus, "--tokenizer", "bytes", "--seq-len", 16, "--batch-size", 4, "--steps", 1)
    assert "new[/b]: " in command("train", "new[/b]", *options, *set_flags(*SMALL_MODEL))[1]


def test_train_refuses_changes_of_a_run_and_other_folders(
    model: Path, command: Command, tmp_path: Path
) -> None:
    with raises_code("run-has-another-config") as caught:
        command("train", model, "--lr", 0.5)
    assert "train.lr 0.012, not 0.5" in str(caught.value)
    assert command("train", model, "--set", "train.keep_latest_k=3")[0] == 0  # does not change training
    (tmp_path / "letter.txt").write_text("dear")
    with raises_code("folder-not-empty"):
        command("train", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_flags_override_a_config_file(
    settings: Callable[..., dict[str, Any]], command: Command, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(steps=2)))
    code, out = command("train", tmp_path / "run", "--config", tmp_path / "run.yaml", "--steps", 3, "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 3
    (tmp_path / "bad.yaml").write_text("train: {stepz: 2}")
    with raises_code("unknown-key") as caught:
        command("train", tmp_path / "other", "--config", tmp_path / "bad.yaml")
    assert "bad.yaml" in str(caught.value)
    assert "'steps'" in str(caught.value)
    for assignment in ("clip", f"train.{'a.' * 5000}x=1"):
        with raises_code("invalid-assignment"):
            command("train", tmp_path / "other", "--set", assignment)
    with raises_code("renamed-key") as caught:
        command("train", tmp_path / "other", "--set", "train.checkpoint_blocks=true")
    assert "train.activation_checkpointing" in str(caught.value)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("pace", "ratios"), [("4", [4.0, 4.0]), ("increasing:41", [1.0, 21.0])])
def test_pace_flag(
    settings: Callable[..., dict[str, Any]],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pace: str,
    ratios: list[float],
) -> None:
    from qkflow.cli.commands.train import _ProgressCallback

    measured: list[float] = []

    def on_step(self: object, trainer: Trainer, loss: object) -> None:
        rates = {group.role: group.lr for group in trainer.stepper.optimizer.param_groups}
        measured.append(rates["q"] / rates["v"])

    monkeypatch.setattr(_ProgressCallback, "on_step", on_step)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(steps=2)))
    code, _ = command("train", tmp_path / "run", "--config", tmp_path / "run.yaml", "--pace", pace)
    assert code == 0
    assert measured == pytest.approx(ratios)
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]["pace"]
    assert str(stored).removesuffix(".0") == pace


def test_progress_of_a_time_budget(
    settings: Callable[..., dict[str, Any]], command: Command, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(steps=None, minutes=0.003)))
    assert command("train", tmp_path / "run", "--config", tmp_path / "run.yaml")[0] == 0


def test_eval_matches_the_result_of_the_run(model: Path, corpus: Path, command: Command) -> None:
    """Without --seq-len, windows are as long as in training."""
    _, out = command("eval", model, "--data", corpus, "--tokens", 512, "--json")
    measured, result = json.loads(out), json.loads((model / "result.json").read_text())
    assert measured["seq_len"] == 16
    assert measured["loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert measured["bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-5)
    everything = json.loads(command("eval", model, "--data", corpus, "--split", "all", "--json")[1])
    assert everything["tokens"] > measured["tokens"]
    longer = json.loads(
        command("eval", model, "--data", corpus, "--tokens", 512, "--seq-len", 8, "--json")[1]
    )
    assert longer["seq_len"] == 8
    assert longer["loss"] != measured["loss"]
    assert "perplexity" in command("eval", model, "--data", corpus)[1]


def test_eval_of_a_model_without_trained_length(
    model: Path, corpus: Path, command: Command, tmp_path: Path
) -> None:
    copy = shutil.copytree(model / "model", tmp_path / "model")
    stored = json.loads((copy / "config.json").read_text())
    assert stored.pop("seq_len") == 16
    (copy / "config.json").write_text(json.dumps(stored))
    assert json.loads(command("eval", copy, "--data", corpus, "--json")[1])["seq_len"] == 128


def test_bits_per_byte_count_bytes_that_decoding_loses(
    corpus: Path, command: Command, tmp_path: Path
) -> None:
    """Metaspace puts a space into the next token, which decodes without it when it comes first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    subwords = Tokenizer(models.BPE(unk_token="<unk>"))
    subwords.pre_tokenizer, subwords.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    subwords.train_from_iterator([corpus.read_text()], trainer)
    subwords.save(str(tmp_path / "tokenizer.json"))
    _, out = command(
        "train", tmp_path / "run", "--data", corpus, "--tokenizer", tmp_path / "tokenizer.json",
        "--seq-len", 16, "--batch-size", 4, "--steps", 1,
        *set_flags(*SMALL_MODEL, "train.eval_tokens=null"), "--json",
    )  # fmt: skip
    trained = json.loads(out)
    text = prepare(str(corpus), str(tmp_path / "tokenizer.json"))
    for split in ("validation", "all"):
        arguments = ("eval", tmp_path / "run", "--data", corpus, "--split", split, "--json")
        measured = json.loads(command(*arguments)[1])
        parts = ("train", "validation", "test") if split == "all" else (split,)
        assert measured["bytes"] == sum(text.n_bytes(part) for part in parts)
        some = json.loads(command(*arguments, "--tokens", measured["tokens"] // 2)[1])
        share = some["tokens"] / measured["tokens"]
        assert some["bytes"] == pytest.approx(measured["bytes"] * share, rel=0.05)
        if split == "validation":
            assert trained["bits_per_byte"] == pytest.approx(measured["bits_per_byte"], rel=1e-5)


def test_generate(model: Path, command: Command) -> None:
    arguments = ("generate", model, "--prompt", "the sun", "--tokens", 12, "--seed", 1)
    streamed = command(*arguments)[1]
    generated = json.loads(command(*arguments, "--json")[1])
    assert streamed == generated["texts"][0] + "\n"
    assert streamed.startswith("the sun")
    several = json.loads(command(*arguments, "--samples", 3, "--json")[1])
    assert len(several["texts"]) == 3


@pytest.mark.parametrize(
    "arguments", [["generate", "--prompt", "a", "--tokens", "1"], ["probe", "--text", "a"]]
)
def test_texts_begin_with_the_bos_token_of_the_model(
    arguments: list[str], model: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(model / "model", tmp_path / "model")
    stored = json.loads((copy / "config.json").read_text())
    inputs: list[list[int]] = []
    forward = Decoder.forward

    def recording_forward(self: Decoder, ids: Any, **options: Any) -> Any:
        inputs.append(ids.flatten().tolist())
        return forward(self, ids, **options)

    monkeypatch.setattr(Decoder, "forward", recording_forward)
    command(arguments[0], copy, *arguments[1:])
    (copy / "config.json").write_text(json.dumps({**stored, "bos_token_id": 7}))
    command(arguments[0], copy, *arguments[1:])
    assert [ids[0] for ids in inputs] == [stored["eos_token_id"], 7]
    assert inputs[0][1:] == inputs[1][1:]


def test_probe(model: Path, corpus: Path, command: Command, tmp_path: Path) -> None:
    _, out = command("probe", model, "--text", "the sun sings", "--out", tmp_path / "maps.html", "--json")
    (layer,) = json.loads(out)["layers"]
    assert len(layer["entropy"]) == len(layer["step_size"]) == 2
    assert (tmp_path / "maps.html").is_file()
    assert "effective" in command("probe", model, "--data", corpus, "--windows", 2, "--seq-len", 8)[1]
    for wrong in ([], ["--text", "a", "--data", "b"]):
        with raises_code("text-or-data"):
            command("probe", model, *wrong)
    with raises_code("unknown-map-format"):
        command("probe", model, "--text", "a", "--out", "maps.svg")
    with raises_code("text-too-long"):  # the time grows with its cube
        command("probe", model, "--text", "a b " * 1000)


@pytest.mark.parametrize("name", ["eval", "generate", "probe"])
def test_folder_without_a_model(name: str, command: Command, tmp_path: Path) -> None:
    rest = ["--text", "a"] if name == "probe" else []
    with raises_code("model-not-found"):
        command(name, tmp_path / "nowhere", *rest)
    with raises_code("not-a-model-folder"):
        command(name, tmp_path, *rest)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with raises_code("not-a-qkflow-model"):
        command(name, tmp_path, *rest)


@pytest.mark.parametrize("name", ["eval", "generate", "probe"])
@pytest.mark.parametrize(
    ("file", "content", "code", "named"),
    [
        ("tokenizer.json", '{"version": "1.0", "trunc', "corrupt-tokenizer", "tokenizer.json"),
        ("tokenizer.json", '{"a": 1}', "corrupt-tokenizer", "tokenizer.json"),
        ("config.json", "{", "corrupt-model", "config.json"),
        ("config.json", '{"format": "qkflow-decoder"}', "model-format", "config.json"),
        ("config.json", '{"format": "qkflow-decoder-2"}', "corrupt-model", "'model'"),
        ("config.json", '{"format": "qkflow-decoder-2", "model": {}}', "corrupt-model", "'eos_token_id'"),
        (
            "config.json",
            '{"format": "qkflow-decoder-2", "model": {}, "eos_token_id": 1}',
            "corrupt-model",
            "model.vocab_size",
        ),
    ],
)
def test_damaged_model(
    model: Path, corpus: Path, command: Command, tmp_path: Path, name: str, file: str, content: str,
    code: str, named: str,
) -> None:  # fmt: skip
    copy = shutil.copytree(model / "model", tmp_path / "model")
    (copy / file).write_text(content)
    rest = {"probe": ["--text", "a"], "eval": ["--data", corpus]}.get(name, [])
    with raises_code(code) as caught:
        command(name, copy, *rest)
    assert named in str(caught.value)


@pytest.mark.parametrize(("value", "code"), [(float("nan"), "non-finite-weights"), (1e38, "non-finite-loss")])
def test_non_finite_weights(
    model: Path, corpus: Path, command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    value: float, code: str,
) -> None:  # fmt: skip
    copy = shutil.copytree(model / "model", tmp_path / "model")
    weights = load_file(copy / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("blocks"):
            tensor.fill_(value)
    save_file(weights, copy / "model.safetensors")
    with raises_code(code):
        command("eval", copy, "--data", corpus, "--json")
    assert capsys.readouterr().out == ""


def test_json_is_printed_completely_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.emit_json({"a": 1, "b": float("nan")})
    assert capsys.readouterr().out == ""


def test_save_model_on_a_full_disk_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decoder, tokenizer = pretrained.load_model(model)

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        pretrained.save_model(
            tmp_path / "model", decoder.config, pretrained.full_state_dict(decoder), tokenizer
        )
    assert list(tmp_path.iterdir()) == []


def test_incomplete_result(model: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((model / "config.yaml").read_text())
    (tmp_path / "result.json").write_text('{"status": "finished"}')
    with raises_code("incomplete-result") as caught:
        command("train", tmp_path)
    assert "'parameters'" in str(caught.value)
    values = json.loads((model / "result.json").read_text())
    for value, code in (({}, "corrupt-result"), (None, "incomplete-result")):
        (tmp_path / "result.json").write_text(json.dumps({**values, "loss": value}))
        with raises_code(code):
            command("train", tmp_path)


def test_weights_of_another_shape_or_damaged(model: Path, command: Command, tmp_path: Path) -> None:
    copy = shutil.copytree(model / "model", tmp_path / "model")
    stored = json.loads((copy / "config.json").read_text())
    stored["model"]["dim"] = 32
    (copy / "config.json").write_text(json.dumps(stored))
    with raises_code("weights-do-not-fit"):
        command("generate", copy)
    (copy / "model.safetensors").write_bytes(b"not tensors")
    with raises_code("corrupt-model"):
        command("generate", copy)


def test_loss_with_infinite_perplexity_is_shown(model: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((model / "config.yaml").read_text())
    result = json.loads((model / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**result, "loss": 1e4, "perplexity": None}))
    assert "loss 10000.0000, perplexity inf" in command("train", tmp_path)[1]


def test_exit_code_of_a_failed_run(
    settings: Callable[..., dict[str, Any]], command: Command, tmp_path: Path
) -> None:
    wild = settings(lr=1e25, clip=0, warmup=0, schedule="constant")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(wild))
    assert command("train", tmp_path / "run", "--config", tmp_path / "run.yaml")[0] == worker.EXIT_FAILED
