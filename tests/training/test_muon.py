from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from qkflow.models import Decoder, preset
from qkflow.roles import freeze_roles, parameter_roles
from qkflow.training import RunConfig, muon, train, worker
from qkflow.training.metrics_log import read_rows_by_kind
from qkflow.training.muon import Muon, hidden_matrices, newton_schulz, orthogonalize
from qkflow.training.optimizer import AdamW, ParamGroup, check_param_groups, parameter_groups
from qkflow.training.pace import pace_lr_multipliers

NS_OPTIONS = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
SHAPES = [(24, 24), (16, 40), (40, 16)]


def small_model(**options: Any) -> Decoder:
    return Decoder(preset("tiny", vocab_size=32, n_layers=2, dim=16, n_heads=2, **options), seed=0)


def give_gradients(model: nn.Module, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def reference_orth(matrix: Tensor) -> Tensor:
    """Return orth(u) by the polynomial of Newton-Schulz applied to the singular values."""
    a, b, c = NS_OPTIONS[0]
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(NS_OPTIONS[1]):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def gradient(kind: str, shape: tuple[int, int]) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    if kind == "random":
        return x
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    decay = torch.logspace(0, -7, len(s), dtype=torch.float64)
    s = decay if kind == "ill-conditioned" else torch.where(torch.arange(len(s)) < 3, s, 0.0)
    return (u * s) @ vt


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["random", "low-rank", "ill-conditioned"])
def test_newton_schulz_matches_singular_value_decomposition(kind: str, shape: tuple[int, int]) -> None:
    x = gradient(kind, shape)
    wide = x.T if shape[0] > shape[1] else x
    torch.testing.assert_close(newton_schulz(wide[None])[0], reference_orth(wide), rtol=0, atol=1e-9)


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as torch.optim.Muon does, also on a CPU without bfloat16 instructions."""
    monkeypatch.setattr(muon, "newton_schulz_dtype", lambda device: torch.bfloat16)


@pytest.mark.parametrize("kind", ["random", "low-rank", "ill-conditioned"])
def test_orthogonalize_in_float32_is_exact(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "newton_schulz_dtype", lambda device: torch.float32)
    updates = [gradient(kind, shape).float() for shape in SHAPES]
    for index, result in orthogonalize(updates):
        exact = reference_orth(updates[index])
        # rounding errors in directions with singular values near zero are amplified by about 3.4⁵
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("kind", ["random", "low-rank", "ill-conditioned"])
def test_orthogonalize_is_as_exact_as_torch(kind: str) -> None:
    updates = [gradient(kind, shape).float() for shape in SHAPES * 2]
    results = dict(orthogonalize(updates))
    assert sorted(results) == list(range(len(updates)))
    for index, update in enumerate(updates):
        exact = reference_orth(update)
        theirs = _zeropower_via_newtonschulz(update, *NS_OPTIONS).double()
        ours = results[index].double()
        assert ours.shape == update.shape
        assert (ours - exact).norm() <= 1.25 * (theirs - exact).norm() + 1e-3
        values = [torch.linalg.svdvals(x) for x in (ours, theirs)]
        torch.testing.assert_close(*values, rtol=0, atol=0.06)


def test_batch_is_split_at_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = [torch.randn(8, 8) for _ in range(5)]
    together = dict(orthogonalize(updates))
    monkeypatch.setattr(muon, "MAX_BATCH_ELEMENTS", 2 * 64)
    for index, result in orthogonalize(updates):
        torch.testing.assert_close(result, together[index], rtol=0, atol=0.02)


def test_hidden_matrices_by_role() -> None:
    attention = {"coupling": "euler", "scoring": "differential_v2", "qk_norm": True, "bias": True}
    model = small_model(attention=attention, slow={"ratio": 2}, tie_embeddings=False)
    hidden, roles = hidden_matrices(model), parameter_roles(model)
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2}
    fast = {name for name in hidden if not name.startswith("slow.")}
    assert fast == {name for name in matrices if roles[name] in ("q", "k", "v", "o", "mlp")}
    slow = {name for name in hidden if name.startswith("slow.")}
    assert {"slow.phi.up.weight", "slow.phi.down.weight", "slow.blocks.0.attention.qk.q.weight"} <= slow
    assert not {name for name in slow if "coupling" in name or "scoring" in name or "gates" in name}
    collapsed = small_model(attention={"circuit": "CACO", "rope": False})
    roles = parameter_roles(collapsed)
    assert {roles[name] for name in hidden_matrices(collapsed)} == {"qk", "ov", "mlp"}


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("same_rounding", [True, False])
def test_muon_matches_torch(same_rounding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit with PyTorch's Newton-Schulz, and to bfloat16 with ours."""
    if same_rounding:

        def one_by_one(matrices: Tensor) -> Tensor:
            return torch.stack([_zeropower_via_newtonschulz(x, *NS_OPTIONS) for x in matrices])

        monkeypatch.setattr(muon, "newton_schulz", one_by_one)
    ours, theirs = small_model(), small_model()
    hidden = hidden_matrices(ours)
    mine = Muon(parameter_groups(ours, 0.01, 0.1), hidden, 0.9)
    check_param_groups(ours, mine.param_groups)
    matrices = [p for name, p in theirs.named_parameters() if name in hidden]
    embedding = [p for name, p in theirs.named_parameters() if name not in hidden and p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    peers = [
        torch.optim.Muon(matrices, 0.01, 0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embedding, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.01,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]
    start = [p.detach().clone() for p in ours.parameters()]
    for step in range(5):
        give_gradients(ours, torch.Generator().manual_seed(step))
        give_gradients(theirs, torch.Generator().manual_seed(step))
        mine.step()
        for peer in peers:
            peer.step()
    for before, a, b in zip(start, ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b) or not same_rounding
        assert (a - b).norm() <= 0.01 * (b - before).norm()
    buffers = {f"optimizer.momentum.{name}" for name in hidden}
    assert buffers == {name for name in mine.state_dict() if ".momentum." in name}


def test_collapsed_circuit_is_orthogonalized_per_head() -> None:
    model = small_model(attention={"circuit": "CACO", "rope": False})
    optimizer = Muon(parameter_groups(model, 0.1), hidden_matrices(model), momentum=0.0)
    weight = model.blocks[0].attention.qk.weight
    before = weight.detach().clone()
    give_gradients(model, torch.Generator().manual_seed(0))
    optimizer.step()
    for moved, grad in zip(before - weight, weight.grad, strict=True):
        expected = 0.1 * 0.2 * 4 * reference_orth(grad)
        assert (moved - expected).norm() < 0.03 * expected.norm()


def test_pace_multiplies_the_muon_update() -> None:
    moved = []
    for ratio in (1, 4):
        model = small_model()
        groups = parameter_groups(model, 0.01, 0.0, pace_lr_multipliers(ratio, model))
        optimizer = Muon(groups, hidden_matrices(model))
        optimizer.set_lr(0.01, 0.5)
        attention = model.blocks[0].attention
        before = [w.detach().clone() for w in (attention.qk.q.weight, attention.ov.v.weight)]
        give_gradients(model, torch.Generator().manual_seed(0))
        optimizer.step()
        after = (attention.qk.q.weight, attention.ov.v.weight)
        moved.append([(a - b).norm().item() for a, b in zip(after, before, strict=True)])
    assert moved[1][0] == pytest.approx(4 * moved[0][0], rel=1e-4)
    assert moved[1][1] == pytest.approx(moved[0][1], rel=1e-4)


def test_frozen_roles_and_missing_gradients_are_not_updated() -> None:
    model = small_model()
    freeze_roles(model, ["q"])
    optimizer = Muon(parameter_groups(model, 0.1, 0.1), hidden_matrices(model))
    give_gradients(model, torch.Generator().manual_seed(0))
    model.blocks[0].attention.qk.k.weight.grad = None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    kept = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    frozen = {name for name in before if ".qk.q." in name}
    assert kept == frozen | {"blocks.0.attention.qk.k.weight"}


def test_model_without_hidden_matrices_is_trained_by_adamw() -> None:
    weights = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizers = [
        make([ParamGroup("embed", 0.1, 0.1, parameters={"a": weight})])
        for make, weight in zip((lambda groups: Muon(groups, ()), AdamW), weights, strict=True)
    ]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.ones(3, 2)
        optimizer.step()
    assert torch.equal(*weights)


def test_muon_reduces_the_loss(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(steps=150, lr=1e-2, optimizer="muon", log_every=1)
    result = train(folder, RunConfig.load(folder / "config.yaml"))
    assert result["loss"] < read_rows_by_kind(folder / "metrics.jsonl")["train"][0]["loss"] - 2


def test_resumed_run_is_bit_identical(run_folder: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"steps": 30, "save_every": 1, "evaluations": 3, "optimizer": "muon"}
    model = {"attention": {"coupling": "leapfrog:n=2", "dropout": 0.1}}
    whole, killed = (run_folder(name, model=model, **options) for name in ("whole", "killed"))
    assert worker.main([str(whole)]) == 0
    script = Path(__file__).with_name("kill_worker.py")
    done = subprocess.run([sys.executable, script, killed, "exact", "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = ((f / "model" / "model.safetensors").read_bytes() for f in (whole, killed))
    assert first == second
