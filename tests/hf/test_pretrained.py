"""Loading and importing `transformers` folders, complete and broken ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf
from qkflow.cli import main
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.errors import InputError
from qkflow.hf.pretrained import to_fast_tokenizer

Change = Callable[[dict[str, Any]], object]
Q = "model.layers.0.self_attn.q_proj.weight"


def llama(**changes: Any) -> Any:
    return tiny("llama", vocab_size=257, **changes)


def written(folder: Path, model: Any = None) -> Path:
    """A model with a tokenizer in a folder of its own; by default a Llama."""
    model = llama() if model is None else model
    model.save_pretrained(folder)
    to_fast_tokenizer(ByteTokenizer()).save_pretrained(folder)
    return folder


def ours(kind: Any = hf.QKFlowForCausalLM, **shape: Any) -> Any:
    torch.manual_seed(0)
    return kind(hf.QKFlowConfig(vocab_size=257, n_layers=2, dim=32, n_heads=4, **shape)).eval()


def change_config(folder: Path, change: Change, name: str = "config.json") -> None:
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def change_weights(folder: Path, change: Change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def refused(folder: Path, code: str, *values: str) -> None:
    """Assert that loading and importing raise one line with `code` and `values`, and write nothing."""
    with raises_code(code) as refusal:
        hf.load_model_and_tokenizer(folder)
    assert "\n" not in str(refusal.value)
    assert all(value in str(refusal.value) for value in values)
    with pytest.raises(InputError, match=re.escape(str(refusal.value))):
        main.dispatch(["import", str(folder), str(folder / "imported")])
    assert not (folder / "imported").exists()


def test_tied_and_headless_models_load(tmp_path: Path) -> None:
    def add_buffer(weights: dict[str, Tensor]) -> None:  # as older versions saved it
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    tied = llama(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(written(tmp_path / "tied", tied) / "model.safetensors")
    change_weights(tmp_path / "tied", add_buffer)
    headless = ours(hf.QKFlowModel, tie_embeddings=False)  # its decoder has the output matrix
    written(tmp_path / "headless", headless)
    for name in ("tied", "headless"):
        hf.import_model(tmp_path / name, tmp_path / f"{name}-run")
    assert torch.equal(
        output(hf.load_model_and_tokenizer(tmp_path / "tied")[0], token_ids()), output(tied, token_ids())
    )
    decoder = hf.load_model_and_tokenizer(tmp_path / "headless-run")[0].model.decoder
    assert torch.equal(decoder.head.weight, headless.decoder.head.weight)


def test_missing_weights_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "llama")
    change_weights(folder, lambda weights: weights.pop(Q))
    capfd.readouterr()
    refused(folder, "weights-mismatch", f"missing: {Q}")
    assert "REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "change", "value"),
    [
        (llama, {"num_hidden_layers": 1}, "and 7 more"),
        (llama, {"intermediate_size": 100}, "(64, 96) instead of (64, 100)"),
        (lambda: ours(attention={"coupling": "euler"}), {"shape": None}, "coupling"),
        (lambda: ours(hf.QKFlowForSequenceClassification), {}, "unexpected: score.weight"),
    ],
    ids=["fewer layers", "other width", "no shape", "our classifier"],
)
def test_mismatched_weights_are_refused(
    model: Any, change: dict[str, Any], value: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "model", model())
    change_config(folder, lambda config: config.update(change))
    refused(folder, "weights-mismatch", value)


@pytest.mark.parametrize("field", ["n_layers", "vocab_size"])
def test_conflicting_config_is_refused(field: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", ours())
    change_config(folder, lambda config: config["shape"].update({field: 3}))
    refused(folder, "model-not-loadable", f"{field}=3")


def test_classifier_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", transformers.LlamaForSequenceClassification(llama().config))
    refused(folder, "weights-mismatch", "missing: lm_head.weight; unexpected: score.weight")


def test_checkpoint_with_coupling_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "llama", hf.attach(llama(), "euler"))
    refused(folder, "coupling-in-checkpoint", "hf.save_adapter", "hf.detach", "--coupling")


class Program:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('ran')",)


def pickled(folder: Path, name: str, content: Any) -> None:
    torch.save(content, folder / name)
    (folder / "model.safetensors").unlink()


def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_file(written(tmp_path / "whole") / "model.safetensors")
    for name, content in (("weights", whole), ("program", Program())):
        pickled(written(tmp_path / name), "pytorch_model.bin", content)
    pickled(written(tmp_path / "index"), "shard.bin", whole)
    (tmp_path / "index" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(whole, "shard.bin")})
    )
    change_config(written(tmp_path / "config"), lambda c: c.update(transformers_weights="adapter_model.bin"))
    torch.save(whole, tmp_path / "config" / "adapter_model.bin")
    monkeypatch.setattr(torch, "load", None)
    for name in ("weights", "program", "index", "config"):
        refused(tmp_path / name, "pickle-refused", ".bin")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
        ({"hidden_size": "x"}, "'hidden_size' expected int"),
        ({"num_hidden_layers": 10**6}, "at most 10,000"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads (3)"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"dtype": "nope"}, "no attribute 'nope'"),
    ],
)
def test_invalid_config_is_refused(change: dict[str, Any], value: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    change_config(folder, lambda config: config.update(change))
    refused(folder, "model-not-loadable", value)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (None, "Couldn't instantiate"),
        ('{"a": 1}', "KeyError: 'added_tokens'"),
        ('{"a"', "Expecting"),
    ],
)
def test_invalid_tokenizer_is_refused(content: str | None, value: str, tmp_path: Path) -> None:
    file = written(tmp_path / "model") / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    refused(tmp_path / "model", "model-not-loadable", value, "tokenizer.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_weights_are_refused(value: float, tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    change_weights(folder, lambda weights: weights[Q][0, 0].fill_(value))
    refused(folder, "non-finite-weights", f"'{Q}'")


def test_quantized_llama_is_refused() -> None:
    model = llama()
    model.config.quantization_config = {"quant_method": "gptq"}
    with raises_code("quantized-model"):
        hf.from_llama(model)
