from __future__ import annotations

import pytest
import torch

from families import FAMILIES, FUSED, output, tiny, token_ids
from qkflow import hub
from qkflow.anatomy import outputs_first, self_attentions
from qkflow.attention.circuits import FactorisedOV, FactorisedQK
from qkflow.attention.starts import Draw, Start
from qkflow.errors import InputError
from qkflow.pace.groups import roles_of


def projection(site: object, part: str) -> torch.Tensor:
    weight = outputs_first(site.module.get_submodule(getattr(site, part)))
    return weight[site.rows(part)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", ["gpt2", "symmetric=1"])
def test_every_family_starts_again(family: str, start: str) -> None:
    model, again = tiny(family), tiny(family)
    changes = hub.restart(model, start, seed=3)
    hub.restart(again, start, seed=3)
    roles = roles_of(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    assert matrices <= {change.name for change in changes}, "every matrix was started again"
    assert not any(roles[change.name] in ("norm", "qk_norm") for change in changes)
    assert torch.isfinite(output(model, token_ids())).all()
    for site in self_attentions(model):
        qk = FactorisedQK(64, site.heads, bias=False)
        with torch.no_grad():
            qk.start_parameters(Draw(Start.parse(start), 3, 2, site.name))
        assert torch.equal(projection(site, "q"), qk.q.weight)
        assert torch.equal(projection(site, "k"), qk.k.weight)


def test_standard_deviations_are_those_of_the_start() -> None:
    model = tiny("llama", hidden_size=128, intermediate_size=256, tie_word_embeddings=True)
    after = {change.name: change.after for change in hub.restart(model, "gpt2", seed=0)}
    for name, expected in {
        "model.embed_tokens.weight": 0.02,
        "model.layers.0.self_attn.q_proj.weight": 0.02,
        "model.layers.0.mlp.up_proj.weight": 0.02,
        "model.layers.0.mlp.down_proj.weight": 0.02 / 4**0.5,
        "model.layers.1.self_attn.o_proj.weight": 0.02 / 4**0.5,
    }.items():
        assert after[name] == pytest.approx(expected, rel=0.05), name
    after = {change.name: change.after for change in hub.restart(model, "fan_in", seed=0)}
    for name, fan_in in {
        "model.embed_tokens.weight": 128,
        "model.layers.0.self_attn.q_proj.weight": 128,
        "model.layers.0.mlp.down_proj.weight": 256,
    }.items():
        assert after[name] == pytest.approx(0.7 / fan_in**0.5, rel=0.05), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_mimetic_start_writes_both_circuits(family: str) -> None:
    model = tiny(family)
    hub.restart(model, "mimetic", seed=1)
    site = self_attentions(model)[0]
    ov = FactorisedOV(64, site.heads, bias=False)
    with torch.no_grad():
        ov.start_parameters(Draw(Start.parse("mimetic"), 1, 2, site.name))
    assert torch.equal(projection(site, "v"), ov.v.weight)
    output_layer = {"llama": "o_proj", "gpt2": "c_proj"}.get(family)
    layer = (
        model.get_submodule("bert.encoder.layer.0.attention.output.dense")
        if output_layer is None
        else site.module.get_submodule(output_layer)
    )
    assert torch.equal(outputs_first(layer), ov.o.weight)


def test_a_symmetric_start_is_a_merged_drift() -> None:
    family = FUSED[0]
    symmetric, drifting = tiny(family), tiny(family)
    hub.restart(symmetric, "fan_in+symmetric=0.5", seed=2)
    hub.restart(drifting, "fan_in", seed=2)
    hub.merge(hub.attach(drifting, "drift", step=0.5))
    torch.testing.assert_close(output(symmetric, token_ids()), output(drifting, token_ids()))


def test_a_padding_embedding_stays_zero() -> None:
    model = tiny("llama")
    hub.restart(model, "gpt2", seed=0)
    assert not model.model.embed_tokens.weight[0].any()


def test_unknown_starts_are_refused() -> None:
    with pytest.raises(InputError, match=r"unknown start 'gtp2'"):
        hub.restart(tiny("llama"), "gtp2")
