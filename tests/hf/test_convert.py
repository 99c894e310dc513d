from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from families import output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf
from qkflow.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, train_bpe
from qkflow.hf.pretrained import to_fast_tokenizer
from qkflow.models import Decoder, ModelConfig
from qkflow.training import pretrained

SHAPE: dict[str, Any] = {"vocab_size": 96, "n_layers": 2, "dim": 64, "n_heads": 4, "feed_forward": "swiglu"}


def decoder(attention: dict[str, Any] | None = None, **changes: Any) -> Decoder:
    shape = {**SHAPE, "attention": attention or {}, **changes}
    return Decoder(ModelConfig.from_dict(shape), seed=0).eval()


def logits(model: Decoder, length: int = 9) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(token_ids(2, length)))


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ({}, {}),
        ({"bias": True}, {"n_kv_heads": 2, "tie_embeddings": False, "hidden_dim": 80, "norm_eps": 1e-5}),
        ({"rope": {"base": 5e5}}, {"head_dim": 32}),
        ({"rope": {"scaling": "linear", "factor": 4.0}}, {}),
        ({"rope": {"scaling": "ntk", "factor": 4.0}}, {}),
        ({"rope": {"scaling": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, {}),
    ],
    ids=["plain", "bias, grouped, untied", "other base", "linear", "ntk", "llama3"],
)
def test_llama_round_trip(attention: dict[str, Any], changes: dict[str, Any]) -> None:
    ours = decoder(attention, **changes)
    llama = hf.to_llama(ours)
    assert type(llama) is transformers.LlamaForCausalLM
    torch.testing.assert_close(output(llama, token_ids(2, 64)), logits(ours, 64), rtol=0, atol=1e-5)
    back = hf.from_llama(llama)
    assert back.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], value) for name, value in ours.state_dict().items())
    torch.testing.assert_close(logits(back, 64), logits(ours, 64), rtol=0, atol=1e-5)


def test_from_llama_and_back() -> None:
    llama = tiny("llama", attention_bias=True)
    ours = hf.from_transformers(llama)
    torch.testing.assert_close(logits(ours), output(llama, token_ids()), rtol=0, atol=1e-5)
    assert torch.equal(output(hf.to_llama(ours), token_ids()), output(llama, token_ids()))


def test_to_llama_merges_drift() -> None:
    ours = decoder({"coupling": "drift:step=0.8"})
    before = logits(ours)
    torch.testing.assert_close(output(hf.to_llama(ours), token_ids()), before, rtol=0, atol=1e-5)
    assert torch.equal(logits(ours), before), "to_llama copies the model"
    assert ours.blocks[0].attention.coupling_spec.name == "drift"


def test_unsupported_conversions_are_refused() -> None:
    with raises_code("not-a-llama"):
        hf.to_llama(decoder({"coupling": "euler", "qk_norm": True}, feed_forward="gelu"))
    with raises_code("not-a-llama"):
        hf.to_llama(decoder(slow={"ratio": 4}))
    with raises_code("not-a-llama"):
        hf.to_llama(decoder(causal=False))
    with raises_code("not-a-llama"):
        hf.to_llama(decoder({"scoring": "differential"}))
    for attention, changes, feature in (
        ({}, {"logit_softcap": 15.0}, "softcap"),
        ({}, {"embedding_norm": True}, "embedding norm"),
        ({"qk_norm": True, "qk_norm_gain": 1.2}, {}, "fixed gain"),
        ({"rope": False}, {}, "rotary"),
    ):
        with raises_code("not-a-llama") as caught:
            hf.to_llama(decoder(attention, **changes))
        assert feature in str(caught.value)
    with raises_code("unsupported-architecture"):
        hf.from_transformers(tiny("gpt2"))
    with raises_code("unknown-rope-type"):
        hf.from_llama(
            tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        )


def bpe() -> HuggingFaceTokenizer:
    return train_bpe(iter(["to be or not to be, that is the question: " * 20]), 300)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe()], ids=["bytes", "bpe"])
def test_fast_tokenizer_matches(tokenizer: Tokenizer) -> None:
    fast = to_fast_tokenizer(tokenizer)
    for text in ("to be or not\n to be", "Grüße, 東京 \U0001f600", " two  spaces"):
        assert fast(text)["input_ids"] == tokenizer.encode(text)
        assert fast.decode(tokenizer.encode(text)) == text
    assert fast.eos_token_id == tokenizer.eos_token_id


def run_folder(
    path: Path, attention: dict[str, Any] | None = None, length: int | None = 48
) -> tuple[Decoder, Tokenizer]:
    """A finished run as the training loop leaves it."""
    tokenizer = bpe()
    model = decoder(attention, vocab_size=tokenizer.vocab_size)
    weights = pretrained.full_state_dict(model)
    pretrained.save_model(path / "model", model.config, weights, tokenizer, seq_len=length)
    return model, tokenizer


