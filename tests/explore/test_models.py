"""What `qkflow explore` opens, and what it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from explored import TEXT, save_small_model, small_decoder
from families import FAMILIES
from input_errors import raises_code
from qkflow import hf
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.explore.decoder_model import DecoderModel
from qkflow.explore.models import open_model
from qkflow.explore.rationale import explain
from qkflow.hf.pretrained import to_fast_tokenizer
from qkflow.training.checkpoint import CheckpointManager
from qkflow.training.config import RunConfig
from qkflow.training.distributed import DistContext

CLASSIFIER_SIZES: dict[str, Any] = {"vocab_size": 300, "num_labels": 3, "pad_token_id": 256}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    return to_fast_tokenizer(ByteTokenizer())


def save_family(folder: Path, family: str, vocab_size: int = 300) -> Path:
    model_class, config_class, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model_class(config_class(**{**sizes, "vocab_size": vocab_size})).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_bert_classifier(folder: Path) -> Path:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, **CLASSIFIER_SIZES
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "opt"])
def test_transformers_model(tmp_path: Path, family: str) -> None:
    model = open_model(save_family(tmp_path / family, family))
    capture = model.capture(TEXT)
    ids = torch.tensor([capture.ids])
    with torch.no_grad():
        out = model.model(ids, output_attentions=True)  # type: ignore[attr-defined]
    assert capture.tokens == list(TEXT)
    torch.testing.assert_close(capture.weights(1), out.attentions[1][0], atol=0.01, rtol=0)
    rows = model.lens_logits(capture, 5)
    assert len(rows) == 3
    torch.testing.assert_close(rows[-1][1], out.logits[0, 5], atol=1e-5, rtol=1e-4)
    loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert capture.loss == pytest.approx(float(loss), rel=1e-4)


@pytest.mark.parametrize(("family", "projection"), [("llama", "self_attn.o_proj"), ("gpt2", "attn.c_proj")])
def test_ablation_in_transformers_equals_zeroed_output_weights(
    tmp_path: Path, family: str, projection: str
) -> None:
    model: Any = open_model(save_family(tmp_path / family, family))
    capture = model.capture(TEXT, frozenset({(1, 2)}))
    layers = model.model.model.layers if family == "llama" else model.model.transformer.h
    output = layers[1].get_submodule(projection)
    with torch.no_grad():
        weight = output.weight if family == "llama" else output.weight.T  # GPT-2's Conv1D is transposed
        weight[:, 32:48] = 0  # head 2 of four heads of 16
    torch.testing.assert_close(capture.losses, model.capture(TEXT).losses)
    assert capture.loss != open_model(tmp_path / family).capture(TEXT).loss


def test_ablation_in_bert_equals_zeroed_output_weights(tmp_path: Path) -> None:
    model: Any = open_model(save_bert_classifier(tmp_path / "bert"))
    before, capture = model.capture(TEXT), model.capture(TEXT, frozenset({(0, 1)}))
    with torch.no_grad():
        model.model.bert.encoder.layer[0].attention.output.dense.weight[:, 8:16] = 0
    assert capture.classes == pytest.approx(model.capture(TEXT).classes, abs=1e-6)
    assert capture.classes != before.classes


def test_adapter_opens_with_its_base(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    hf.attach(model, "euler:n=2")
    adapter = hf.save_adapter(model, tmp_path / "adapter")
    explored: Any = open_model(adapter)
    assert explored.name == "base + adapter"
    capture = explored.capture(TEXT)
    path = explored.trajectory(capture, 1, 3)
    assert len(path.q) == 3
    assert "step_size" in capture.measures
    plain: Any = open_model(base)
    plain_capture = plain.capture(TEXT)
    torch.testing.assert_close(
        explored.trajectory(capture, 0, 0).q[0], plain.trajectory(plain_capture, 0, 0).q[0]
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([capture.ids])).logits[0, 4]
    torch.testing.assert_close(explored.lens_logits(capture, 4)[-1][1], logits, atol=1e-5, rtol=1e-4)
    (adapter / "coupling_config.json").unlink()
    with raises_code("adapter-without-base"):
        open_model(adapter)
    assert open_model(adapter, base=base).coupling(0) is not None


def test_run_and_exported_folder_show_the_same(tmp_path: Path) -> None:
    run = save_small_model(tmp_path / "run", "leapfrog:n=2")
    hf.export_model(run, tmp_path / "exported")
    opened = [open_model(path) for path in (run, run / "model", tmp_path / "exported")]
    assert [model.name for model in opened] == ["run", "run", "exported"]
    assert all(isinstance(model, DecoderModel) for model in opened)
    captures = [model.capture(TEXT) for model in opened]
    assert captures[0].ids == captures[2].ids
    torch.testing.assert_close(captures[0].losses, captures[2].losses)


def test_checkpoints_open_beside_one_another(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(f"{TEXT}\n\n" * 200)
    run = tmp_path / "run"
    run.mkdir()
    decoders = [small_decoder(seed=seed) for seed in (0, 1)]
    model = decoders[0].config.to_dict()
    config = RunConfig.from_dict(
        {"model": model, "data": {"corpus": str(tmp_path / "text.txt"), "tokenizer": "bytes"}}
    )
    (run / "config.yaml").write_text(config.to_yaml())
    manager = CheckpointManager(
        run / "checkpoints", "config", 2, DistContext(torch.device("cpu")), lambda message: None
    )
    for step, decoder in zip((400, 800), decoders, strict=True):
        weights = {f"model.{name}": tensor for name, tensor in decoder.state_dict().items()}
        manager.save(step, weights, {"seconds": 1.0, "threads": 1, "torch": "2"})
    folders = sorted((run / "checkpoints").iterdir())
    opened = [open_model(folders[0]), open_model(folders[1]), open_model(run)]
    assert [model.name for model in opened] == ["run, step 400", "run, step 800", "run, step 800"]
    expected = DecoderModel("expected", decoders[0], ByteTokenizer()).capture(TEXT)
    assert opened[0].capture(TEXT).losses == expected.losses
    assert opened[1].capture(TEXT).losses == opened[2].capture(TEXT).losses != expected.losses
    (folders[0] / "state.safetensors").write_bytes(b"")
    with raises_code("corrupt-checkpoint"):
        open_model(folders[0])


@pytest.mark.parametrize("method", ["attention", "rollout", "gradient"])
def test_rationale_of_a_bert_classifier(tmp_path: Path, method: str) -> None:
    model: Any = open_model(save_bert_classifier(tmp_path / "bert"))
    assert model.class_names == ["LABEL_0", "LABEL_1", "LABEL_2"]
    capture = model.capture(TEXT)
    assert sum(capture.classes) == pytest.approx(1)
    ids = torch.tensor(capture.ids)
    special = [index == 0 for index in range(len(ids))]
    answer = explain(model.classifier(), ids, special, method=method, percent=25, marked=[1, 2, 3])
    assert answer["scores"][0] == 0
    assert sum(answer["scores"]) == pytest.approx(1, abs=1e-5)
    assert answer["mass"] == pytest.approx(sum(answer["scores"][1:4]))
    assert 0 not in answer["top"]
    assert len(answer["top"]) == 5  # a quarter of 18 tokens
    kept = [index for index in range(len(ids)) if index not in answer["top"]]
    with torch.no_grad():
        p = model.model(ids[None]).logits.softmax(-1)[0, answer["predicted"]]
        without = model.model(ids[None, kept]).logits.softmax(-1)[0, answer["predicted"]]
        only = model.model(ids[None, [0, *answer["top"]]]).logits.softmax(-1)[0, answer["predicted"]]
    assert answer["comprehensiveness"] == pytest.approx(float(p - without), abs=1e-5)
    assert answer["sufficiency"] == pytest.approx(float(p - only), abs=1e-5)


def test_classifier_of_the_qkflow_architecture(tmp_path: Path) -> None:
    config = hf.QKFlowConfig(vocab_size=257, n_layers=2, dim=32, n_heads=4, num_labels=2, pad_token_id=256)
    hf.QKFlowForSequenceClassification(config).save_pretrained(tmp_path / "c")
    byte_tokenizer().save_pretrained(tmp_path / "c")
    model: Any = open_model(tmp_path / "c")
    capture = model.capture(TEXT)
    with torch.no_grad():
        expected = model.model(torch.tensor([capture.ids])).logits.softmax(-1)[0]
    assert capture.classes == pytest.approx(expected.tolist(), abs=1e-5)
    answer = explain(model.classifier(), torch.tensor(capture.ids), model.special_tokens(capture.ids))
    assert answer["probability"] == pytest.approx(max(capture.classes), abs=1e-5)


def test_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    with raises_code("vocab-size-mismatch"):
        open_model(save_family(tmp_path / "model", "llama", vocab_size=60))


def test_pickled_models_are_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    folder = save_family(tmp_path / "pickled", "llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with raises_code("pickle-refused"):
        open_model(folder)
    with raises_code("not-a-folder"):
        open_model(folder / "pytorch_model.bin")
    run = save_small_model(tmp_path / "run")
    (run / "model" / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with raises_code("corrupt-model"):
        open_model(run)
    assert not (tmp_path / "executed").exists()


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with raises_code("model-not-found"):
        open_model(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with raises_code("not-a-model-folder"):
        open_model(tmp_path / "empty")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("model: {}")
    with raises_code("run-not-finished"):
        open_model(tmp_path / "unfinished")
