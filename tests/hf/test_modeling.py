from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from input_errors import raises_code
from qkflow import hf
from qkflow.attention import merge
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.hf.pretrained import to_fast_tokenizer
from qkflow.models import Decoder

VARIANTS: dict[str, dict[str, Any]] = {
    "standard": {},
    "coupled, grouped, untied": {
        "n_kv_heads": 2,
        "tie_embeddings": False,
        "attention": {"coupling": "affine", "bias": True, "window": 6},
    },
    "softcap, fixed gain, embedding norm": {
        "logit_softcap": 0.5,
        "embedding_norm": True,
        "attention": {"qk_norm": True, "qk_norm_gain": 1.2},
    },
    "modern, untied, no rope": {
        "init": "modern{out=0.5,embed=0.5}",
        "tie_embeddings": False,
        "attention": {"rope": False},
    },
    "differential": {"attention": {"coupling": "leapfrog:n=2", "scoring": "differential", "qk_norm": True}},
}


def config(**changes: Any) -> hf.QKFlowConfig:
    shape = {"vocab_size": 96, "n_layers": 2, "dim": 64, "n_heads": 4, "feed_forward": "swiglu"}
    return hf.QKFlowConfig(**{**shape, **changes})


def causal(**changes: Any) -> Any:
    torch.manual_seed(0)
    return hf.QKFlowForCausalLM(config(**changes)).eval()


