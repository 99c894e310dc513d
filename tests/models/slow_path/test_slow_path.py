"""The slow path in a decoder: equal to its definition, blind to the future, silent when closed."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.attention import couplings, scorings
from qkflow.errors import InputError
from qkflow.models import Decoder, ModelConfig
from qkflow.models.slow_path import path
from qkflow.models.slow_path.pooling import UniformBlockPooling
from qkflow.roles import freeze_roles, parameter_roles

RATIOS = (2, 3, 4, 8)
BASE = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 2, "init": "fan_in"}


def decoder(dtype=torch.float64, attention=None, seed=0, **slow):
    config = {**BASE, "attention": attention or {}, "slow": slow or None}
    return Decoder(ModelConfig.from_dict(config), seed=seed, dtype=dtype).eval()


def tokens(*shape, seed=0):
    return torch.randint(BASE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def textbook(model, ids):
    """The equations of the paper in our reading, token by token."""
    P, x = model.slow.ratio, model.embedding(ids)
    means = torch.stack([x[:, k * P : (k + 1) * P].mean(1) for k in range(ids.shape[1] // P)], 1)
    y = means
    for block in model.slow.blocks:
        y = y + block.attention.reference(block.attention_norm(y))[0]
        y = y + block.feed_forward(block.feed_forward_norm(y))
    phi = model.slow.phi
    u = phi.down(torch.nn.functional.silu(phi.up(phi.norm(y))))
    heard = torch.zeros_like(x)
    for t in range(P - 1, ids.shape[1]):
        heard[:, t] = u[:, (t + 1) // P - 1]
    for layer, block in enumerate(model.blocks):
        if str(layer) in model.slow.gates:
            x = x + model.slow.gates[str(layer)].value * heard
        x = x + block.attention.reference(block.attention_norm(x))[0]
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.norm(x)


@pytest.mark.parametrize("inject", ["once", "each", [1]])
@pytest.mark.parametrize("gate", ["scalar", "vector", "tanh"])
def test_it_follows_its_equations(gate, inject):
    model = decoder(ratio=4, n_layers=2, gate=gate, init=0.6, inject=inject, hidden_dim=24)
    ids = tokens(2, 19)
    assert len(model.slow.gates) == (2 if inject == "each" else 1)
    torch.testing.assert_close(model(ids), textbook(model, ids))
    assert not torch.allclose(model(ids), decoder()(ids)), "an open gate must be heard"


@pytest.mark.parametrize(
    "attention",
    [{"coupling": name} for name in couplings.names()] + [{"scoring": name} for name in scorings.names()],
    ids=lambda attention: next(iter(attention.values())),
)
def test_every_coupling_and_scoring_works_in_both_paths(attention):
    model = decoder(attention=attention, ratio=3, n_layers=1, init=0.6)
    ids = tokens(2, 11)
    torch.testing.assert_close(model(ids), textbook(model, ids))
    fast, slow = model.blocks[0].attention, model.slow.blocks[0].attention
    assert type(fast.coupling) is type(slow.coupling)
    assert type(fast.scoring) is type(slow.scoring)


def test_the_paths_may_differ_in_their_attention():
    model = decoder(attention={"window": 3, "dropout": 0.1}, ratio=2, n_layers=1)
    slow = model.slow.blocks[0].attention
    assert (slow.window, slow.dropout) == (None, 0.0), "the slow path sees far, and draws no random numbers"
    config = {**BASE, "slow": {"attention": {"coupling": "euler:n=2", "window": 5}}}
    model = Decoder(ModelConfig.from_dict(config))
    assert model.slow.blocks[0].attention.coupling_spec.name == "euler"
    assert model.slow.blocks[0].attention.window == 5
    assert model.blocks[0].attention.coupling_spec.name == "none"


# --- causality, with the gate wide open: closed, every leak would pass ---


@lru_cache
def opened(P, inject="once"):
    return decoder(ratio=P, n_layers=2, init=1.5, inject=inject)


@st.composite
def packed(draw):
    """Document ids (B, T), each row cut at its own places; None: not packed."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 37))
    if draw(st.booleans()):
        return B, T, None
    cuts = [draw(st.sets(st.integers(1, T), max_size=4)) for _ in range(B)]
    return B, T, torch.tensor([[sum(cut <= t for cut in row) for t in range(T)] for row in cuts])


