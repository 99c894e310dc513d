from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from families import (
    BIDIRECTIONAL,
    FAMILIES,
    SEQ2SEQ,
    SMALL,
    disturb,
    output,
    seq2seq,
    seq2seq_inputs,
    tiny,
    token_ids,
)
from input_errors import raises_code
from qkflow import hf
from qkflow.models import Decoder, ModelConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_attach_detach_merge(family: str) -> None:
    model, ids = tiny(family), token_ids()
    names, before = set(model.state_dict()), output(model, ids)

    hf.attach(model, "affine", seed=0)
    assert len(hf.named_coupled_layers(model)) == 2
    assert torch.equal(output(model, ids), before), "affine is the identity at init, bit for bit"
    disturb(model)
    after = output(model, ids)
    assert (after - before).abs().max() > 1e-5, "a coupling that has moved changes the output"
    if family not in BIDIRECTIONAL:
        changed = ids.clone()
        changed[:, -3:] = (changed[:, -3:] + 1) % 90 + 3
        assert torch.equal(output(model, changed)[:, :-3], after[:, :-3]), "causal"

    hf.detach(model)
    assert torch.equal(output(model, ids), before)
    assert set(model.state_dict()) == names

    hf.attach(model, "drift", step=0.7)
    drifting = output(model, ids)
    assert (drifting - before).abs().max() > 1e-5
    hf.merge(model)
    assert not hf.named_coupled_layers(model)
    assert type(model.get_submodule(first_layer(family))).__module__.startswith("transformers.")
    torch.testing.assert_close(output(model, ids), drifting, rtol=1e-5, atol=1e-5)


def first_layer(family: str) -> str:
    model = hf.attach(tiny(family), "none")
    return hf.named_coupled_layers(model)[0][0]


@pytest.mark.parametrize("coupling", ["euler:n=2", "leapfrog", "affine", "uncoupled", "drift"])
def test_coupled_llama_matches_decoder(coupling: str) -> None:
    """A coupled Llama with grouped heads is our decoder with the same weights."""
    llama = tiny("llama")
    shape = hf.from_llama(llama).config.to_dict()
    shape["attention"]["coupling"] = coupling
    ours = Decoder(ModelConfig.from_dict(shape)).eval()
    ours.load_state_dict(hf.from_llama(llama).state_dict(), strict=False)
    hf.attach(llama, coupling)
    disturb(llama)
    for block, (_, layer) in zip(ours.blocks, hf.named_coupled_layers(llama), strict=True):
        block.attention.coupling.load_state_dict(layer.coupling.state_dict())
    ids = token_ids()
    with torch.no_grad():
        torch.testing.assert_close(output(llama, ids), ours.logits(ours(ids)), rtol=1e-5, atol=1e-5)


def test_layers_and_options() -> None:
    model = hf.attach(tiny("llama"), "affine:hidden=4", layers=[-1], bias=True)
    ((name, layer),) = hf.named_coupled_layers(model)
    assert name == "model.layers.1.self_attn"
    assert layer.coupling_info.spec == "affine:hidden_dim=4:bias=true"
    assert layer.coupling.from_query.w1.shape == (4, 4, 16)
    hf.attach(model, "drift", layers=[0])
    assert len(hf.named_coupled_layers(model)) == 2


def test_seed_reproduces_init() -> None:
    first, second = (hf.attach(tiny("llama"), "euler", seed=5) for _ in range(2))
    weights = [layer.coupling.network.w1 for _, layer in hf.named_coupled_layers(first)]
    again = [layer.coupling.network.w1 for _, layer in hf.named_coupled_layers(second)]
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    assert not torch.equal(weights[0], weights[1])


def test_freeze_base_trains_coupling_only(capsys: pytest.CaptureFixture[str]) -> None:
    model = hf.attach(tiny("gpt2"), "affine", freeze_base=True)
    trainable, added, total = hf.print_trainable_parameters(model)
    assert trainable == added == 2 * 2 * 4 * 8 * 3 * 16
    assert total == sum(p.numel() for p in model.parameters())
    assert f"trainable params: {added:,}" in capsys.readouterr().out
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if ".coupling." in name
    }


def test_adaption_prompts_stay_trainable() -> None:
    from peft import AdaptionPromptConfig, get_peft_model

    prompted = AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)
    model = hf.attach(get_peft_model(tiny("llama"), prompted), "affine", freeze_base=True)
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert {"adaption_prompt", "adaption_gate"} <= trained


