"""`qkflow train`, `eval`, `generate` and `probe`, as a user would type them."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from qkflow import console, files
from qkflow.cli.main import dispatch
from qkflow.data import prepare
from qkflow.errors import InputError
from qkflow.models import Decoder
from qkflow.training import pretrained, worker


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for one run, trained by the first test that needs it."""
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture
def command(capsys):
    """Run a command; its exit code and what it printed."""

    def call(*arguments):
        code = dispatch([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def model(trained, corpus, command):
    if not trained.exists():
        small = ["model.n_layers=1", "model.dim=16", "model.n_heads=2", "train.eval_tokens=512"]
        code, out = command(
            "train", trained, "--data", corpus, "--tokenizer", "bpe:300", "--seq-len", 16,
            "--coupling", "drift", "--steps", 6, "--batch-size", 4,
            *(word for text in small for word in ("--set", text)), "--json",
        )  # fmt: skip
        assert code == 0
        assert json.loads(out)["status"] == "finished"
    return trained


def test_train_shows_a_finished_run_again(model, command):
    assert yaml.safe_load((model / "config.yaml").read_text())["model"]["attention"] == {"coupling": "drift"}
    code, out = command("train", model)
    assert code == 0
    assert "perplexity" in out
    assert "bits per byte" in out


def test_brackets_of_a_path_stay_what_they_are(model, corpus, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "of[/b]")
    assert "of[/b]: " in command("train", "of[/b]")[1]
    Path("[ab]").mkdir()
    shutil.copy(corpus, "[ab]/a.jsonl")
    assert "of[/b] on [ab]/a.jsonl" in command("eval", "of[/b]", "--data", "[ab]/a.jsonl")[1]
    small = ("model.n_layers=1", "model.dim=16", "model.n_heads=2")
    small = [word for text in small for word in ("--set", text)]
    asked = (
        "--data",
        corpus,
        "--tokenizer",
        "bytes",
        "--seq-len",
        16,
        "--batch-size",
        4,
        "--steps",
        1,
        *small,
    )
    assert "new[/b]: " in command("train", "new[/b]", *asked)[1]


def test_train_refuses_a_folder_of_something_else(model, command, tmp_path):
    with pytest.raises(InputError, match=r"holds another run \(train\.lr is 0\.003, not 0\.5\)"):
        command("train", model, "--lr", 0.5)
    assert (
        command("train", model, "--set", "train.keep_latest_k=3")[0] == 0
    )  # changes nothing that was learned
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds something else"):
        command("train", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_train_from_a_config_with_flags_on_top(settings, command, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(steps=2)))
    code, out = command("train", tmp_path / "run", "--config", tmp_path / "run.yaml", "--steps", 3, "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 3
    (tmp_path / "bad.yaml").write_text("train: {stepz: 2}")
    with pytest.raises(InputError, match=r"bad.yaml: unknown key of train 'stepz': did you mean 'steps'"):
        command("train", tmp_path / "other", "--config", tmp_path / "bad.yaml")
    with pytest.raises(InputError, match=r"section\.key=value"):
        command("train", tmp_path / "other", "--set", "clip")
    assert not (tmp_path / "other").exists()


def test_eval_agrees_with_the_run(model, corpus, command):
    _, out = command("eval", model, "--data", corpus, "--seq-len", 16, "--tokens", 512, "--json")
    found, result = json.loads(out), json.loads((model / "result.json").read_text())
    assert found["loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-5)
    everything = json.loads(command("eval", model, "--data", corpus, "--split", "all", "--json")[1])
    assert everything["tokens"] > found["tokens"]
    assert "perplexity" in command("eval", model, "--data", corpus)[1]


def test_bits_per_byte_count_the_bytes_that_a_tokenizer_loses(corpus, command, tmp_path):
    """Metaspace writes a space into the token after it, and a token alone decodes without."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    subwords = Tokenizer(models.BPE(unk_token="<unk>"))
    subwords.pre_tokenizer, subwords.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    subwords.train_from_iterator([corpus.read_text()], trainer)
    subwords.save(str(tmp_path / "tokenizer.json"))
    asked = ["--data", corpus, "--tokenizer", tmp_path / "tokenizer.json", "--seq-len", 16, "--batch-size", 4]
    small = ("model.n_layers=1", "model.dim=16", "model.n_heads=2", "train.eval_tokens=null")
    small = [word for text in small for word in ("--set", text)]
    _, out = command("train", tmp_path / "run", *asked, "--steps", 1, *small, "--json")
    trained = json.loads(out)
    text = prepare(str(corpus), str(tmp_path / "tokenizer.json"))
    for split in ("validation", "all"):
        asked = ("eval", tmp_path / "run", "--data", corpus, "--seq-len", 16, "--split", split, "--json")
        found = json.loads(command(*asked)[1])
        parts = ("train", "validation", "test") if split == "all" else (split,)
        assert found["bytes"] == sum(text.n_bytes(part) for part in parts)
        some = json.loads(command(*asked, "--tokens", found["tokens"] // 2)[1])
        share = some["tokens"] / found["tokens"]
        assert some["bytes"] == pytest.approx(found["bytes"] * share, rel=0.05)
        if split == "validation":
            assert trained["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)


def test_generate(model, command):
    asked = ("generate", model, "--prompt", "the sun", "--tokens", 12, "--seed", 1)
    streamed = command(*asked)[1]
    found = json.loads(command(*asked, "--json")[1])
    assert streamed == found["texts"][0] + "\n"
    assert streamed.startswith("the sun")
    several = json.loads(command(*asked, "--samples", 3, "--json")[1])
    assert len(several["texts"]) == 3


@pytest.mark.parametrize("asked", [["generate", "--prompt", "a", "--tokens", 1], ["probe", "--text", "a"]])
def test_texts_begin_as_the_model_folder_says(asked, model, command, tmp_path, monkeypatch):
    copy = shutil.copytree(model / "model", tmp_path / "model")
    described = json.loads((copy / "config.json").read_text())
    assert described["length"] == 16
    read, forward = [], Decoder.forward
    monkeypatch.setattr(
        Decoder,
        "forward",
        lambda self, ids, **k: read.append(ids.flatten().tolist()) or forward(self, ids, **k),
    )
    command(asked[0], copy, *asked[1:])
    (copy / "config.json").write_text(json.dumps({**described, "start_of_document": 7}))
    command(asked[0], copy, *asked[1:])
    assert [ids[0] for ids in read] == [described["end_of_document"], 7]
    assert read[0][1:] == read[1][1:]


def test_probe(model, corpus, command, tmp_path):
    _, out = command("probe", model, "--text", "the sun sings", "--out", tmp_path / "maps.html", "--json")
    (layer,) = json.loads(out)["layers"]
    assert len(layer["entropy"]) == len(layer["step_size"]) == 2
    assert (tmp_path / "maps.html").is_file()
    assert "effective" in command("probe", model, "--data", corpus, "--windows", 2, "--seq-len", 8)[1]
    for wrong in ([], ["--text", "a", "--data", "b"]):
        with pytest.raises(InputError, match="either --text or --data"):
            command("probe", model, *wrong)
    with pytest.raises(InputError, match=r"\.html or \.png"):
        command("probe", model, "--text", "a", "--out", "maps.svg")


@pytest.mark.parametrize("name", ["eval", "generate", "probe"])
def test_what_is_not_a_model(name, command, tmp_path):
    rest = ["--text", "a"] if name == "probe" else []
    with pytest.raises(InputError, match="there is no model at"):
        command(name, tmp_path / "nowhere", *rest)
    with pytest.raises(InputError, match="holds no model"):
        command(name, tmp_path, *rest)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="does not describe a qkflow model"):
        command(name, tmp_path, *rest)


@pytest.mark.parametrize("name", ["eval", "generate", "probe"])
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", '{"version": "1.0", "trunc', "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer.json", '{"a": 1}', "tokenizer.json cannot be read as a tokenizer"),
        ("config.json", '{"format": "qkflow-decoder"}', "does not say the 'model'"),
        ("config.json", '{"format": "qkflow-decoder", "model": {}}', "does not say the 'end_of_document'"),
    ],
)
def test_a_damaged_model(model, corpus, command, tmp_path, name, file, content, words):
    copy = shutil.copytree(model / "model", tmp_path / "model")
    (copy / file).write_text(content)
    rest = {"probe": ["--text", "a"], "eval": ["--data", corpus]}.get(name, [])
    with pytest.raises(InputError, match=words):
        command(name, copy, *rest)


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "'blocks.* not finite numbers"), (1e38, "weights are too large")]
)
def test_weights_that_are_no_use(model, corpus, command, capsys, tmp_path, value, words):
    copy = shutil.copytree(model / "model", tmp_path / "model")
    weights = load_file(copy / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("blocks"):
            tensor.fill_(value)
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(InputError, match=words):
        command("eval", copy, "--data", corpus, "--json")
    assert capsys.readouterr().out == ""


def test_json_is_printed_whole_or_not_at_all(capsys):
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.emit_json({"a": 1, "b": float("nan")})
    assert capsys.readouterr().out == ""


def test_a_model_that_does_not_fit_leaves_nothing_half_written(model, monkeypatch, tmp_path):
    decoder, tokenizer = pretrained.load_model(model)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        pretrained.save_model(
            tmp_path / "model", decoder.config, pretrained.full_state_dict(decoder), tokenizer
        )
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_says_too_little(model, command, tmp_path):
    (tmp_path / "config.yaml").write_text((model / "config.yaml").read_text())
    (tmp_path / "result.json").write_text('{"status": "finished"}')
    with pytest.raises(InputError, match="does not say 'parameters': remove it to train again"):
        command("train", tmp_path)


def test_weights_of_another_shape_or_damaged(model, command, tmp_path):
    copy = shutil.copytree(model / "model", tmp_path / "model")
    described = json.loads((copy / "config.json").read_text())
    described["model"]["width"] = 32
    (copy / "config.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match="does not hold the weights of its config"):
        command("generate", copy)
    (copy / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(InputError, match="cannot be read"):
        command("generate", copy)


def test_a_loss_beyond_all_perplexities_is_shown(model, command, tmp_path):
    (tmp_path / "config.yaml").write_text((model / "config.yaml").read_text())
    result = json.loads((model / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**result, "loss": 1e4, "perplexity": None}))
    assert "loss 10000.0000, perplexity inf" in command("train", tmp_path)[1]


def test_the_exit_code_of_a_failed_run(settings, command, tmp_path):
    wild = settings(lr=1e25, clip=0, warmup=0, schedule="constant")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(wild))
    assert command("train", tmp_path / "run", "--config", tmp_path / "run.yaml")[0] == worker.EXIT_FAILED