@pytest.mark.parametrize(("to", "coupling"), [("qkflow", "euler"), ("llama", "drift")])
def test_export_import_round_trip(to: Any, coupling: str, tmp_path: Path) -> None:
    model, tokenizer = run_folder(tmp_path / "run", {"coupling": coupling})
    hf.export_model(tmp_path / "run", tmp_path / "out", to=to)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    assert not list(tmp_path.glob(".*")), "no staging folder remains"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = token_ids()
    torch.testing.assert_close(output(loaded, ids), logits(model), rtol=0, atol=1e-5)
    assert loaded.config.eos_token_id == tokenizer.eos_token_id
    assert loaded.config.max_position_embeddings == 48
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert fast("to be")["input_ids"] == tokenizer.encode("to be")

    hf.import_model(tmp_path / "out", tmp_path / "back")
    again, same = pretrained.load_model(tmp_path / "back")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-5)
    assert same.encode("that is") == tokenizer.encode("that is")
    assert same.eos_token_id == tokenizer.eos_token_id
    assert hf.load_model_and_tokenizer(tmp_path / "back")[0].config.max_position_embeddings == 48


@pytest.mark.parametrize("to", ["qkflow", "llama"])
def test_import_keeps_length_and_special_tokens(to: Any, tmp_path: Path) -> None:
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": [255, 256]}
    llama = tiny("llama", vocab_size=300, max_position_embeddings=64, **special)
    llama.save_pretrained(tmp_path / "llama")
    theirs = to_fast_tokenizer(bpe())
    theirs.add_special_tokens({"bos_token": "<s>"})
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", theirs.bos_token_id)]
    )
    theirs.save_pretrained(tmp_path / "llama")
    hf.import_model(tmp_path / "llama", tmp_path / "run")
    hf.export_model(tmp_path / "run", tmp_path / "out", to=to)
    for name in ("run", "out"):
        model, fast = hf.load_model_and_tokenizer(tmp_path / name)
        loaded_config = {key: getattr(model.config, key) for key in ("max_position_embeddings", *special)}
        assert loaded_config == {"max_position_embeddings": 64, **special}
        assert fast("to be")["input_ids"] == theirs("to be")["input_ids"]
        assert (fast.bos_token, fast.eos_token) == ("<s>", theirs.eos_token)
    _, ours = pretrained.load_model(tmp_path / "run")
    assert ours.encode_with_bos("to be") == theirs("to be")["input_ids"]
    assert ours.encode("to be") == theirs("to be")["input_ids"][1:]


def test_fast_tokenizer_has_no_template(tmp_path: Path) -> None:
    tokenizer = bpe()
    end = tokenizer.backend_tokenizer.id_to_token(tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert to_fast_tokenizer(tokenizer)("to be")["input_ids"] == tokenizer.encode("to be")
    assert tokenizer.encode_with_bos("to be") == [tokenizer.eos_token_id, *tokenizer.encode("to be")]


def test_export_without_seq_len(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", length=None)
    described = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert described.keys() == {"format", "model", "eos_token_id"}
    assert hf.export_model(tmp_path / "run", tmp_path / "out").config.max_position_embeddings == 2048
    described["seq_len"] = "long"
    (tmp_path / "run" / "model" / "config.json").write_text(json.dumps(described))
    with raises_code("corrupt-model"):
        hf.export_model(tmp_path / "run", tmp_path / "again")


def test_model_card_metadata(tmp_path: Path) -> None:
    import yaml

    run_folder(tmp_path / "run", {"coupling": "euler"})
    hf.export_model(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["tags"] == ["qkflow", "coupling:euler"]
    assert "import qkflow.hf" in text
    assert "q ← q + Δ·k" in text


def test_model_card_of_merged_drift(tmp_path: Path) -> None:
    drifting, _ = run_folder(tmp_path / "run", {"coupling": "drift"})
    llama = hf.export_model(tmp_path / "run", tmp_path / "out", to="llama")
    card = (tmp_path / "out" / "README.md").read_text()
    assert sum(parameter.numel() for parameter in drifting.parameters()) > llama.num_parameters()
    assert f"| parameters | {llama.num_parameters():,} |" in card
    assert "| coupling | `none` |" in card
    assert "The drift it was trained with is merged into its weights." in card


def test_load_run_export_and_adapter(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    hf.export_model(tmp_path / "run", tmp_path / "out")
    ours, fast = hf.load_model_and_tokenizer(tmp_path / "run")
    theirs, _ = hf.load_model_and_tokenizer(tmp_path / "out")
    torch.testing.assert_close(output(ours, token_ids()), output(theirs, token_ids()))
    assert fast("to be")["input_ids"]
    llama = hf.attach(tiny("llama"), "drift", step=2.0)
    hf.save_adapter(llama, tmp_path / "adapter")
    hf.detach(llama).save_pretrained(tmp_path / "llama")
    to_fast_tokenizer(bpe()).save_pretrained(tmp_path / "llama")
    coupled, _ = hf.load_model_and_tokenizer(tmp_path / "llama", coupling=tmp_path / "adapter")
    assert len(hf.named_coupled_layers(coupled)) == 2


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    with raises_code("folder-exists"):
        hf.export_model(tmp_path / "run", tmp_path / "run")
    with raises_code("unknown-export-format"):
        hf.export_model(tmp_path / "run", tmp_path / "out", to="gpt2")  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    with raises_code("model-not-loadable"):
        hf.load_model_and_tokenizer(tmp_path / "empty")
    assert not (tmp_path / "out").exists()


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "evil",
                "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"},
            }
        )
    )
    with raises_code("model-not-loadable"):
        hf.load_model_and_tokenizer(tmp_path)
