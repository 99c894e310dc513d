"""`SlowPath` in a decoder: its equations, causality, closed gate, gradients, roles and config checks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from input_errors import raises_code
from qkflow.attention import couplings, scorings
from qkflow.models import Decoder, ModelConfig
from qkflow.models.slow_path import path
from qkflow.models.slow_path.pooling import UniformBlockPooling
from qkflow.roles import freeze_roles, parameter_roles

RATIOS = (2, 3, 4, 8)
BASE: dict[str, Any] = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 2, "init": "fan_in"}


def decoder(
    dtype: torch.dtype = torch.float64, attention: dict[str, Any] | None = None, seed: int = 0, **slow: Any
) -> Any:
    config = {**BASE, "attention": attention or {}, "slow": slow or None}
    return Decoder(ModelConfig.from_dict(config), seed=seed, dtype=dtype).eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(BASE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def reference(model: Any, ids: Tensor) -> Tensor:
    """Evaluate the equations of the module docstring token by token."""
    P, x = model.slow.ratio, model.embedding(ids)
    for layer, block in enumerate(model.blocks):
        if layer == model.slow.pool_after:
            slow_output = reference_slow_output(model, x, P)
        if str(layer) in model.slow.gates:
            x = x + model.slow.gates[str(layer)].value * slow_output
        x = x + block.attention.reference(block.attention_norm(x))[0]
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.norm(x)


def reference_slow_output(model: Any, x: Tensor, P: int) -> Tensor:
    """Return ũ (B, T, C) of the residual stream x."""
    y = torch.stack([x[:, k * P : (k + 1) * P].mean(1) for k in range(x.shape[1] // P)], 1)
    for block in model.slow.blocks:
        y = y + block.attention.reference(block.attention_norm(y))[0]
        y = y + block.feed_forward(block.feed_forward_norm(y))
    phi = model.slow.phi
    u = phi.down(torch.nn.functional.silu(phi.up(phi.norm(y))))
    slow_output = torch.zeros_like(x)
    for t in range(P - 1, x.shape[1]):
        slow_output[:, t] = u[:, (t + 1) // P - 1]
    return slow_output


@pytest.mark.parametrize("inject", ["once", "each", [1]])
@pytest.mark.parametrize("gate", ["scalar", "vector", "tanh"])
def test_forward_matches_reference(gate: str, inject: str | list[int]) -> None:
    model = decoder(ratio=4, n_layers=2, gate=gate, gate_init=0.6, inject=inject, hidden_dim=24)
    ids = tokens(2, 19)
    assert len(model.slow.gates) == (2 if inject == "each" else 1)
    torch.testing.assert_close(model(ids), reference(model, ids))
    assert not torch.allclose(model(ids), decoder()(ids))


@pytest.mark.parametrize("inject", ["once", "each"])
def test_pooling_after_the_first_layer_matches_reference(inject: str) -> None:
    model = decoder(ratio=4, n_layers=1, gate_init=0.6, pool_after=1, inject=inject)
    ids = tokens(2, 19)
    assert list(model.slow.gates) == ["1"]
    torch.testing.assert_close(model(ids), reference(model, ids))
    embeddings = decoder(ratio=4, n_layers=1, gate_init=0.6, inject=[1])
    assert not torch.allclose(model(ids), embeddings(ids)), "pooled the embeddings"


@pytest.mark.parametrize(
    "attention",
    [{"coupling": name} for name in couplings.names()] + [{"scoring": name} for name in scorings.names()],
    ids=lambda attention: next(iter(attention.values())),
)
def test_forward_with_every_coupling_and_scoring(attention: dict[str, str]) -> None:
    model = decoder(attention=attention, ratio=3, n_layers=1, gate_init=0.6)
    ids = tokens(2, 11)
    torch.testing.assert_close(model(ids), reference(model, ids))
    fast, slow = model.blocks[0].attention, model.slow.blocks[0].attention
    assert type(fast.coupling) is type(slow.coupling)
    assert type(fast.scoring) is type(slow.scoring)


def test_slow_attention_options_override_fast_ones() -> None:
    model = decoder(attention={"window": 3, "dropout": 0.1}, ratio=2, n_layers=1)
    slow = model.slow.blocks[0].attention
    assert (slow.window, slow.dropout) == (None, 0.0), "window and dropout are not inherited"
    config = {**BASE, "slow": {"attention": {"coupling": "euler:n=2", "window": 5}}}
    model = Decoder(ModelConfig.from_dict(config))
    assert model.slow.blocks[0].attention.coupling_spec.name == "euler"
    assert model.slow.blocks[0].attention.window == 5
    assert model.blocks[0].attention.coupling_spec.name == "none"


# --- causality, with an open gate: at g = 0 every leak would pass ---


@lru_cache
def open_gate_decoder(P: int, inject: str = "once", pool_after: int = 0) -> Any:
    return decoder(ratio=P, n_layers=2, gate_init=1.5, inject=inject, pool_after=pool_after)


@st.composite
def packed(draw: st.DrawFn) -> tuple[int, int, Tensor | None]:
    """B, T and document ids (B, T) with random boundaries per row, or None."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 37))
    if draw(st.booleans()):
        return B, T, None
    cuts = [draw(st.sets(st.integers(1, T), max_size=4)) for _ in range(B)]
    return B, T, torch.tensor([[sum(cut <= t for cut in row) for t in range(T)] for row in cuts])


