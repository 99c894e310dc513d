from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from families import BIDIRECTIONAL, FAMILIES, disturb, output, tiny, token_ids
from qkflow import hf
from qkflow.errors import InputError
from qkflow.models import Decoder, ModelConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_coupled_and_left_as_it_was(family: str) -> None:
    model, ids = tiny(family), token_ids()
    names, before = set(model.state_dict()), output(model, ids)

    hf.attach(model, "affine", seed=0)
    assert len(hf.named_coupled_layers(model)) == 2
    assert torch.equal(output(model, ids), before), "affine starts as the identity, bit for bit"
    disturb(model)
    after = output(model, ids)
    assert (after - before).abs().max() > 1e-5, "a coupling that has moved changes the output"
    if family not in BIDIRECTIONAL:
        changed = ids.clone()
        changed[:, -3:] = (changed[:, -3:] + 1) % 90 + 3
        assert torch.equal(output(model, changed)[:, :-3], after[:, :-3]), "no token sees the future"

    hf.detach(model)
    assert torch.equal(output(model, ids), before)
    assert set(model.state_dict()) == names

    hf.attach(model, "drift", step=0.7)
    drifting = output(model, ids)
    assert (drifting - before).abs().max() > 1e-5
    hf.merge(model)
    assert not hf.named_coupled_layers(model)
    assert type(model.get_submodule(hub_layer(family))).__module__.startswith("transformers.")
    torch.testing.assert_close(output(model, ids), drifting, rtol=1e-5, atol=1e-5)


def hub_layer(family: str) -> str:
    model = hf.attach(tiny(family), "none")
    return hf.named_coupled_layers(model)[0][0]


@pytest.mark.parametrize("coupling", ["euler:n=2", "leapfrog", "affine", "uncoupled", "drift"])
def test_the_coupling_sits_where_our_own_model_has_it(coupling: str) -> None:
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


def test_layers_and_options_are_chosen() -> None:
    model = hf.attach(tiny("llama"), "affine:hidden=4", layers=[-1], bias=True)
    ((name, layer),) = hf.named_coupled_layers(model)
    assert name == "model.layers.1.self_attn"
    assert layer.coupling_info.spec == "affine:hidden=4:bias=true"
    assert layer.coupling.from_query.w1.shape == (4, 4, 16)
    hf.attach(model, "drift", layers=[0])
    assert len(hf.named_coupled_layers(model)) == 2


def test_a_seed_repeats_a_start_and_layers_differ() -> None:
    first, second = (hf.attach(tiny("llama"), "euler", seed=5) for _ in range(2))
    weights = [layer.coupling.network.w1 for _, layer in hf.named_coupled_layers(first)]
    again = [layer.coupling.network.w1 for _, layer in hf.named_coupled_layers(second)]
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    assert not torch.equal(weights[0], weights[1])


def test_only_the_coupling_trains_when_the_base_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    model = hf.attach(tiny("gpt2"), "affine", freeze_base=True)
    trainable, added, total = hf.print_trainable_parameters(model)
    assert trainable == added == 2 * 2 * 4 * 8 * 3 * 16
    assert total == sum(p.numel() for p in model.parameters())
    assert f"trainable params: {added:,}" in capsys.readouterr().out
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if ".coupling." in name
    }


def test_prompts_that_peft_has_put_into_a_layer_train_on() -> None:
    from peft import AdaptionPromptConfig, get_peft_model

    prompted = AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)
    model = hf.attach(get_peft_model(tiny("llama"), prompted), "affine", freeze_base=True)
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert {"adaption_prompt", "adaption_gate"} <= trained


