import pytest
import torch
from torch import nn

from qkflow.errors import InputError
from qkflow.models import Decoder, preset
from qkflow.training.optimizer import (
    AdamW,
    ParamGroup,
    check_param_groups,
    clip_grad_norm,
    pace_lr_multipliers,
    parameter_groups,
)


def small_model(**options):
    return Decoder(preset("tiny", vocab_size=32, n_layers=2, dim=16, n_heads=2, **options), seed=0)


@pytest.mark.parametrize("coupling", ["none", "leapfrog:bias=true", "affine"])
@pytest.mark.parametrize("scoring", ["softmax", "differential"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(coupling, scoring):
    model = small_model(attention={"coupling": coupling, "scoring": scoring, "qk_norm": True})
    groups = parameter_groups(model, 1e-3, 0.1)
    names = [name for group in groups for name in group.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        assert {p.dim() >= 2 for p in group.parameters.values()} == {group.weight_decay > 0}


def test_a_forgotten_or_doubled_parameter_is_an_error():
    model = small_model()
    groups = parameter_groups(model, 1e-3)
    name, parameter = groups[0].parameters.popitem()
    with pytest.raises(InputError, match=f"no group holds {name}"):
        check_param_groups(model, groups)
    groups[0].parameters[name] = groups[1].parameters[name] = parameter
    with pytest.raises(InputError, match="in two groups"):
        check_param_groups(model, groups)
    model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(InputError, match="no role is declared for extra"):
        parameter_groups(model, 1e-3)


def test_multipliers_by_role():
    model = small_model()
    groups = parameter_groups(model, 0.5, 0.1, {"q": 4.0, "mlp": lambda progress: 1 + progress})
    for group in groups:
        group.set_lr(2.0, progress=0.5)
    rates = {group.role: group.lr for group in groups}
    assert rates == {"embed": 2.0, "norm": 2.0, "q": 8.0, "k": 2.0, "v": 2.0, "o": 2.0, "mlp": 3.0}
    with pytest.raises(InputError, match="no parameter has the role 'slow'"):
        parameter_groups(model, 0.5, 0.1, {"slow": 2.0})
    with pytest.raises(InputError, match="unknown role 'Q'"):
        parameter_groups(model, 0.5, 0.1, {"Q": 2.0})


def test_pace_makes_the_query_key_circuit_faster():
    model = small_model()
    assert pace_lr_multipliers(4, model) == {"q": 4.0, "k": 4.0}
    assert pace_lr_multipliers({"ratio": 4}, model) == {"q": 4.0, "k": 4.0}
    assert pace_lr_multipliers(None, model) == {}
    collapsed = small_model(attention={"circuit": "CAFO", "rope": False})
    assert pace_lr_multipliers(2.0, collapsed) == {"qk": 2.0}
    with pytest.raises(InputError, match="must be above zero"):
        pace_lr_multipliers(-1, model)
    with pytest.raises(InputError, match=r"unknown key of train\.pace 'rate'"):
        pace_lr_multipliers({"rate": 1}, model)


def test_the_same_numbers_as_pytorchs_adamw():
    ours, theirs = small_model(), small_model()
    mine = AdamW(parameter_groups(ours, 0.01, 0.1), 0.9, 0.95, 1e-8)
    decaying = [p for p in theirs.parameters() if p.dim() >= 2]
    rest = [p for p in theirs.parameters() if p.dim() < 2]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    peer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        peer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_without_a_gradient_stays():
    moving, still = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = AdamW([ParamGroup("q", 0.1, 0.1, parameters={"moving": moving, "still": still})])
    moving.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(still, torch.ones(2, 2))
    assert not torch.equal(moving, torch.ones(2, 2))


def test_what_is_kept_of_the_weights_is_made_anew_after_a_step():
    model = small_model(attention={"coupling": "leapfrog:n=2"}).eval()
    optimizer = AdamW(parameter_groups(model, 0.1))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        model(ids)  # may keep products of its weights
    model(ids).sum().backward()
    optimizer.step()
    fresh = small_model(attention={"coupling": "leapfrog:n=2"}).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids), fresh(ids))


@pytest.mark.parametrize("limit", [0.0, 1.0, 100.0])
def test_clipping_equals_pytorchs(limit):
    ours = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    for p in ours:
        p.grad = torch.randn(3, 4)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.clone()
    norm = clip_grad_norm([p.grad for p in ours], limit)
    expected = nn.utils.clip_grad_norm_(theirs, limit or float("inf"))
    torch.testing.assert_close(norm, expected)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)
