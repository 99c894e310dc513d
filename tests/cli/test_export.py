"""`qkflow export`, `qkflow import` and `qkflow pace groups`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from families import FAMILIES, output, token_ids
from input_errors import raises_code
from qkflow.cli import main
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.models import Decoder, ModelConfig
from qkflow.training import pretrained


def run_folder(path: Path) -> Decoder:
    shape = {"vocab_size": 257, "n_layers": 1, "dim": 32, "n_heads": 2, "feed_forward": "swiglu"}
    model = Decoder(ModelConfig.from_dict({**shape, "attention": {"coupling": "drift"}}), seed=0).eval()
    pretrained.save_model(path / "model", model.config, pretrained.full_state_dict(model), ByteTokenizer())
    return model


def test_export_and_import_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = run_folder(tmp_path / "run")
    assert (
        main.dispatch(["export", str(tmp_path / "run"), str(tmp_path / "llama"), "--to", "llama", "--json"])
        == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["architecture"] == "LlamaForCausalLM"
    assert printed["folder"] == str(tmp_path / "llama")
    assert main.dispatch(["import", str(tmp_path / "llama"), str(tmp_path / "back")]) == 0
    assert "Decoder" in capsys.readouterr().out
    again, _ = pretrained.load_model(tmp_path / "back")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    with torch.no_grad():
        expected = model.logits(model(token_ids()))
        torch.testing.assert_close(again.logits(again(token_ids())), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(output(llama, token_ids()), expected, rtol=0, atol=1e-5)
    with raises_code("folder-exists"):
        main.dispatch(["export", str(tmp_path / "run"), str(tmp_path / "llama")])
    with raises_code("not-utf8"):
        main.dispatch(["export", str(tmp_path / "run"), str(tmp_path / os.fsdecode(b"caf\xe9"))])


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main.dispatch(["pace", "groups", *arguments, "--json"]) == 0
    parsed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["parameters"]
    return parsed


def test_pace_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parsed = rows(capsys, "tiny", "--ratio", "4", "--lr", "0.5")
    assert {row["lr"] for row in parsed if row["role"] in "qk"} == {2.0}
    assert {row["lr"] for row in parsed if row["role"] not in "qk"} == {0.5}
    run_folder(tmp_path / "run")
    assert any(row["role"] == "coupling" for row in rows(capsys, str(tmp_path / "run")))
    for family, group in (("gpt2", "fused"), ("bert", "qk")):
        _, config, options = FAMILIES[family]
        config(**options).save_pretrained(tmp_path / family)
        assert any(row["group"] == group for row in rows(capsys, str(tmp_path / family)))
    assert main.dispatch(["pace", "groups", str(tmp_path / "bert")]) == 0
    shown = capsys.readouterr().out
    assert "query-key circuit ×20" in shown
    with raises_code("invalid-ratio"):
        main.dispatch(["pace", "groups", "tiny", "--ratio", "0"])
    (tmp_path / "empty").mkdir()
    with raises_code("model-not-loadable"):
        main.dispatch(["pace", "groups", str(tmp_path / "empty")])


def test_pace_groups_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkflow.hf.find_spec", lambda name: None)
    assert main.dispatch(["pace", "groups", "tiny"]) == 0
    with raises_code("missing-dependency"):
        main.dispatch(["pace", "groups", str(tmp_path)])