def document_span(documents: Tensor | None, b: int, t: int, T: int) -> tuple[int, int]:
    """Half-open token range of the document of token t in row b."""
    if documents is None:
        return 0, T
    same = (documents[b] == documents[b, t]).nonzero()
    return int(same.min()), int(same.max()) + 1


@given(packed(), st.sampled_from(RATIOS), st.sampled_from(["once", "each"]), st.data())
@settings(max_examples=120, deadline=None)
def test_perturbation_reaches_only_later_tokens_of_the_document(
    batch: tuple[int, int, Tensor | None], P: int, inject: str, data: st.DataObject
) -> None:
    B, T, documents = batch
    b, t = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, T - 1))
    model, ids = open_gate_decoder(P, inject), tokens(B, T)
    changed = ids.clone()
    changed[b, t] = (ids[b, t] + 1) % BASE["vocab_size"]
    before, after = (model.embedding(each) for each in (ids, changed))
    first, end = document_span(documents, b, t, T)

    reached = model.slow(before, document_ids=documents) != model.slow(after, document_ids=documents)
    expected = torch.zeros(B, T, dtype=torch.bool)
    expected[b, first + ((t - first) // P + 1) * P - 1 : end] = True  # from the end of its block on
    assert torch.equal(reached.any(-1), expected)

    differs = (model(ids, document_ids=documents) != model(changed, document_ids=documents)).any(-1)
    expected[b, t:end] = True
    assert torch.equal(differs, expected)


@pytest.mark.parametrize("t", [0, 3, 4, 9, 18])
def test_perturbation_with_pooling_after_a_layer(t: int) -> None:
    model, ids = open_gate_decoder(4, "each", pool_after=1), tokens(1, 19)
    changed = ids.clone()
    changed[0, t] = (ids[0, t] + 1) % BASE["vocab_size"]
    assert torch.equal((model(ids) != model(changed)).any(-1)[0], torch.arange(19) >= t)


def test_a_leak_shows_only_with_an_open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(UniformBlockPooling):
        def upsample(self, u: Tensor) -> Tensor:  # the current block instead of the last completed one
            return u.repeat_interleave(self.ratio, 1)[:, : self.seq_len]

    monkeypatch.setattr(path, "build_block_pooling", lambda T, P, documents: Leaky(T, P))
    ids = tokens(1, 12)
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % BASE["vocab_size"]
    for gate_init, leaks in ((1.5, True), (0.0, False)):
        model = decoder(ratio=4, n_layers=1, gate_init=gate_init)
        assert bool((model(ids) != model(changed))[:, :3].any()) is leaks


@pytest.mark.parametrize("P", RATIOS)
def test_packed_documents_match_separate_documents(P: int) -> None:
    model, ids = open_gate_decoder(P), tokens(1, 29)
    lengths = [11, 1, 17]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    separate = torch.cat([model(part) for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(model(ids, document_ids=documents), separate)


def test_padding_does_not_change_outputs() -> None:
    model, ids = open_gate_decoder(4), tokens(1, 11)
    for left, right in ((5, 0), (0, 3), (3, 2)):
        padded = torch.nn.functional.pad(ids, (left, right))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        out = model(padded, attention_mask=mask)[:, left : left + 11]
        torch.testing.assert_close(out, model(ids))
    documents = torch.tensor([[0] * 3 + [1] * 6 + [2] * 2])
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    out = model(ids, attention_mask=mask, document_ids=documents)
    torch.testing.assert_close(out[:, 3:9], model(ids[:, 3:9]))


# --- init, gradients, roles ---


def train(model: Any, steps: int = 4) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        ids = tokens(2, 18, seed=step)
        logits = model.logits(model.train()(ids))
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("inject", ["once", "each"])
def test_closed_gate_trains_bit_identically_to_the_fast_path(inject: str) -> None:
    closed = decoder(torch.float32, ratio=4, n_layers=2, inject=inject)
    freeze_roles(closed, ["slow", "gate"])
    plain = train(decoder(torch.float32)).state_dict()
    trained = train(closed).state_dict()
    for name, value in plain.items():
        assert torch.equal(trained[name], value), name


def test_slow_weights_have_zero_gradient_while_the_gate_is_zero() -> None:
    model = decoder(ratio=4, n_layers=1).train()
    slow = [p for name, p in model.named_parameters() if parameter_roles(model)[name] == "slow"]
    (gate,) = model.slow.gates["0"].parameters()
    model(tokens(2, 16)).sin().sum().backward()
    assert bool(gate.grad != 0)
    assert all(bool((p.grad == 0).all()) for p in slow)
    with torch.no_grad():
        gate.fill_(0.1)
    model(tokens(2, 16)).sin().sum().backward()
    assert all(bool((p.grad != 0).any()) for p in slow)


def test_frozen_slow_weights_do_not_change() -> None:
    model = decoder(torch.float32, ratio=4, n_layers=1)
    freeze_roles(model, ["slow"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after, roles = train(model).state_dict(), parameter_roles(model)
    for name in before:
        assert torch.equal(before[name], after[name]) is (roles[name] == "slow"), name


def test_parameter_roles_are_slow_or_gate() -> None:
    roles = parameter_roles(decoder(attention={"coupling": "euler"}, ratio=4, n_layers=1, inject="each"))
    for name, role in roles.items():
        if name.startswith("slow.gates."):
            assert role == "gate"
        else:
            assert (role == "slow") is name.startswith("slow."), name
    with raises_code("unknown-role"):
        freeze_roles(decoder(ratio=4), ["slwo"])


def test_fast_parameters_have_the_same_init_with_and_without_slow_path() -> None:
    plain, slow = decoder(seed=3).state_dict(), decoder(seed=3, ratio=4).state_dict()
    assert set(plain) < set(slow)
    assert all(torch.equal(slow[name], value) for name, value in plain.items())


def test_compile_activation_checkpointing_and_bf16() -> None:
    model = decoder(torch.float32, ratio=4, n_layers=1, gate_init=0.5)
    ids = tokens(2, 18)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (18, 13):  # the second compiles for any length
        torch.testing.assert_close(compiled(ids[:, :length]), model(ids[:, :length]))
    copied = decoder(torch.float32, seed=1, ratio=4, n_layers=1, gate_init=0.5)
    copied.load_state_dict(model.state_dict())
    copied.activation_checkpointing = True
    torch.testing.assert_close(copied.train()(ids), model(ids))
    low = decoder(torch.bfloat16, ratio=4, n_layers=1, gate_init=0.5)
    assert low(ids).dtype == torch.bfloat16
    torch.testing.assert_close(low(ids).float(), model(ids), rtol=0.1, atol=0.1)


# --- input checks ---


@pytest.mark.parametrize(
    ("slow", "code"),
    [
        ({"ratio": 1}, "invalid-pooling-ratio"),
        ({"ratio": 2.5}, "wrong-type"),
        ({"n_layers": 0}, "below-minimum"),
        ({"hidden_dim": 0}, "below-minimum"),
        ({"gate": "scaler"}, "unknown-gate"),
        ({"gate": "tanh", "gate_init": 1.0}, "invalid-gate-init"),
        ({"inject": "eech"}, "unknown-inject"),
        ({"inject": [0, 1, 2]}, "invalid-inject-layers"),
        ({"inject": [2]}, "invalid-inject-layers"),
        ({"inject": [1, 1]}, "invalid-inject-layers"),
        ({"inject": []}, "invalid-inject-layers"),
        ({"inject": [0], "pool_after": 1}, "invalid-inject-layers"),
        ({"pool_after": 2}, "invalid-pool-after"),
        ({"output_init": "zeros"}, "unknown-output-init"),
        ({"output_init": "zero"}, "slow-path-cannot-train"),
        ({"rato": 4}, "unknown-key"),
    ],
)
def test_invalid_config_raises(slow: dict[str, Any], code: str) -> None:
    with raises_code(code):
        ModelConfig.from_dict({**BASE, "slow": slow})


def test_unknown_slow_attention_option_raises() -> None:
    with raises_code("unknown-key"):
        Decoder(ModelConfig.from_dict({**BASE, "slow": {"attention": {"copling": "euler"}}}))


def test_zero_output_init_with_an_open_gate_gets_gradient() -> None:
    model = decoder(ratio=4, n_layers=1, gate_init=0.5, output_init="zero")
    ids = tokens(2, 16)
    assert torch.equal(model(ids), decoder()(ids))
    model(ids).sin().sum().backward()
    assert bool((model.slow.phi.down.weight.grad != 0).any())


def test_sequences_shorter_than_a_block() -> None:
    model = decoder(ratio=8, gate_init=0.5)
    ids = tokens(1, 7)
    torch.testing.assert_close(model(ids), decoder()(ids))
    with raises_code("ratio-exceeds-length"):
        model.train()(ids)


def test_config_dict_round_trip() -> None:
    config = ModelConfig.from_dict({**BASE, "slow": {"ratio": 4, "attention": {"coupling": "euler"}}})
    assert ModelConfig.from_dict(config.to_dict()) == config
