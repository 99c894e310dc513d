"""Files from strangers: nothing is unpickled, no header is believed, no name leaves its folder."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from starlette.testclient import TestClient

from explored import save_small_model
from hostile_tokenizers import HOSTILE_TOKENIZERS
from input_errors import raises_code
from made_study import FINAL, write_study
from qkflow import hf
from qkflow.cli.main import dispatch
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.errors import InputError
from qkflow.explore.models import open_model
from qkflow.explore.server import Explorer, build_app
from qkflow.hf.pretrained import to_fast_tokenizer
from qkflow.models.generate import generate
from qkflow.studies import load_comparison, save_record
from qkflow.studies.config import ComparisonConfig
from qkflow.training.pretrained import load_model


class Bomb:
    """Writes a file if it is ever unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, an adapter with its base model, and a study."""
    from families import tiny

    folder = tmp_path_factory.mktemp("made")
    save_small_model(folder / "run")
    llama = tiny("llama")
    llama.save_pretrained(folder / "llama")
    hf.save_adapter(hf.attach(llama, "euler"), folder / "adapter")
    config = ComparisonConfig(variants=("euler",), controls=(), tokens=4096, inits=("gpt2",), seeds=3)
    write_study(folder / "study", config, FINAL, points=2, layers=1)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def load_weights(folder: Path) -> None:
    load_model(folder / "run")


def load_llama(folder: Path) -> None:
    hf.load_model_and_tokenizer(folder / "llama")


def load_adapter(folder: Path) -> None:
    from families import tiny

    hf.load_adapter(tiny("llama"), folder / "adapter")


WEIGHTS = {
    load_weights: "run/model/model.safetensors",
    load_llama: "llama/model.safetensors",
    load_adapter: "adapter/coupling.safetensors",
}
loaders = pytest.mark.parametrize("load", WEIGHTS, ids=lambda load: load.__name__)


@loaders
def test_pickles_are_refused(copy: Path, load: Callable[[Path], None]) -> None:
    weights = copy / WEIGHTS[load]
    weights.write_bytes(pickle.dumps(Bomb(copy / "unpickled")))
    with pytest.raises(InputError):
        load(copy)
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(InputError):
        load(copy)
    assert not (copy / "unpickled").exists()


def lie(path: Path, change: Callable[[dict[str, Any], str], None]) -> None:
    """Change the header of a safetensors file, and leave its data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header, next(name for name in header if name != "__metadata__"))
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


LIES: dict[str, Callable[[dict[str, Any], str], None]] = {
    "shape": lambda header, name: header[name].update(shape=[2**40, 2**40]),
    "negative shape": lambda header, name: header[name].update(shape=[-1]),
    "offsets": lambda header, name: header[name].update(data_offsets=[0, 2**62]),
    "type": lambda header, name: header[name].update(dtype="F64"),
    "unknown type": lambda header, name: header[name].update(dtype="X"),
    "name": lambda header, name: header.update({"../../x": header.pop(name)}),
}


@loaders
@pytest.mark.parametrize("kind", LIES)
def test_headers_that_lie(copy: Path, load: Callable[[Path], None], kind: str) -> None:
    lie(copy / WEIGHTS[load], LIES[kind])
    with pytest.raises(InputError):
        load(copy)


@loaders
def test_length_of_the_header_and_nan(copy: Path, load: Callable[[Path], None]) -> None:
    path = copy / WEIGHTS[load]
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    data = struct.pack("<f", float("nan")) * ((len(content) - 8 - length) // 4)
    for hostile in (struct.pack("<Q", 2**63) + content[8:], content[: 8 + length] + data):
        path.write_bytes(hostile)
        with pytest.raises(InputError):
            load(copy)


def test_weight_files_stay_in_their_folder(copy: Path) -> None:
    (copy / "outside.safetensors").write_bytes((copy / "llama" / "model.safetensors").read_bytes())
    (copy / "llama" / "model.safetensors").rename(copy / "llama" / "part.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (copy / "llama" / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises_code("unsafe-name"):
        load_llama(copy)


@pytest.mark.parametrize("run_id", ["../../outside", "..", "/etc", "a/b", "", "x" * 300, "a\0b"])
def test_run_ids_stay_in_their_study(copy: Path, run_id: str) -> None:
    outside = copy / "outside"
    outside.mkdir()
    (outside / "result.json").write_text('{"status": "finished", "loss": 1.0}')
    path = copy / "study" / "study.yaml"
    study = yaml.safe_load(path.read_text())
    study["runs"][0]["id"] = run_id
    path.write_text(yaml.safe_dump(study))
    with raises_code("unsafe-name"):
        load_comparison(copy / "study")


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss", "low"), ("seconds", [1]), ("parameters", 10**40), ("status", 7), ("environment", [])],
)
def test_damaged_result_is_one_sentence(copy: Path, key: str, value: Any) -> None:
    run = sorted((copy / "study" / "runs").iterdir())[0]
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, key: value}))
    with raises_code("corrupt-result") as caught:
        load_comparison(copy / "study")
    assert f"{run / 'result.json'}: '{key}'" in str(caught.value)