def document_of(documents, b, t, T):
    """First token and end of the document that holds token t of row b."""
    if documents is None:
        return 0, T
    same = (documents[b] == documents[b, t]).nonzero()
    return int(same.min()), int(same.max()) + 1


@given(packed(), st.sampled_from(RATIOS), st.sampled_from(["once", "each"]), st.data())
@settings(max_examples=120, deadline=None)
def test_a_changed_token_reaches_only_what_follows_it_in_its_document(batch, P, inject, data):
    B, T, documents = batch
    b, t = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, T - 1))
    model, ids = opened(P, inject), tokens(B, T)
    changed = ids.clone()
    changed[b, t] = (ids[b, t] + 1) % BASE["vocab_size"]
    before, after = (model.embedding(given) for given in (ids, changed))
    first, end = document_of(documents, b, t, T)

    heard = model.slow(before, document_ids=documents) != model.slow(after, document_ids=documents)
    expected = torch.zeros(B, T, dtype=torch.bool)
    expected[b, first + ((t - first) // P + 1) * P - 1 : end] = True  # from the end of its block on
    assert torch.equal(heard.any(-1), expected)

    moved = (model(ids, document_ids=documents) != model(changed, document_ids=documents)).any(-1)
    expected[b, t:end] = True
    assert torch.equal(moved, expected)


def test_a_leak_is_seen_through_an_open_gate_and_hidden_by_a_closed_one(monkeypatch):
    class Leaky(UniformBlockPooling):
        def upsample(self, u):  # the block a token is in, not the last completed one
            return u.repeat_interleave(self.ratio, 1)[:, : self.seq_len]

    monkeypatch.setattr(path, "blocks_of", lambda T, P, documents: Leaky(T, P))
    ids = tokens(1, 12)
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % BASE["vocab_size"]
    for start, leaks in ((1.5, True), (0.0, False)):
        model = decoder(ratio=4, n_layers=1, init=start)
        assert bool((model(ids) != model(changed))[:, :3].any()) is leaks


@pytest.mark.parametrize("P", RATIOS)
def test_packed_documents_are_as_if_alone(P):
    model, ids = opened(P), tokens(1, 29)
    lengths = [11, 1, 17]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    alone = torch.cat([model(part) for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(model(ids, document_ids=documents), alone)


def test_padding_on_either_side_changes_nothing():
    model, ids = opened(4), tokens(1, 11)
    for left, right in ((5, 0), (0, 3), (3, 2)):
        padded = torch.nn.functional.pad(ids, (left, right))
        real = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        out = model(padded, attention_mask=real)[:, left : left + 11]
        torch.testing.assert_close(out, model(ids))
    documents = torch.tensor([[0] * 3 + [1] * 6 + [2] * 2])
    real = torch.ones_like(ids)
    real[:, :3] = 0
    out = model(ids, attention_mask=real, document_ids=documents)
    torch.testing.assert_close(out[:, 3:9], model(ids[:, 3:9]))


# --- starts, gradients, roles ---


def train(model, steps=4):
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
def test_closed_it_trains_as_the_fast_path_alone_to_the_last_bit(inject):
    closed = decoder(torch.float32, ratio=4, n_layers=2, inject=inject)
    freeze_roles(closed, ["slow", "gate"])
    plain = train(decoder(torch.float32)).state_dict()
    trained = train(closed).state_dict()
    for name, value in plain.items():
        assert torch.equal(trained[name], value), name


def test_a_cold_gate_learns_first_and_the_slow_weights_after_it():
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


def test_frozen_slow_weights_stay_while_the_gate_moves():
    model = decoder(torch.float32, ratio=4, n_layers=1)
    freeze_roles(model, ["slow"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after, roles = train(model).state_dict(), parameter_roles(model)
    for name in before:
        assert torch.equal(before[name], after[name]) is (roles[name] == "slow"), name


def test_its_parameters_are_slow_or_gate_whatever_they_are_within():
    roles = parameter_roles(decoder(attention={"coupling": "euler"}, ratio=4, n_layers=1, inject="each"))
    for name, role in roles.items():
        if name.startswith("slow.gates."):
            assert role == "gate"
        else:
            assert (role == "slow") is name.startswith("slow."), name
    with pytest.raises(InputError, match=r"role to freeze .*'slwo': did you mean 'slow'"):
        freeze_roles(decoder(ratio=4), ["slwo"])


def test_fast_parameters_start_alike_with_and_without_it():
    plain, slow = decoder(seed=3).state_dict(), decoder(seed=3, ratio=4).state_dict()
    assert set(plain) < set(slow)
    assert all(torch.equal(slow[name], value) for name, value in plain.items())


def test_it_compiles_checkpoints_and_keeps_low_precision():
    model = decoder(torch.float32, ratio=4, n_layers=1, init=0.5)
    ids = tokens(2, 18)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (18, 13):  # the second compiles for any length
        torch.testing.assert_close(compiled(ids[:, :length]), model(ids[:, :length]))
    copied = decoder(torch.float32, seed=1, ratio=4, n_layers=1, init=0.5)
    copied.load_state_dict(model.state_dict())
    copied.activation_checkpointing = True
    torch.testing.assert_close(copied.train()(ids), model(ids))
    low = decoder(torch.bfloat16, ratio=4, n_layers=1, init=0.5)
    assert low(ids).dtype == torch.bfloat16
    torch.testing.assert_close(low(ids).float(), model(ids), rtol=0.1, atol=0.1)


# --- bad input ---


@pytest.mark.parametrize(
    ("slow", "message"),
    [
        ({"ratio": 1}, "at least 2"),
        ({"ratio": 2.5}, "whole number"),
        ({"n_layers": 0}, r"model\.slow\.layers must be at least 1"),
        ({"hidden_dim": 0}, r"model\.slow\.hidden must be at least 1"),
        ({"gate": "scaler"}, "did you mean 'scalar'"),
        ({"gate": "tanh", "gate_init": 1.0}, r"inside \(-1, 1\)"),
        ({"inject": "eech"}, "did you mean 'each'"),
        ({"inject": [0, 1, 2]}, "3 gates, but there are 2 fast layers"),
        ({"inject": [2]}, "from 0 to 1, each once"),
        ({"inject": [1, 1]}, "from 0 to 1, each once"),
        ({"inject": []}, "from 0 to 1, each once"),
        ({"output": "zeros"}, "did you mean 'zero'"),
        ({"output": "zero"}, "can never learn: the gate's gradient is the output"),
        ({"rato": 4}, r"key of model\.slow 'rato': did you mean 'ratio'"),
    ],
)
def test_bad_options_are_refused(slow, message):
    with pytest.raises(InputError, match=message):
        ModelConfig.from_dict({**BASE, "slow": slow})


def test_unknown_attention_of_the_slow_path_is_refused():
    with pytest.raises(InputError, match=r"key of model\.slow\.attention 'copling': did you mean 'coupling'"):
        Decoder(ModelConfig.from_dict({**BASE, "slow": {"attention": {"copling": "euler"}}}))


def test_a_zero_output_behind_an_open_gate_is_alive():
    model = decoder(ratio=4, n_layers=1, init=0.5, output="zero")
    ids = tokens(2, 16)
    assert torch.equal(model(ids), decoder()(ids))
    model(ids).sin().sum().backward()
    assert bool((model.slow.phi.down.weight.grad != 0).any())


def test_training_on_less_than_a_block_is_refused_but_a_short_prompt_is_not():
    model = decoder(ratio=8, init=0.5)
    ids = tokens(1, 7)
    torch.testing.assert_close(model(ids), decoder()(ids))
    with pytest.raises(InputError, match="P = 8 is longer than the 7 tokens"):
        model.train()(ids)


def test_the_config_survives_plain_data():
    config = ModelConfig.from_dict({**BASE, "slow": {"ratio": 4, "attention": {"coupling": "euler"}}})
    assert ModelConfig.from_dict(config.to_dict()) == config