class Opaque(nn.Module):
    """A layer that keeps to itself how many outputs it has."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_what_cannot_be_coupled_is_refused_with_what_was_found() -> None:
    with pytest.raises(InputError, match=r"encoder_attn.*cross-attention.*get_encoder"):
        hf.attach(tiny_bart())
    hf.attach(tiny_bart().get_encoder())
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1)
    )
    with pytest.raises(InputError, match=r"no self-attention.*found in MambaForCausalLM.*q_proj/k_proj"):
        hf.attach(mamba)
    codegen = transformers.CodeGenForCausalLM(
        transformers.CodeGenConfig(
            vocab_size=96, n_embd=64, n_head=4, n_layer=1, rotary_dim=8, bos_token_id=1, eos_token_id=2
        )
    )
    with pytest.raises(InputError, match=r"qkv_proj.*CodeGenAttention.*not known"):
        hf.attach(codegen)
    opaque = tiny("llama")
    opaque.model.layers[0].self_attn.q_proj = Opaque(opaque.model.layers[0].self_attn.q_proj)
    with pytest.raises(InputError, match=r"q_proj' is a Opaque, whose number of outputs cannot be read"):
        hf.attach(opaque)
    gated = tiny("llama")
    gated.model.layers[0].self_attn.q_proj = nn.Linear(64, 128)
    with pytest.raises(InputError, match=r"q_proj gives 128 columns.*not supported"):
        hf.attach(gated)


def tiny_bart() -> transformers.BartModel:
    config = transformers.BartConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    return transformers.BartModel(config)


def test_bad_input_is_said_plainly() -> None:
    model = hf.attach(tiny("llama"), "affine")
    with pytest.raises(InputError, match=r"already has the coupling 'affine': detach"):
        hf.attach(model, "drift")
    with pytest.raises(InputError, match=r"'affine', which is not linear.*only 'drift' merges"):
        hf.merge(model)
    with pytest.raises(InputError, match=r"nothing to merge"):
        hf.merge(tiny("llama"))
    with pytest.raises(InputError, match=r"no attention layer 2: the model has 2"):
        hf.attach(tiny("llama"), layers=[2])
    for wrong in (0, "0", [0.5]):
        with pytest.raises(InputError, match=r"layers are whole numbers"):
            hf.attach(tiny("llama"), layers=wrong)
    with pytest.raises(InputError, match=r"layers is empty"):
        hf.attach(tiny("llama"), layers=[])
    with pytest.raises(InputError, match=r"unknown coupling 'afine': did you mean 'affine'"):
        hf.attach(tiny("llama"), "afine")
    with pytest.raises(InputError, match=r"unknown option of coupling 'drift'"):
        hf.attach(tiny("llama"), "drift", hidden=3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_without_weights_is_refused(family: str) -> None:
    model = tiny(family).to("meta")
    with pytest.raises(InputError, match=r"no weights yet \(it is on the meta device\)"):
        hf.attach(model)
    with pytest.raises(InputError, match=r"the model is on the meta device"):
        hf.reinitialize(model)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_coupled_fused_layer_is_known_again(family: str, tmp_path: Path) -> None:
    model = hf.attach(tiny(family), "euler", layers=[0], seed=0)
    hf.save_adapter(model, tmp_path)
    hf.attach(model, "drift", layers=[1])
    assert [layer.coupling_info.spec for _, layer in hf.named_coupled_layers(model)] == ["euler", "drift"]
    with pytest.raises(InputError, match=r"already has the coupling 'euler': detach"):
        hf.attach(model, "drift")
    hf.param_groups(model, 1e-3, ratio=5)
    hf.fuse_qkv(model)
    assert any("coupling" not in change.name for change in hf.reinitialize(model, "symmetric=1", seed=0))
    other = hf.attach(tiny(family), "drift", layers=[1])
    assert len(hf.named_coupled_layers(hf.load_adapter(other, tmp_path))) == 2


@pytest.mark.parametrize("layers", [None, [0]])
def test_shared_weights_are_not_merged(layers: list[int] | None) -> None:
    model = tiny("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight, second.k_proj.weight = first.q_proj.weight, first.k_proj.weight
    hf.attach(model, "drift", step=0.7, layers=layers)
    before = output(model, token_ids())
    with pytest.raises(InputError, match=r"layers.0.self_attn.q_proj' shares its weights"):
        hf.merge(model)
    assert torch.equal(output(model, token_ids()), before)


def test_a_layer_named_twice_is_coupled_once() -> None:
    model = hf.attach(tiny("llama"), layers=[0, -1, 1, -2])
    assert len(hf.named_coupled_layers(model)) == 2


@pytest.mark.parametrize("coupling", ["affine", "drift", "euler"])
def test_a_layer_may_change_in_place_what_it_projects(coupling: str) -> None:
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


class Helped(nn.Module):
    """Projects in a method of its own, and gives its projections more than tokens if told to."""

    head_dim, num_heads = 8, 2

    def __init__(self, *more: object) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.more = nn.Linear(16, 16), nn.Linear(16, 16), more

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x, *self.more) @ self.k_proj(x).transpose(1, 2)

    def forward(self, x: torch.Tensor, asks: bool = True) -> torch.Tensor:
        return self.scores(x) if asks else x


def test_projections_are_coupled_wherever_the_layer_asks_for_them() -> None:
    model, x = nn.Sequential(Helped()), torch.randn(1, 3, 16)
    before = model(x)
    hf.attach(model, "drift:step=3")
    after = model(x)
    assert not torch.allclose(after, before)
    hf.merge(model)
    torch.testing.assert_close(model(x), after, rtol=1e-4, atol=1e-4)


def test_a_layer_that_no_coupling_can_reach_says_so() -> None:
    model, x = hf.attach(nn.Sequential(Helped(2.0)), "drift"), torch.randn(1, 3, 16)
    with pytest.raises(InputError, match=r"gives its projections more than tokens"):
        model(x)
    with pytest.raises(InputError, match=r"never asked for its queries and keys"):
        model[0](x, asks=False)


def test_a_failed_attachment_changes_nothing() -> None:
    model = hf.attach(tiny("llama"), "drift", layers=[1])
    names = set(model.state_dict())
    with pytest.raises(InputError, match=r"layers.1.*already"):
        hf.attach(model, "affine")
    assert set(model.state_dict()) == names


def test_a_layer_that_takes_its_keys_from_elsewhere_is_noticed_when_it_runs() -> None:
    class Crossing(nn.Module):
        head_dim, num_heads = 8, 2

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
            if context is None:
                return self.q_proj(x)
            return self.q_proj(x) * self.k_proj(context)

    model = hf.attach(nn.Sequential(Crossing()), "drift")
    x = torch.randn(1, 3, 16)
    with pytest.raises(InputError, match=r"different tensors, as cross-attention does"):
        model[0](x, x.clone())
    with pytest.raises(InputError, match=r"without its own key"):
        model[0](x)


def test_a_forward_replaced_on_the_layer_is_refused() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].self_attn
    layer.forward = layer.forward
    with pytest.raises(InputError, match=r"forward of .* has been replaced"):
        hf.attach(model)
