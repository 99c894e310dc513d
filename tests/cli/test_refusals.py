"""What a user gets wrong is one sentence and exit code 2, and leaves the disk as it was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qkflow.cli import main
from words import WORDS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts that are fine, and texts and configs that are not."""
    place = tmp_path_factory.mktemp("place")
    chance = random.Random(0)
    documents = [" ".join(chance.choices(WORDS, k=60)) for _ in range(60)]
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (place / "short.jsonl").write_text("".join(json.dumps({"text": f"a {n}"}) + "\n" for n in range(40)))
    (place / "one.txt").write_text("hello")
    (place / "empty.txt").write_text("")
    (place / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (place / "no-texts").mkdir()
    (place / "bad-key.yaml").write_text("train: {learning_rat: 1}")
    (place / "bad-section.yaml").write_text("trian: {lr: 1}")
    return place


@pytest.fixture
def refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command that must be refused; the sentence it says."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there

    def call(*arguments: str) -> str:
        before = sorted(place.rglob("*"))
        monkeypatch.setattr("sys.argv", ["qkflow", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        said = capsys.readouterr()
        assert stopped.value.code == 2, said.err
        assert said.out == ""
        assert said.err.startswith("qkflow: ")
        assert said.err.count("\n") == 1
        assert sorted(place.rglob("*")) == before
        return said.err

    return call


SMALL = ("--tokenizer", "bytes", "--seq-len", "16", "--batch-size", "4")
OF_BOTH = [
    (["--data", "nowhere.txt"], "there is no file or folder nowhere.txt"),
    (["--data", "empty.txt"], "empty.txt is empty"),
    (["--data", "binary.txt"], "[binary-file]"),
    (["--data", "one.txt"], "[single-document]"),
    (["--data", "no-texts"], "[no-text-files]"),
    (["--data", "short.jsonl", "--seq-len", "500"], "fewer than one window of 501"),
    (["--data", "speches"], "did you mean 'speeches'"),
    (["--data", "hf:nobody/nothing"], "cannot be reached: pass a local copy, as hf:/path"),
    (["--data", "wikitext-2"], "cannot be reached: pass a local copy, as hf:/path"),
    (["--tokenizer", "byte"], "did you mean 'bytes'"),
    (["--tokenizer", "nowhere/tokenizer.json"], "there is no tokenizer at nowhere/tokenizer.json"),
    (["--tokenizer", "hf:nobody/nothing"], "cannot be reached: pass a local copy, as the path"),
    (["--preset", "tinny"], "did you mean 'tiny'"),
    (["--schedule", "cosin"], "did you mean 'cosine'"),
    (["--device", "gpu"], "'gpu' is not a device: use auto"),
    (["--device", "cuda:99"], "this machine has no device 'cuda:99'"),
    (["--tokens", "0"], "--tokens 0 is less than one step|train.tokens must be above zero"),
    (["--threads", "0"], "--threads must be at least 1"),
]


@pytest.mark.parametrize(("wrong", "sentence"), OF_BOTH, ids=[" ".join(wrong) for wrong, _ in OF_BOTH])
@pytest.mark.parametrize("command", [("train", "out"), ("compare", "--out", "out")], ids=lambda c: c[0])
def test_train_and_compare(refused, command, wrong, sentence):
    if wrong == ["--device", "cuda:99"]:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there may be a hundred of them")
    said = refused(*command, "--data", "text.jsonl", *SMALL, *wrong)
    assert any(one in said for one in sentence.split("|")), said


OF_TRAIN = [
    (["--coupling", "eulr"], "did you mean 'euler'"),
    (["--coupling", "leapfrog:m=7"], "unknown option of coupling 'leapfrog' 'm'"),
    (["--scoring", "sofmax"], "did you mean 'softmax'"),
    (["--init", "gtp2"], "did you mean 'gpt2'"),
    (["--precision", "bf61"], "did you mean 'bf16'"),
    (["--pace", "-1"], "the ratio must be above zero"),
    (["--parallel", "ddp"], "start it with torchrun"),
    (["--config", "bad-key.yaml"], "bad-key.yaml: unknown key of train 'learning_rat'"),
    (["--config", "bad-section.yaml"], "did you mean 'train'"),
    (["--config", "binary.txt"], "binary.txt is not a text file"),
    (["--set", "train.clipp=1"], "did you mean 'clip'"),
    (["--set", "model.dim=wide"], "model.dim must be a whole number, not 'wide'"),
    (["--set", "model.n_heads=3"], "width 128 does not divide into 3 heads"),
    (["--set", "train.clip=["], "'[' cannot be read as YAML"),
    (["--set", "train.steps=2.5"], "train.steps must be a whole number"),
    (["--set", "train.compile=inducter"], "did you mean 'inductor'"),
]


@pytest.mark.parametrize(("wrong", "sentence"), OF_TRAIN, ids=[" ".join(wrong) for wrong, _ in OF_TRAIN])
def test_train_alone(refused, wrong, sentence):
    assert sentence in refused("train", "out", "--data", "text.jsonl", *SMALL, *wrong)


OF_COMPARE = [
    (["--variants", "eulr"], "did you mean 'euler'"),
    (["--variants", "euler:m=2"], "unknown option of coupling 'euler' 'm'"),
    (["--variants", "euler++drift"], "variant 'euler++drift': cannot read ''"),
    (["--variants", "euler@nowhere"], "unknown start 'nowhere'"),
    (["--variants", ""], "no variant given"),
    (["--seeds", "1"], "a verdict needs at least 3 seeds"),
    (["--match", "tim"], "did you mean 'time'"),
    (["--variants", "leapfrog:n=0"], "variant 'leapfrog:n=0'"),
]


@pytest.mark.parametrize(("wrong", "sentence"), OF_COMPARE, ids=[" ".join(wrong) for wrong, _ in OF_COMPARE])
def test_compare_alone(refused, wrong, sentence):
    assert sentence in refused("compare", "--out", "out", "--data", "text.jsonl", *SMALL, *wrong)


def test_folders_that_cannot_be_written(refused):
    """The tests may run as root, whom no permission stops; under a file nobody can write."""
    for command in (("train",), ("compare", "--out")):
        said = refused(*command, "one.txt/out", "--data", "text.jsonl", *SMALL)
        assert "one.txt/out cannot be written (Not a directory): give another folder" in said
        assert "one.txt" in refused(*command, "one.txt", "--data", "text.jsonl", *SMALL)


def test_what_is_said_before_a_model_is_read(refused):
    generate = ("generate", "nowhere")
    assert "--samples must be at least 1, not 0" in refused(*generate, "--samples", "0")
    assert "--seed must lie between" in refused(*generate, "--seed", "9" * 23)
    assert "--prompt is not valid UTF-8" in refused(*generate, "--prompt", "\udcff\udcfe")
    assert "--text is not valid UTF-8" in refused("probe", "nowhere", "--text", "\udcff")


def test_models_that_are_not_there(refused):
    for command in (["eval"], ["generate"], ["probe", "--text", "a"], ["export", "--to", "llama"]):
        name, *rest = command
        more = ["out"] if name == "export" else []
        assert "there is no model at nowhere" in refused(name, "nowhere", *more, *rest)
    assert "pass a local copy, as the path of its folder" in refused("import", "nobody/nothing", "out")
    assert "there is no model at ./nowhere" in refused("import", "./nowhere", "out")
    assert "it has no study.yaml" in refused("report", "nowhere")
    assert "did you mean 'validation'" in refused("eval", "nowhere", "--split", "validaton")
    assert "--threads must be at least 1" in refused("generate", "nowhere", "--threads", "0")


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_a_stopped_run_says_how_to_go_on(place: Path, tmp_path: Path) -> None:
    """Stopped in the middle, for sure: the run itself sends the signal at its third step."""
    code = (
        "import os, signal, sys; from qkflow.cli import main; from qkflow.cli.commands import train\n"
        "stepped = train._Shown.stepped\n"
        "def ask(self, run, loss):\n"
        "    stepped(self, run, loss)\n"
        f"    run.step == 3 and os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "train._Shown.stepped = ask\n"
        "main.main()"
    )
    model = ("--set", "model.n_layers=1", "--set", "model.dim=16", "--set", "model.n_heads=2")
    asked = [
        "train",
        tmp_path / "run",
        "--data",
        place / "text.jsonl",
        *SMALL,
        *model,
        "--steps",
        "6",
        "--json",
    ]
    environment = {**os.environ, "QKFLOW_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, asked), "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 75
    assert "stopped at step 3, and its state is saved" in done.stderr
    assert f"qkflow train {tmp_path / 'run'}  goes on from there" in done.stderr
    assert done.stdout == ""
