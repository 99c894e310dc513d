"""Folders of `transformers` models that are whole, and those that are refused, each in one sentence."""

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


def refused(folder: Path, words: str) -> None:
    """By every way into the folder, without anything written."""
    with pytest.raises(InputError, match=words) as refusal:
        hf.load_model_and_tokenizer(folder)
    assert "\n" not in str(refusal.value)
    with pytest.raises(InputError, match=re.escape(str(refusal.value))):
        main.dispatch(["import", str(folder), str(folder / "imported")])
    assert not (folder / "imported").exists()


def test_what_transformers_fills_in_by_itself_is_not_missing(tmp_path: Path) -> None:
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


def test_weights_that_are_missing_are_not_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "llama")
    change_weights(folder, lambda weights: weights.pop(Q))
    capfd.readouterr()
    refused(folder, rf"are not those of the LlamaForCausalLM .*\(missing: {Q}\): give the folder")
    assert "REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (llama, {"num_hidden_layers": 1}, r"without a place: model.layers.1.* and 7 more"),
        (llama, {"intermediate_size": 100}, r"of another shape: .*\(64, 96\) instead of \(64, 100\)"),
        (lambda: ours(attention={"coupling": "euler"}), {"shape": None}, r"without a place: .*coupling"),
        (ours, {"shape": {**ours().config.shape, "layers": 3}}, r"layers=3 and num_hidden_layers=2 contra"),
        (lambda: ours(hf.QKFlowForSequenceClassification), {}, r"without a place: score.weight"),
    ],
    ids=["fewer layers", "other width", "no shape", "more layers", "our classifier"],
)
def test_weights_of_another_model(model: Any, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", model())
    change_config(folder, lambda config: config.update(change))
    refused(folder, words)


def test_a_classifier_is_no_causal_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", transformers.LlamaForSequenceClassification(llama().config))
    refused(folder, r"missing: lm_head.weight; without a place: score.weight")


def test_a_coupling_saved_with_its_base_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "llama", hf.attach(llama(), "euler"))
    refused(
        folder,
        r"saved with a coupling attached \(.*coupling.* more\): hf.save_adapter .* hf.detach .* --coupling",
    )


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
        refused(
            tmp_path / name, r"keeps its weights in \w+\.bin: pickles are never opened, so .*save_pretrained"
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"GPTQ .*: install that, or give"),
        ({"hidden_size": "x"}, r"'hidden_size' expected int"),
        ({"num_attention_heads": 3}, r"not a multiple of the number of attention heads \(3\)"),
        ({"num_attention_heads": 0}, r"ZeroDivisionError.*: check its files, config.json first"),
        ({"hidden_act": "nope"}, r"KeyError: 'nope'\): check its files, config.json first"),
        ({"dtype": "nope"}, r"no attribute 'nope'"),
    ],
)
def test_configs_that_make_no_model(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    change_config(folder, lambda config: config.update(change))
    refused(folder, rf"cannot be opened as a causal model \(.*{words}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Couldn't instantiate .* and convert"),
        ('{"a": 1}', "KeyError: 'added_tokens'"),
        ('{"a"', "Expecting"),
    ],
)
def test_tokenizers_that_are_none(content: str | None, words: str, tmp_path: Path) -> None:
    file = written(tmp_path / "model") / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    refused(
        tmp_path / "model",
        rf"for its tokenizer \({words}.*\): put the tokenizer.json that it was trained with",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value: float, tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    change_weights(folder, lambda weights: weights[Q][0, 0].fill_(value))
    refused(folder, rf"'{folder}' is of no use: '{Q}' holds values that are not finite numbers")


def test_a_quantised_llama_does_not_convert() -> None:
    model = llama()
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(InputError, match="a quantised Llama does not convert"):
        hf.from_llama(model)