def prompt(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_load_through_auto_classes(variant: str, tmp_path: Path) -> None:
    model = causal(**VARIANTS[variant])
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is hf.QKFlowForCausalLM
    assert again.config.model_config() == model.config.model_config()
    assert torch.equal(again(input_ids=prompt()).logits, model(input_ids=prompt()).logits)
    bare = hf.QKFlowModel.from_pretrained(tmp_path)
    assert torch.equal(
        bare(input_ids=prompt()).last_hidden_state, model.model(input_ids=prompt()).last_hidden_state
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_wrapper_matches_decoder(variant: str) -> None:
    model = causal(**VARIANTS[variant])
    decoder = hf.from_transformers(model)
    assert isinstance(decoder, Decoder)
    with torch.no_grad():
        hidden = decoder(prompt())
        out = model(input_ids=prompt(), labels=prompt())
        assert torch.equal(out.logits, decoder.logits(hidden))
        torch.testing.assert_close(out.loss, decoder.loss(hidden[:, :-1], prompt()[:, 1:]))
    fresh = Decoder(model.config.model_config(), seed=3)
    wrapped = hf.to_transformers(fresh)
    assert {name.removeprefix("model.decoder."): p for name, p in wrapped.named_parameters()} == dict(
        fresh.named_parameters()
    )


def test_new_model_uses_config_init() -> None:
    model = causal(init="fan_in")
    weight = hf.from_transformers(model).blocks[0].feed_forward.up.weight
    assert float(weight.detach().std()) == pytest.approx(0.7 / 8, rel=0.05)


def test_missing_weights_are_initialized(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = causal()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    lost = "model.decoder.blocks.0.attention.qk.q.weight"
    state.pop(lost)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = hf.QKFlowForCausalLM.from_pretrained(tmp_path).state_dict()
    assert float(again[lost].std()) == pytest.approx(0.02, rel=0.1)
    assert all(torch.equal(again[name], value) for name, value in state.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_generation_matches_uncached(variant: str) -> None:
    model = causal(**VARIANTS[variant])
    ids = prompt()
    common = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    plain = model.generate(ids, use_cache=False, **common)
    assert torch.equal(model.generate(ids, **common), plain)
    assert torch.equal(model.generate(ids, cache_implementation="static", **common), plain)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(), **common), plain)
    beams = model.generate(ids, num_beams=3, use_cache=False, **common)
    assert torch.equal(model.generate(ids, num_beams=3, **common), beams)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    left = model.generate(padded, attention_mask=(padded != 0).long(), **common)
    assert torch.equal(left[:, 3:], plain)


def test_slow_path_generates_without_cache(tmp_path: Path) -> None:
    model = causal(slow={"ratio": 4, "n_layers": 1, "gate_init": 0.5})
    ids = torch.randint(96, (2, 9))
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3, "the slow path's blocks are not layers of the model"
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    made = again.generate(ids, max_new_tokens=5, do_sample=False, num_beams=2, pad_token_id=0)
    assert torch.equal(
        made, model.generate(ids, max_new_tokens=5, do_sample=False, num_beams=2, pad_token_id=0)
    )
    for asked in ({"use_cache": True}, {"cache_implementation": "static"}):
        cached = model.generate(ids, max_new_tokens=5, do_sample=False, num_beams=2, pad_token_id=0, **asked)
        assert torch.equal(cached, made)
    with raises_code("slow-path-cache"):
        model(ids, use_cache=True)


def test_merged_model_round_trip(tmp_path: Path) -> None:
    model = causal(attention={"coupling": "drift:step=0.8"}, init="fan_in")
    ids = torch.randint(96, (2, 9))
    before = model(ids).logits
    merge(model)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    assert model.config.model_config().attention.coupling == "none"
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    decoder = Decoder(model.model.decoder.config)
    decoder.load_state_dict(model.model.decoder.state_dict())
    with raises_code("merge-not-linear"):
        merge(causal(attention={"coupling": "euler"}))


def test_right_padding() -> None:
    model, ids = causal(), prompt()
    padded = torch.cat([ids, torch.zeros(2, 4, dtype=torch.long)], dim=1)
    logits = model(input_ids=padded, attention_mask=(padded != 0).long()).logits[:, :7]
    torch.testing.assert_close(logits, model(input_ids=ids).logits)


def test_gradient_checkpointing_matches() -> None:
    model = causal().train()
    out = model(input_ids=prompt(), labels=prompt(), output_hidden_states=True)
    assert len(out.hidden_states) == 3
    out.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    model(input_ids=prompt(), labels=prompt()).loss.backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("tied", [True, False])
def test_resize_token_embeddings(tied: bool) -> None:
    model = causal(tie_embeddings=tied)
    model.resize_token_embeddings(100, mean_resizing=False)
    assert model(input_ids=prompt()).logits.shape[-1] == model.config.vocab_size == 100
    assert model.config.model_config().vocab_size == 100
    assert hf.from_transformers(model).config.vocab_size == 100


def test_classification_uses_last_real_token(tmp_path: Path) -> None:
    causal().save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, pad_token_id=0).eval()
    ids = prompt()
    padded = torch.cat([ids, torch.zeros(2, 4, dtype=torch.long)], dim=1)
    short = model(input_ids=ids).logits
    long = model(input_ids=padded, attention_mask=(padded != 0).long()).logits
    assert short.shape == (2, 3)
    torch.testing.assert_close(short, long)


def test_pipeline_and_trainer(tmp_path: Path) -> None:
    tokenizer = to_fast_tokenizer(ByteTokenizer())
    model = causal(vocab_size=257, eos_token_id=256, pad_token_id=256, attention={"coupling": "euler"})
    rows = [{"input_ids": tokenizer("to be or not to be ")["input_ids"]} for _ in range(8)]
    for row in rows:
        row["labels"] = row["input_ids"]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    before = model(
        input_ids=torch.tensor([rows[0]["input_ids"]]), labels=torch.tensor([rows[0]["labels"]])
    ).loss
    Trainer(model, arguments, train_dataset=rows).train()
    model.eval()
    after = model(
        input_ids=torch.tensor([rows[0]["input_ids"]]), labels=torch.tensor([rows[0]["labels"]])
    ).loss
    assert after < before
    written = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    text = written("to be", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith("to be")


def test_encoder_is_not_a_causal_language_model() -> None:
    ids = prompt()
    hidden = hf.QKFlowModel(config(causal=False)).eval()(ids).last_hidden_state
    assert hidden.shape == (2, 7, 64)
    with raises_code("model-not-causal"):
        causal(causal=False)


def test_invalid_inputs_are_refused() -> None:
    model = causal()
    for inputs in ({}, {"input_ids": prompt(), "inputs_embeds": torch.randn(2, 7, 64)}):
        with raises_code("invalid-inputs"):
            model(**inputs)
    with raises_code("invalid-attention-mask"):
        model(input_ids=prompt(), attention_mask=torch.ones(2, 1, 7, 7))
    with raises_code("invalid-attention-mask"):
        model(input_ids=prompt(), attention_mask=torch.ones(2, 3))
    assert hf.QKFlowConfig(num_key_value_heads=2).model_config().n_kv_heads == 2
    with raises_code("unknown-key"):
        hf.QKFlowConfig(shape={"vocab_size": 8, "layrs": 2})


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"coupling": "euler"}, "attention-option"),
        ({"n_layrs": 3}, "unknown-field"),
        ({"shape": [1]}, "invalid-model-config"),
        ({"n_layers": 3, "num_hidden_layers": 2}, "conflicting-config"),
        (
            {"shape": {"vocab_size": 96, "n_layers": 1, "dim": 32, "n_heads": 4}, "vocab_size": 97},
            "conflicting-config",
        ),
    ],
)
def test_invalid_config_is_refused(options: dict[str, Any], code: str) -> None:
    with raises_code(code):
        hf.QKFlowConfig(**options)