class Opaque(nn.Module):
    """A projection without `out_features`."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_unsupported_models_are_refused() -> None:
    with raises_code("cross-attention"):
        hf.attach(tiny_bart())
    hf.attach(tiny_bart().get_encoder())
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1)
    )
    with raises_code("no-attention-layers"):
        hf.attach(mamba)
    codegen = transformers.CodeGenForCausalLM(
        transformers.CodeGenConfig(
            vocab_size=96, n_embd=64, n_head=4, n_layer=1, rotary_dim=8, bos_token_id=1, eos_token_id=2
        )
    )
    with raises_code("unknown-qkv-layout"):
        hf.attach(codegen)
    opaque = tiny("llama")
    opaque.model.layers[0].self_attn.q_proj = Opaque(opaque.model.layers[0].self_attn.q_proj)
    with raises_code("unsupported-projection"):
        hf.attach(opaque)
    gated = tiny("llama")
    gated.model.layers[0].self_attn.q_proj = nn.Linear(64, 128)
    with raises_code("unsupported-attention"):
        hf.attach(gated)


def tiny_bart() -> transformers.BartModel:
    return seq2seq("bart").model


def test_bad_input_is_refused() -> None:
    model = hf.attach(tiny("llama"), "affine")
    with raises_code("already-coupled"):
        hf.attach(model, "drift")
    with raises_code("merge-not-linear"):
        hf.merge(model)
    with raises_code("no-coupling"):
        hf.merge(tiny("llama"))
    with raises_code("unknown-layer"):
        hf.attach(tiny("llama"), layers=[2])
    for layers, code in ((0, "invalid-layers"), ([0.5], "invalid-layers"), ("0", "unknown-layer")):
        with raises_code(code):
            hf.attach(tiny("llama"), layers=layers)
    with raises_code("no-layers"):
        hf.attach(tiny("llama"), layers=[])
    with raises_code("unknown-coupling"):
        hf.attach(tiny("llama"), "afine")
    with raises_code("unknown-option"):
        hf.attach(tiny("llama"), "drift", hidden=3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_meta_model_is_refused(family: str) -> None:
    model = tiny(family).to("meta")
    with raises_code("no-weights"):
        hf.attach(model)
    with raises_code("no-weights"):
        hf.reinitialize(model)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_coupled_fused_layer_keeps_its_layout(family: str, tmp_path: Path) -> None:
    model = hf.attach(tiny(family), "euler", layers=[0], seed=0)
    hf.save_adapter(model, tmp_path)
    hf.attach(model, "drift", layers=[1])
    assert [layer.coupling_info.spec for _, layer in hf.named_coupled_layers(model)] == ["euler", "drift"]
    with raises_code("already-coupled"):
        hf.attach(model, "drift")
    hf.param_groups(model, 1e-3, ratio=5)
    hf.fuse_qkv(model)
    assert any("coupling" not in change.name for change in hf.reinitialize(model, "symmetric=1", seed=0))
    other = hf.attach(tiny(family), "drift", layers=[1])
    assert len(hf.named_coupled_layers(hf.load_adapter(other, tmp_path))) == 2


@pytest.mark.parametrize("layers", [None, [0]])
def test_merge_refuses_shared_weights(layers: list[int] | None) -> None:
    model = tiny("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight, second.k_proj.weight = first.q_proj.weight, first.k_proj.weight
    hf.attach(model, "drift", step=0.7, layers=layers)
    before = output(model, token_ids())
    with raises_code("shared-weights"):
        hf.merge(model)
    assert torch.equal(output(model, token_ids()), before)


def test_duplicate_layers_are_coupled_once() -> None:
    model = hf.attach(tiny("llama"), layers=[0, -1, 1, -2])
    assert len(hf.named_coupled_layers(model)) == 2


@pytest.mark.parametrize("coupling", ["affine", "drift", "euler"])
def test_in_place_clipping_of_projections(coupling: str) -> None:
    torch.manual_seed(0)
    config = transformers.OlmoConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        clip_qkv=0.05,
    )
    model = hf.attach(transformers.OlmoForCausalLM(config), coupling, seed=0)
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


class ProjectsInMethod(nn.Module):
    """Projects in a separate method, optionally with extra arguments."""

    head_dim, num_heads = 8, 2

    def __init__(self, *more: object) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.more = nn.Linear(16, 16), nn.Linear(16, 16), more

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x, *self.more) @ self.k_proj(x).transpose(1, 2)

    def forward(self, x: torch.Tensor, project: bool = True) -> torch.Tensor:
        return self.scores(x) if project else x


def test_projections_called_from_a_method() -> None:
    model, x = nn.Sequential(ProjectsInMethod()), torch.randn(1, 3, 16)
    before = model(x)
    hf.attach(model, "drift:step=3")
    after = model(x)
    assert not torch.allclose(after, before)
    hf.merge(model)
    torch.testing.assert_close(model(x), after, rtol=1e-4, atol=1e-4)


def test_uncoupled_projection_calls_are_refused() -> None:
    model, x = hf.attach(nn.Sequential(ProjectsInMethod(2.0)), "drift"), torch.randn(1, 3, 16)
    with raises_code("unsupported-projection-call"):
        model(x)
    with raises_code("projections-not-called"):
        model[0](x, project=False)


def test_failed_attach_changes_nothing() -> None:
    model = hf.attach(tiny("llama"), "drift", layers=[1])
    names = set(model.state_dict())
    with raises_code("already-coupled"):
        hf.attach(model, "affine")
    assert set(model.state_dict()) == names


def test_keys_from_another_tensor_are_refused() -> None:
    class KeysFromContext(nn.Module):
        head_dim, num_heads = 8, 2

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
            if context is None:
                return self.q_proj(x)
            return self.q_proj(x) * self.k_proj(context)

    model = hf.attach(nn.Sequential(KeysFromContext()), "drift")
    x = torch.randn(1, 3, 16)
    with raises_code("cross-attention"):
        model[0](x, x.clone())
    with raises_code("projections-not-called"):
        model[0](x)


def test_replaced_forward_is_refused() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].self_attn
    layer.forward = layer.forward
    with raises_code("forward-replaced"):
        hf.attach(model)


SELF_ATTENTION = {
    "t5": ("decoder.*.SelfAttention", "decoder.*.EncDecAttention"),
    "bart": ("model.decoder.*.self_attn", "model.decoder.*.encoder_attn"),
    "whisper": ("model.decoder.*.self_attn", "model.decoder.*.encoder_attn"),
}


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_decoder_self_attention_is_selected_by_name(family: str) -> None:
    self_attention, cross_attention = SELF_ATTENTION[family]
    model, inputs = seq2seq(family), seq2seq_inputs(family)
    options: dict[str, Any] = {**inputs, "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    options["decoder_input_ids"] = token_ids(2, 4)  # distinct tokens: of equal ones, attention has no effect
    before = model.generate(**options)
    for layers in (None, cross_attention):
        with raises_code("cross-attention"):
            hf.attach(model, "affine", layers=layers)
    hf.attach(model, "affine", layers=self_attention, seed=0)
    names = [name for name, _ in hf.named_coupled_layers(model)]
    assert len(names) == 2
    assert all("decoder" in name for name in names)
    attached = model.generate(**options)
    assert torch.equal(torch.stack(attached.logits), torch.stack(before.logits)), "identity at init"
    disturb(model, 0.5)
    cached, uncached = model.generate(**options), model.generate(**options, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), rtol=1e-4, atol=1e-4)
    assert (torch.stack(cached.logits) - torch.stack(before.logits)).abs().max() > 1e-5
    hf.detach(model)
    assert torch.equal(torch.stack(model.generate(**options).logits), torch.stack(before.logits))


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_encoder_and_decoder_are_trained_and_merged(family: str) -> None:
    model = hf.attach(seq2seq(family), "drift", layers=range(4), step=0.7)
    labels, inputs = token_ids(2, 5), seq2seq_inputs(family)
    out = model(**inputs, labels=labels)
    out.loss.backward()
    coupled = hf.named_coupled_layers(model)
    assert len(coupled) == 4
    assert all(p.grad is not None for _, layer in coupled for p in layer.coupling.parameters())
    hf.merge(model)
    torch.testing.assert_close(model(**inputs, labels=labels).logits, out.logits, rtol=1e-4, atol=1e-4)


def test_layer_patterns() -> None:
    model = hf.attach(tiny("llama"), "drift", layers=["*.layers.1.*", 0, "model.layers.1.self_attn"])
    assert len(hf.named_coupled_layers(model)) == 2
    with raises_code("unknown-layer"):
        hf.attach(tiny("llama"), layers="decoder.*")


@pytest.mark.parametrize("shared", [False, True])
def test_deberta_with_shared_projections_is_refused(shared: bool) -> None:
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": shared}
    config = transformers.DebertaV2Config(**{**SMALL, "eos_token_id": 2}, **options)
    model = transformers.DebertaV2ForMaskedLM(config)
    if shared:
        with raises_code("shared-key-projection"):
            hf.attach(model)
        assert not hf.named_coupled_layers(model)
    else:
        hf.attach(model, "drift")(input_ids=token_ids(), labels=token_ids()).loss.backward()
