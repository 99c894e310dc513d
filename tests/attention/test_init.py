"""Inits: bases, modifiers, mixed inits, and their text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from input_errors import raises_code
from qkflow.attention import Attention, InitScheme
from qkflow.attention.init import BASE_INITS, INIT_MODIFIERS, ParamSampler
from qkflow.models import Decoder, preset
from qkflow.models.presets import PRESETS


def small_model(init: str, **options: Any) -> Decoder:
    config = {"vocab_size": 16, "n_layers": 2, "dim": 32, "n_heads": 2, "init": init, **options}
    return Decoder(preset("tiny", **config), seed=3, dtype=torch.float64)


def matrices(model: Decoder) -> dict[str, Tensor]:
    block = model.blocks[1]
    attention, feed_forward = block.attention, block.feed_forward
    return {
        "embed": model.embedding.weight,
        "q": attention.qk.q.weight,
        "k": attention.qk.k.weight,
        "v": attention.ov.v.weight,
        "o": attention.ov.o.weight,
        "up": feed_forward.up.weight,
        "down": feed_forward.down.weight,
    }


# one entry of embedding, W_Q, W_K, W_V, W_O, up and down, recorded before bases and parts were added
GPT2_REST = (0.00533373415457, 0.000619650980273, 0.0343462633505, 0.0106808889093)
FAN_IN_REST = (0.0330007964102, 0.00766778967709, 0.212506662581, 0.0660846285476)
RECORDED = {
    "gpt2": (0.00555799326875, -0.000922729451911, -0.027954610327, *GPT2_REST),
    "fan_in": (0.0343883288885, -0.00570909721066, -0.172960327117, *FAN_IN_REST),
    "gpt2+symmetric=10": (0.00555799326875, -0.280468832722, -0.027954610327, *GPT2_REST),
    "symmetric=1": (0.0343883288885, -0.178669424327, -0.172960327117, *FAN_IN_REST),
    "scaled_identity=0.001": (0.00555799326875, 0.001, 0.001, 0.001, 0.001, *GPT2_REST[2:]),
}


@pytest.mark.parametrize("init", RECORDED)
def test_streams_keep_their_numbers(init: str) -> None:
    entries = [weight[1, 1].item() for weight in matrices(small_model(init)).values()]
    assert entries == pytest.approx(RECORDED[init], rel=1e-10)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("modern", "modern"),
        ("tied_qk", "fan_in+tied_qk"),
        ("modern + zero_q", "modern+zero_q"),
        ("random_partner", "fan_in+random_partner=1"),
        ("symmetric=-1", "fan_in+symmetric=-1"),
        ("symmetric=1e+20", "fan_in+symmetric=1e20"),
        ("gpt2+symmetric=0.123456789", "gpt2+symmetric=0.123456789"),
        ("gpt2+symmetric_score=2.50", "gpt2+symmetric_score=2.5"),
        ("mimetic=0.5", "gpt2+mimetic=0.5"),
        (
            "fan_in{ embed=gpt2, mlp=.5, qk=gpt2, out=zero, ov=modern } + symmetric=1",
            "fan_in{qk=gpt2,ov=modern,out=zero,mlp=0.5,embed=gpt2}+symmetric=1",
        ),
        ("gpt2{}", "gpt2"),
        ("gpt2{qk=gpt2}+tied_qk", "gpt2+tied_qk"),
        ("fan_in{qk=0.7,out=.70}", "fan_in"),
        ("modern{qk=0.6,out=zero}", "modern"),
        ("modern{out=modern,embed=modern}", "modern"),
        ("fan_in{out=modern}", "fan_in{out=zero}"),
        ("fan_in{out=0}", "fan_in{out=zero}"),
        ("gpt2{mlp=0.7}", "gpt2{mlp=fan_in}"),
        ("modern{embed=0.6,head=0.6}", "modern"),
        ("modern{head=gpt2,embed=gpt2}", "modern{embed=gpt2}"),
        ("modern{head=modern,embed=gpt2}", "modern{embed=gpt2,head=modern}"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    scheme = InitScheme.parse(text)
    assert str(scheme) == canonical
    assert InitScheme.parse(canonical) == scheme
    assert hash(InitScheme.parse(canonical)) == hash(scheme)


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("modren", "unknown-init", "'modern'"),
        ("tied-qk", "unknown-init", "'tied_qk'"),
        ("modern+zero_k", "unknown-init", "'modern+zero_q'"),
        ("fan{qk=gpt2}", "unknown-init", "fan_in"),
        ("fan_in{qk=gpt2", "unknown-init", "fan_in"),
        ("fan_in+tied_qk+zero_q", "unknown-init", "tied_qk"),
        ("tied_qk=2", "bad-init-strength", "number"),
        ("fan_in{qkk=gpt2}", "unknown-init-part", "'qk'"),
        ("fan_in{qk=gtp2}", "unknown-init-value", "'gpt2'"),
        ("fan_in{qk}", "unknown-init-value", "gpt2"),
        ("fan_in{mlp=-1}", "bad-init-value", "-1"),
        ("fan_in{mlp=1x}", "bad-init-value", "1x"),
        ("fan_in{mlp=1,mlp=2}", "duplicate-init-part", "mlp"),
        ("fan_in{qk=zero}", "init-without-gradient", "zero_q"),
        ("fan_in{mlp=0}", "init-without-gradient", "out=zero"),
        ("fan_in{embed=zero}", "init-without-gradient", "embedding"),
        ("fan_in{ov=zero,out=zero}", "init-without-gradient", "W_V"),
        ("modern{ov=zero}", "init-without-gradient", "W_V"),
        ("fan_in{qk=gpt2}+mimetic", "init-part-unused", "qk="),
    ],
)
def test_bad_text(text: str, code: str, hint: str) -> None:
    with raises_code(code) as caught:
        InitScheme.parse(text)
    assert hint in str(caught.value)


def test_config_refuses_an_unknown_init() -> None:
    with raises_code("unknown-init"):
        preset("tiny", init="modren")


@pytest.mark.parametrize("feed_forward", ["gelu", "swiglu"])
def test_modern_std(feed_forward: str) -> None:
    model = Decoder(preset("tiny", n_layers=1, feed_forward=feed_forward, init="modern"), seed=0)
    block = model.blocks[0]
    ff = block.feed_forward
    drawn = [block.attention.qk.q, block.attention.qk.k, block.attention.ov.v, ff.up, model.embedding]
    drawn += [ff.gate] if feed_forward == "swiglu" else []
    for layer in drawn:
        assert layer.weight.std().item() == pytest.approx(0.6 / 128**0.5, rel=0.05)
    assert not block.attention.ov.o.weight.any()
    assert not ff.down.weight.any()
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids), model.norm(model.embedding(ids)))  # blocks are the identity


@pytest.mark.parametrize(
    ("init", "embedding_std", "head_std"),
    [("modern", 0.6, 0.6), ("modern{embed=2}", 2.0, 2.0), ("modern{embed=2,head=zero}", 2.0, 0.0)],
)
def test_untied_head(init: str, embedding_std: float, head_std: float) -> None:
    model = Decoder(preset("tiny", n_layers=1, init=init, tie_embeddings=False), seed=0)
    assert model.embedding.weight.std().item() == pytest.approx(embedding_std / 128**0.5, rel=0.02)
    assert model.output_weight.std().item() == pytest.approx(head_std / 128**0.5, rel=0.02)


@pytest.mark.parametrize("coupling", ["euler", "leapfrog:n=3"])
def test_coupling_networks_are_not_residual_outputs(coupling: str) -> None:
    layer = Attention(32, 4, coupling=coupling, init="modern{qk=gpt2}", seed=0)
    other = Attention(32, 4, coupling=coupling, init="fan_in", seed=0)
    found = 0
    for ours, theirs in zip(layer.coupling.parameters(), other.coupling.parameters(), strict=True):
        if ours.dim() > 2:
            found += 1
            torch.testing.assert_close(ours, theirs * (0.6 / 0.7))
    assert found


def test_bases_share_streams() -> None:
    modern, fan_in = matrices(small_model("modern")), matrices(small_model("fan_in"))
    for name in ("embed", "q", "k", "v", "up"):
        torch.testing.assert_close(modern[name], fan_in[name] * (0.6 / 0.7))


def test_mixed_init_takes_each_part_from_its_value() -> None:
    mixed = matrices(small_model("fan_in{qk=gpt2,ov=modern,out=zero,mlp=0.5,embed=gpt2}+symmetric=2"))
    bases = {base: matrices(small_model(base)) for base in BASE_INITS}
    torch.testing.assert_close(mixed["q"], bases["gpt2"]["q"] + 2 * bases["gpt2"]["k"])
    assert torch.equal(mixed["k"], bases["gpt2"]["k"])
    assert torch.equal(mixed["v"], bases["modern"]["v"])
    assert not mixed["o"].any()
    assert not mixed["down"].any()
    torch.testing.assert_close(mixed["up"], bases["fan_in"]["up"] * (0.5 / 0.7))
    assert torch.equal(mixed["embed"], bases["gpt2"]["embed"])


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_query_modifiers(n_kv_heads: int) -> None:
    def weights(init: str) -> tuple[Tensor, Tensor]:
        layer = Attention(32, 4, n_kv_heads=n_kv_heads, init=init, seed=0, dtype=torch.float64)
        return layer.qk.q.weight.detach(), layer.qk.repeat_key_rows(layer.qk.k.weight).detach()

    q, k = weights("fan_in")
    for init, expected in {
        "tied_qk": k,
        "zero_q": torch.zeros_like(q),
        "symmetric=-1": q - k,
        "symmetric=0": q,
        "random_partner=0": q,
    }.items():
        changed, key = weights(init)
        torch.testing.assert_close(changed, expected, msg=init)
        assert torch.equal(key, k)
    added = weights("random_partner=-3")[0] - q
    per_head = (4, -1)
    torch.testing.assert_close(added.view(per_head).norm(dim=1), 3 * k.view(per_head).norm(dim=1))
    overlap = torch.cosine_similarity(added.flatten(), k.flatten(), dim=0)
    assert abs(overlap.item()) < 0.15  # 0 in expectation, ±1/√(entries)


@pytest.mark.parametrize(
    ("name", "base", "score_of_one"),
    [("tiny", "gpt2", 0.29), ("60m", "gpt2", 1.64), ("tiny", "fan_in", 2.77)],
)
def test_symmetric_score_of_presets(name: str, base: str, score_of_one: float) -> None:
    """`symmetric=1` at this width has this score, so `symmetric_score` of it is `symmetric=1`."""
    size = PRESETS[name]
    dim, head_dim = size.dim, size.dim // size.n_heads
    per_c = head_dim**0.5 * ParamSampler(InitScheme(base), 0, 1).std(dim, "qk") ** 2 * dim
    assert per_c == pytest.approx(score_of_one, abs=0.005)
    options: dict[str, Any] = {"seed": 0, "dtype": torch.float64}
    by_c = Attention(dim, size.n_heads, init=f"{base}+symmetric=1", **options)
    by_score = Attention(dim, size.n_heads, init=f"{base}+symmetric_score={per_c!r}", **options)
    torch.testing.assert_close(by_score.qk.q.weight, by_c.qk.q.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("init", ["gpt2", "fan_in", "modern{qk=0.3}"])
@pytest.mark.parametrize("dim", [64, 256])
def test_symmetric_score_is_the_expected_score_with_itself(init: str, dim: int) -> None:
    x = torch.randn(1, 64, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x /= x.square().mean(-1, keepdim=True).sqrt()
    added = []
    for seed in range(16):
        score = []
        for text in (init, f"{init}+symmetric_score=1.5"):
            layer = Attention(dim, 4, n_kv_heads=2, init=text, seed=seed, dtype=torch.float64)
            q, k, _ = layer.project_qkv(x)
            score.append((q * k.repeat_interleave(2, dim=2)).sum(-1).mean().item() * layer.scale)
        added.append(score[1] - score[0])
    assert sum(added) / 16 == pytest.approx(1.5, rel=0.03)


def test_collapsed_circuits() -> None:
    for circuit in ("CAFO", "CACO"):
        for modifier in INIT_MODIFIERS.keys() - {"scaled_identity"}:
            with raises_code("init-needs-factorized"):
                Attention(16, 2, circuit=circuit, rope=False, init=modifier)
    for init in ("mimetic", "gpt2{ov=fan_in}"):
        with raises_code("init-needs-factorized"):
            Attention(16, 2, circuit="FACO", init=init)
    tied = Attention(16, 2, circuit="FACO", init="tied_qk", seed=0)
    assert torch.equal(tied.qk.q.weight, tied.qk.k.weight)
    mixed = Attention(64, 2, circuit="CACO", rope=False, init="gpt2{qk=fan_in,out=modern}", seed=0)
    assert mixed.qk.weight.std().item() == pytest.approx(0.7 / 8, rel=0.05)
    assert not mixed.ov.weight.any()


@pytest.mark.parametrize(
    ("init", "options"),
    [
        ("modern", {}),
        ("modern", {"tie_embeddings": False}),
        ("modern{head=zero}", {"tie_embeddings": False}),
        ("modern", {"attention": {"rope": False}, "feed_forward": "swiglu"}),
        ("modern+zero_q", {"attention": {"coupling": "euler"}}),
        ("modern", {"slow": {"ratio": 4, "gate_init": 0.1}}),
        ("fan_in{ov=zero}", {"attention": {"scoring": "differential_v2"}}),
        ("modern+tied_qk", {"attention": {"circuit": "FACO"}}),
    ],
)
def test_every_parameter_trains(init: str, options: dict[str, Any]) -> None:
    """With zero outputs, gradients reach all parameters after a few steps."""
    model = small_model(init, **options)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(16, (4, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        loss = model.loss(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
        assert parameter.grad is not None
        assert parameter.grad.any(), name