def test_invalid_alias_value_is_refused() -> None:
    with raises_code("below-minimum"):
        hf.QKFlowConfig(num_hidden_layers=0)


@pytest.mark.parametrize("head_dim", [None, 32])
def test_config_json_round_trip(head_dim: int | None, tmp_path: Path) -> None:
    made = config(head_dim=head_dim, n_kv_heads=2)
    made.save_pretrained(tmp_path)
    assert hf.QKFlowConfig.from_pretrained(tmp_path).model_config() == made.model_config()
    changed = hf.QKFlowConfig.from_pretrained(tmp_path, n_layers=1, vocab_size=97, head_dim=8)
    shape = changed.model_config()
    assert (shape.n_layers, shape.vocab_size, shape.head_dim) == (1, 97, 8)
    assert (changed.num_hidden_layers, changed.vocab_size, changed.head_dim) == (1, 97, 8)


def test_config_aliases_read_and_write(tmp_path: Path) -> None:
    made = hf.QKFlowConfig(num_hidden_layers=3, intermediate_size=96, head_dim=8, rms_norm_eps=1e-3)
    shape = made.model_config()
    assert (shape.n_layers, shape.hidden_dim, shape.head_dim, shape.norm_eps) == (3, 96, 8, 1e-3)
    config().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["hidden_size"], written["num_key_value_heads"], written["intermediate_size"]) == (
        64,
        4,
        256,
    )
    changed = AutoConfig.from_pretrained(tmp_path, n_layers=1, attention={"coupling": "euler"})
    assert (changed.num_hidden_layers, changed.model_config().attention.coupling) == (1, "euler")


def test_packed_documents_are_separate() -> None:
    model = causal(attention={"coupling": "euler"})
    first, second = prompt(1, 4), prompt(1, 7)[:, 4:]
    packed = model(
        input_ids=torch.cat((first, second), dim=1),
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
        use_cache=False,
    ).logits
    alone = torch.cat([model(input_ids=ids).logits for ids in (first, second)], dim=1)
    torch.testing.assert_close(packed, alone)


def test_packed_loss_matches_llama() -> None:
    ours = causal()
    llama = hf.to_llama(ours.model.decoder)
    rows = [{"input_ids": ids.tolist()} for ids in (prompt(1, 5)[0], prompt(1, 9)[0])]
    batch = DataCollatorWithFlattening()(rows)
    assert "position_ids" in batch
    losses = [model.train()(**batch, use_cache=False).loss for model in (ours, llama)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("embedding_norm", [False, True])
def test_inputs_embeds_match_input_ids(embedding_norm: bool) -> None:
    model = causal(embedding_norm=embedding_norm)
    embeddings = model.get_input_embeddings()(prompt())
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(input_ids=prompt()).logits)
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    written = model.generate(inputs_embeds=embeddings, **asked)
    assert torch.equal(written, model.generate(prompt(), **asked)[:, 7:])
