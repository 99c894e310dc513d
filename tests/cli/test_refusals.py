"""Bad input is one sentence and exit code 2, and writes nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

from qkflow.cli import main
from words import WORDS


class Refused(Protocol):
    def __call__(self, *arguments: str, code: str | None = None) -> str: ...


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one valid corpus, and invalid corpora and configs."""
    place = tmp_path_factory.mktemp("place")
    generator = random.Random(0)
    documents = [" ".join(generator.choices(WORDS, k=60)) for _ in range(60)]
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (place / "short.jsonl").write_text("".join(json.dumps({"text": f"a {n}"}) + "\n" for n in range(40)))
    (place / "one.txt").write_text("hello")
    (place / "empty.txt").write_text("")
    (place / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (place / "no-texts").mkdir()
    (place / "bad-key.yaml").write_text("train: {learning_rat: 1}")
    (place / "old-key.yaml").write_text("train: {batch: 8}")
    (place / "bad-section.yaml").write_text("trian: {lr: 1}")
    return place


@pytest.fixture
def refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Return a function that runs a command, checks that it is refused, and returns the message."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no server

    def call(*arguments: str, code: str | None = None) -> str:
        before = sorted(place.rglob("*"))
        monkeypatch.setattr("sys.argv", ["qkflow", *arguments])
        with pytest.raises(SystemExit) as exited:
            main.main()
        out, err = capsys.readouterr()
        assert exited.value.code == 2, err
        assert out == ""
        assert err.startswith("qkflow: ")
        assert err.count("\n") == 1
        assert code is None or err.endswith(f"[{code}]\n"), err
        assert sorted(place.rglob("*")) == before
        return err

    return call


MANY = ",".join(map(str, range(1, 3000)))
SMALL = ("--tokenizer", "bytes", "--seq-len", "16", "--batch-size", "4")
Case = tuple[list[str], str | None, str]  # flags, error code, and text that the message must contain


def cases(*rows: Case) -> pytest.MarkDecorator:
    ids = [" ".join(flags)[:60] for flags, _, _ in rows]
    return pytest.mark.parametrize(("flags", "code", "named"), rows, ids=ids)


@cases(
    (["--data", "nowhere.txt"], "corpus-not-found", "nowhere.txt"),
    (["--data", "empty.txt"], "empty-file", "empty.txt"),
    (["--data", "binary.txt"], "binary-file", "binary.txt"),
    (["--data", "one.txt"], "single-document", "one.txt"),
    (["--data", "no-texts"], "no-text-files", "no-texts"),
    (["--data", "short.jsonl", "--seq-len", "500"], "text-too-short", "501"),
    (["--data", "speches"], "unknown-corpus", "'speeches'"),
    (["--data", "hf:nobody/nothing"], "hub-unreachable", "hf:/path"),
    (["--data", "wikitext-2"], "hub-unreachable", "hf:/path"),
    (["--tokenizer", "byte"], "unknown-tokenizer", "'bytes'"),
    (["--tokenizer", "nowhere/tokenizer.json"], "tokenizer-not-found", "nowhere/tokenizer.json"),
    (["--tokenizer", "hf:nobody/nothing"], "hub-unreachable", "tokenizer.json"),
    (["--preset", "tinny"], "unknown-preset", "'tiny'"),
    (["--schedule", "cosin"], "unknown-schedule", "'cosine'"),
    (["--device", "gpu"], "unknown-device", "'gpu'"),
    (["--device", "cuda:99"], "device-unavailable", "'cuda:99'"),
    (["--tokens", "0"], None, "tokens"),
    (["--threads", "0"], None, "--threads"),
)
@pytest.mark.parametrize("command", [("train", "out"), ("compare", "--out", "out")], ids=lambda c: c[0])
def test_train_and_compare(
    refused: Refused, command: tuple[str, ...], flags: list[str], code: str | None, named: str
) -> None:
    message = refused(*command, "--data", "text.jsonl", *SMALL, *flags, code=code)
    assert named in message


@cases(
    (["--coupling", "eulr"], "unknown-coupling", "'euler'"),
    (["--coupling", "leapfrog:m=7"], "unknown-option", "'m'"),
    (["--scoring", "sofmax"], "unknown-scoring", "'softmax'"),
    (["--init", "gtp2"], "unknown-init", "'gpt2'"),
    (["--precision", "bf61"], "unknown-precision", "'bf16'"),
    (["--pace", "-1"], "invalid-ratio", "-1"),
    (["--pace", "increasing"], "invalid-ratio", "increasing:FACTOR"),
    (["--pace", "increasing:4:steps=7", "--steps", "6"], "ratio-ramp-too-long", "7 steps"),
    (["--parallel", "ddp"], "not-distributed", "torchrun"),
    (["--config", "bad-key.yaml"], "unknown-key", "bad-key.yaml"),
    (["--config", "old-key.yaml"], "renamed-key", "train.batch_size"),
    (["--config", "bad-section.yaml"], "unknown-section", "'train'"),
    (["--config", "binary.txt"], "config-not-text", "binary.txt"),
    (["--config", "no-texts"], "not-a-file", "no-texts is a folder"),
    (["--set", "train.clipp=1"], "unknown-key", "'clip'"),
    (["--set", "train.batch=8"], "renamed-key", "train.batch_size"),
    (["--length", "8"], "renamed-flag", "--seq-len"),
    (["--batch=8"], "renamed-flag", "--batch-size"),
    (["--start", "gpt2"], "renamed-flag", "--init"),
    (["--set", "model.dim=wide"], "wrong-type", "model.dim"),
    (["--set", "model.n_heads=3"], "dim-not-divisible", "128"),
    (["--set", "train.clip=["], "invalid-yaml", "'['"),
    (["--set", "train.steps=2.5"], "wrong-type", "train.steps"),
    (["--tokens", "-5"], "below-minimum", "train.tokens"),
    (["--set", "train.compile=inducter"], "unknown-compile-backend", "'inductor'"),
)
def test_train(refused: Refused, flags: list[str], code: str | None, named: str) -> None:
    assert named in refused("train", "out", "--data", "text.jsonl", *SMALL, *flags, code=code)


@cases(
    (["--variants", "eulr"], "unknown-variant", "'euler'"),
    (["--variants", "euler:m=2"], "unknown-option", "'m'"),
    (["--variants", "euler++drift"], "variant-syntax", "'euler++drift'"),
    (["--variants", "euler@nowhere"], "unknown-init", "'nowhere'"),
    (["--variants", "standard+pace=increasing:40"], "invalid-pace", "standard+pace=4"),
    (["--variants", ""], "no-variants", "--variants"),
    (["--variants", "standard{train.lrr=1}"], "unknown-key", "'lr'"),
    (["--variants", "standard{attention.qk_norm=3}"], "wrong-type", "true or false"),
    (["--variants", "standard{train.tokens=1M}"], "key-set-by-study", "--tokens"),
    (["--variants", "euler{step=}"], "empty-sweep", "step=1"),
    (["--variants", "euler{step=1"], "variant-syntax", "balanced"),
    (["--variants", "euler{attention.circuit=CAFO}"], None, "'euler{attention.circuit=CAFO}'"),
    (["--variants", f"euler{{step={MANY},train.lr={MANY}}}"], "too-many-runs", "hours"),
    (["--variants", "eulr", "--dry-run"], "unknown-variant", "'euler'"),
    (["--baselines", "none"], "no-baselines", "--baselines"),
    (["--baselines", "standrd"], "unknown-variant", "'standard'"),
    (["--seeds", "1"], "too-few-seeds", "--seeds 1"),
    (["--starts", "gpt2"], "renamed-flag", "--inits"),
    (["--match", "tim"], "unknown-match", "'time'"),
    (["--variants", "leapfrog:n=0"], None, "'leapfrog:n=0'"),
)
def test_compare(refused: Refused, flags: list[str], code: str | None, named: str) -> None:
    assert named in refused("compare", "--out", "out", "--data", "text.jsonl", *SMALL, *flags, code=code)


def test_folder_that_cannot_be_written(refused: Refused) -> None:
    """Below a file even root cannot create a folder."""
    for command in (("train",), ("compare", "--out")):
        message = refused(*command, "one.txt/out", "--data", "text.jsonl", *SMALL, code="folder-not-writable")
        assert "one.txt/out" in message
        assert "one.txt" in refused(*command, "one.txt", "--data", "text.jsonl", *SMALL)


def test_flags_are_checked_before_the_model_is_read(refused: Refused) -> None:
    refused("generate", "nowhere", "--samples", "0", code="below-minimum")
    assert "--tokens" in refused("generate", "nowhere", "--tokens", "0", code="below-minimum")
    refused("generate", "nowhere", "--temperature", "nan", code="not-finite")
    refused("generate", "nowhere", "--top-k", "0", code="bad-top-k")
    refused("eval", "nowhere", "--tokens", "0", code="below-minimum")
    refused("reproduce", "coupling", "--tokens", "many", code="invalid-count")
    refused("generate", "nowhere", "--seed", "9" * 23, code="above-maximum")
    assert "--prompt" in refused("generate", "nowhere", "--prompt", "\udcff\udcfe", code="not-utf8")
    assert "--text" in refused("probe", "nowhere", "--text", "\udcff", code="not-utf8")
    assert "'validation'" in refused("eval", "nowhere", "--split", "validaton", code="unknown-split")
    refused("generate", "nowhere", "--threads", "0", code="below-minimum")


def test_model_that_does_not_exist(refused: Refused) -> None:
    for name, *rest in (["eval"], ["generate"], ["probe", "--text", "a"], ["export", "out", "--to", "llama"]):
        assert "nowhere" in refused(name, "nowhere", *rest, code="model-not-found")
    assert "nobody/nothing" in refused("import", "nobody/nothing", "out", code="hub-unreachable")
    assert "./nowhere" in refused("import", "./nowhere", "out", code="model-not-found")
    assert "study.yaml" in refused("report", "nowhere", code="not-a-study")
    assert "tiny" in refused("pace", "groups", "tinny", code="hub-unreachable")
    assert "tiny" in refused("pace", "groups", "./nowhere", code="model-not-found")


@pytest.mark.parametrize(
    "flag", ["--dim", "--n-heads", "--n-kv-heads", "--seq-len", "--batch-size", "--threads", "--rounds"]
)
def test_bench_counts_are_positive(refused: Refused, flag: str) -> None:
    assert flag in refused("bench", "--level", "attention", flag, "0", code="below-minimum")


def test_operating_system_errors_have_a_code(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, code in ((errno.ENOSPC, "disk-full"), (errno.EIO, "os-error")):

        def fail(argv: list[str], number: int = number) -> int:
            raise OSError(number, os.strerror(number), "out/file")

        monkeypatch.setattr(main, "dispatch", fail)
        assert "out/file" in refused("train", "out", code=code)


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_stopped_run_prints_how_to_resume(place: Path, tmp_path: Path) -> None:
    """The process sends the signal to itself at its third step."""
    code = (
        "import os, signal, sys; from qkflow.cli import main; from qkflow.cli.commands import train\n"
        "on_step = train._ProgressCallback.on_step\n"
        "def stop(self, trainer, loss):\n"
        "    on_step(self, trainer, loss)\n"
        f"    trainer.step == 3 and os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "train._ProgressCallback.on_step = stop\n"
        "main.main()"
    )
    model = ("--set", "model.n_layers=1", "--set", "model.dim=16", "--set", "model.n_heads=2")
    arguments = ["train", tmp_path / "run", "--data", place / "text.jsonl", *SMALL, *model, "--steps", "6"]
    environment = {**os.environ, "QKFLOW_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments), "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 75
    assert "stopped at step 3" in done.stderr
    assert f"qkflow train {tmp_path / 'run'}\n" in done.stderr
    assert done.stdout == ""


@cases(
    (["compare", "--seeds", "9223372036854775807"], "above-maximum", "9223372036854775807"),
    (["compare", "--tokens", "1e23"], "above-maximum", "--tokens"),
    (["compare", "--seq-len", "99999999999"], "above-maximum", "--seq-len"),
    (["bench", "--rounds", "0"], "below-minimum", "--rounds"),
    (["bench", "--dim", "99999999999"], "above-maximum", "--dim"),
    (["pace", "study", "agreement", "--examples", "99999999999"], "above-maximum", "memory"),
    (["pace", "flow", "--ratios", "nan"], "not-a-number-list", "nan"),
    (["data", "describe", "patterns:documents=1000000000"], "corpus-too-large", "2,000 GB"),
    (["data", "prepare", "text.jsonl", "--tokenizer", "bpe:²"], "invalid-vocab-size", "bpe:²"),
    (["data", "prepare", "text.jsonl", "--tokenizer", "hf:a b"], "invalid-hub-name", "'a b'"),
    (["data", "prepare", "hf:a/b/c"], "invalid-hub-name", "a/b/c"),
    (["data", "prepare", "~no-such-user/x.txt"], "home-not-found", "~no-such-user"),
    (["train", "out", "--threads", "99999999999"], "above-maximum", "--threads"),
    (["pace", "flow", "--m", "1e-300"], "flow-out-of-range", "m=1e-300"),
    (["train", "out", "--coupling", "leapfrog:n=99999999999"], "bad-option-value", "n"),
    (["train", "out", "--set", "train.clip=" + "[" * 9000], "invalid-yaml", "levels deep"),
    (["train", ""], "empty-path", "folder"),
    (["train", "/dev/null"], "not-a-file", "/dev/null is a device"),
    (["report", "x" * 300], "unusable-path", "too long"),
    (["generate", "a\nb"], "model-not-found", r"a\nb"),
    (["generate", "\udcff"], "model-not-found", r"\udcff"),
)
def test_arguments(refused: Refused, flags: list[str], code: str | None, named: str) -> None:
    assert named in refused(*flags, code=code)


@pytest.mark.parametrize(
    "variables",
    [{"WORLD_SIZE": "x"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "2", "RANK": "2"}, {"LOCAL_RANK": "-1"}],
    ids=str,
)
def test_ranks_that_make_no_sense(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused("train", "out", "--data", "text.jsonl", *SMALL, "--steps", "1", code="invalid-world-size")


def test_endpoint_that_is_no_address(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("x", "http://", "http://[", "http://127.0.0.1:x"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        refused("data", "prepare", "text.jsonl", "--tokenizer", "hf:nobody/nothing", code="hub-unreachable")


def test_allocation_that_fails(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes.")

    monkeypatch.setattr(main, "dispatch", fail)
    assert "tried to allocate 4000 bytes" in refused("bench", code="out-of-memory")