def test_nan_in_a_study_never_reaches_its_outputs(copy: Path) -> None:
    for run in (copy / "study" / "runs").iterdir():
        for name in ("metrics.jsonl", "result.json"):
            text = (run / name).read_text()
            (run / name).write_text(
                text.replace('"seconds": ', '"seconds": NaN, "x": ').replace("0.11", "Infinity")
            )
    save_record(copy / "study", copy / "record.json")
    for source in (copy / "study", copy / "record.json"):
        summary = load_comparison(source).summary
        json.dumps(summary.to_dict(), allow_nan=False)
        assert summary.reference is not None
        assert summary.reference.loss is not None


def test_weights_that_overflow_are_one_sentence(copy: Path) -> None:
    path = copy / WEIGHTS[load_weights]
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    data = struct.pack("<f", 7.2e16) * ((len(content) - 8 - length) // 4)
    path.write_bytes(content[: 8 + length] + data)
    model, tokenizer = load_model(copy / "run")
    with raises_code("non-finite-output"):
        generate(model, torch.tensor([tokenizer.encode("a")]), 2)
    client = TestClient(build_app(Explorer([open_model(str(copy / "run"))], "a b")))
    for answer in (client.get("/api/models"), client.post("/api/view", json={"model": 0, "text": "a b"})):
        assert answer.status_code == 400
        assert answer.json()["code"] == "non-finite-output"


@pytest.mark.parametrize(
    "values", [{"_attn_implementation": "a/kernel"}, {"text_config": {"attn_implementation": "a/kernel"}}]
)
def test_configs_that_name_code_of_a_hub(copy: Path, values: dict[str, Any]) -> None:
    path = copy / "llama" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with raises_code("model-not-loadable") as caught:
        load_llama(copy)
    assert "implementation" in str(caught.value)


def test_adapters_that_name_a_model_of_a_hub(copy: Path) -> None:
    (copy / "llama" / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    with raises_code("model-not-loadable") as caught:
        load_llama(copy)
    assert "PEFT" in str(caught.value)


@pytest.mark.parametrize("values", [{"num_labels": 10**9}, {"num_hidden_layers": 10**9}])
def test_counts_that_transformers_would_build(copy: Path, values: dict[str, int]) -> None:
    path = copy / "llama" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with raises_code("model-not-loadable"):
        load_llama(copy)


@pytest.mark.parametrize("values", [{"sliding_window": 0}, {"return_dict": False}])
def test_configs_that_transformers_cannot_run(copy: Path, values: dict[str, int]) -> None:
    path = copy / "llama" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    to_fast_tokenizer(ByteTokenizer()).save_pretrained(copy / "llama")
    with raises_code("model-not-loadable"):
        open_model(str(copy / "llama"))


@pytest.mark.parametrize("kind", HOSTILE_TOKENIZERS)
def test_tokenizers_that_fail(tmp_path: Path, kind: str) -> None:
    from qkflow.data.tokenizer import load_tokenizer, train_bpe

    path = tmp_path / "tokenizer.json"
    content = json.loads(train_bpe(iter(["a b"] * 9), 260).to_str())
    path.write_text(json.dumps(content | HOSTILE_TOKENIZERS[kind]))
    with raises_code("invalid-tokenizer-file"):
        load_tokenizer(str(path)).encode_documents(["a" * 300])


def test_transformers_folder_with_a_tokenizer_that_panics(copy: Path) -> None:
    to_fast_tokenizer(ByteTokenizer()).save_pretrained(copy / "llama")
    path = copy / "llama" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HOSTILE_TOKENIZERS["charsmap"]))
    with raises_code("invalid-tokenizer-file"):
        load_llama(copy)


def test_no_text_of_a_file_controls_the_terminal(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, hostile = copy / "study" / "study.yaml", "\x1b]0;renamed\x07\x1b[2J\x9b2J"
    study = yaml.safe_load(path.read_text())
    study["config"]["data"] = hostile
    path.write_text(yaml.safe_dump(study))
    run = sorted((copy / "study" / "runs").iterdir())[0]
    (run / "result.json").write_text(json.dumps({"status": "failed", "error": hostile}))
    for option in ([], ["--table", "cells", "--markdown"]):
        assert dispatch(["report", str(copy / "study"), *option]) in (0, 1)
    out, err = capsys.readouterr()
    assert "renamed" in out
    assert not set("\x1b\x07\x9b") & set(out + err)


def test_folder_in_place_of_a_result(copy: Path) -> None:
    """The run would be trained again, and could not write its result."""
    metrics = copy / "run" / "metrics.jsonl"
    metrics.write_text("kept")
    (copy / "run" / "config.yaml").write_text("train: {steps: 1}")
    (copy / "run" / "result.json").mkdir()
    with raises_code("not-a-file"):
        dispatch(["train", str(copy / "run")])
    assert metrics.read_text() == "kept"
