from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from input_errors import raises_code
from qkflow.models import Decoder, preset
from qkflow.training.optimizer import (
    SGD,
    AdamW,
    Optimizer,
    ParamGroup,
    check_param_groups,
    clip_grad_norm,
    parameter_groups,
)


def small_model(**options: Any) -> Decoder:
    return Decoder(preset("tiny", vocab_size=32, n_layers=2, dim=16, n_heads=2, **options), seed=0)


@pytest.mark.parametrize("coupling", ["none", "leapfrog:bias=true", "affine"])
@pytest.mark.parametrize("scoring", ["softmax", "differential"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(coupling: str, scoring: str) -> None:
    model = small_model(attention={"coupling": coupling, "scoring": scoring, "qk_norm": True})
    groups = parameter_groups(model, 1e-3, 0.1)
    names = [name for group in groups for name in group.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        assert {p.dim() >= 2 for p in group.parameters.values()} == {group.weight_decay > 0}


def test_missing_or_duplicate_parameter_is_refused() -> None:
    model = small_model()
    groups = parameter_groups(model, 1e-3)
    name, parameter = groups[0].parameters.popitem()
    with raises_code("parameter-without-group") as caught:
        check_param_groups(model, groups)
    assert name in str(caught.value)
    groups[0].parameters[name] = groups[1].parameters[name] = parameter
    with raises_code("parameter-in-two-groups"):
        check_param_groups(model, groups)
    model.extra = nn.Parameter(torch.zeros(2))
    with raises_code("missing-role") as caught:
        parameter_groups(model, 1e-3)
    assert "extra" in str(caught.value)


def test_lr_multipliers_by_role() -> None:
    model = small_model()
    optimizer = AdamW(parameter_groups(model, 0.5, 0.1, {"q": 4.0, "mlp": lambda progress: 1 + progress}))
    optimizer.set_lr(2.0, progress=0.5)
    rates = {group.role: group.lr for group in optimizer.param_groups}
    assert rates == {"embed": 2.0, "norm": 2.0, "q": 8.0, "k": 2.0, "v": 2.0, "o": 2.0, "mlp": 3.0}
    with raises_code("role-without-parameters"):
        parameter_groups(model, 0.5, 0.1, {"slow": 2.0})
    with raises_code("unknown-role"):
        parameter_groups(model, 0.5, 0.1, {"Q": 2.0})


def assert_updates_equal(
    ours: Decoder, mine: Optimizer, theirs: Decoder, peer: torch.optim.Optimizer
) -> None:
    """Give both models the same gradients for five steps; their weights must be equal bit for bit."""
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        for group in mine.param_groups:
            group.lr = 0.01 * (step + 1)
        for options in peer.param_groups:
            options["lr"] = 0.01 * (step + 1)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        peer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def torch_groups(model: Decoder) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


@pytest.mark.parametrize("has_fused_op", [True, False])
def test_adamw_is_bit_identical_to_torch(has_fused_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = small_model(), small_model()
    with monkeypatch.context() as patched:
        if not has_fused_op:
            patched.delattr(torch, "_fused_adamw_")
        mine = AdamW(parameter_groups(ours, 0.01, 0.1), 0.9, 0.95, 1e-8)
    assert (mine._fallback is None) == has_fused_op
    peer = torch.optim.AdamW(torch_groups(theirs), lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    assert_updates_equal(ours, mine, theirs, peer)
    state = mine.state_dict()
    assert float(state["optimizer.steps"]) == 5
    for (name, _), p in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(state[f"optimizer.mean.{name}"], peer.state[p]["exp_avg"])
        assert torch.equal(state[f"optimizer.square.{name}"], peer.state[p]["exp_avg_sq"])


def test_sgd_matches_torch() -> None:
    ours, theirs = small_model(), small_model()
    mine = SGD(parameter_groups(ours, 0.01, 0.1), momentum=0.8)
    peer = torch.optim.SGD(torch_groups(theirs), lr=0.01, momentum=0.8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        peer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert set(mine.state_dict()) == {f"optimizer.momentum.{name}" for name, _ in ours.named_parameters()}


@pytest.mark.parametrize("optimizer_class", [AdamW, SGD])
def test_parameter_without_gradient_is_not_updated(optimizer_class: type[AdamW | SGD]) -> None:
    trained, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_class([ParamGroup("q", 0.1, 0.1, parameters={"a": trained, "b": unused})])
    trained.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert not torch.equal(trained, torch.ones(2, 2))
    assert len(optimizer.gradients()) == 1
    optimizer.zero_grad()
    assert optimizer.gradients() == []


def test_step_invalidates_cached_functions_of_weights() -> None:
    model = small_model(attention={"coupling": "leapfrog:n=2"}).eval()
    optimizer = AdamW(parameter_groups(model, 0.1))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        model(ids)
    model(ids).sum().backward()
    optimizer.step()
    fresh = small_model(attention={"coupling": "leapfrog:n=2"}).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids), fresh(ids))


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 100.0])
def test_clipping_matches_torch(max_norm: float) -> None:
    ours = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    for p in ours:
        p.grad = torch.randn(3, 4)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.clone()
    norm = clip_grad_norm([p.grad for p in ours], max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm or float("inf"))
    torch.testing.assert_close(norm, expected)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)
