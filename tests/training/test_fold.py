"""`drift:fold_at=…`: the drift is folded into W_Q during a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from input_errors import raises_code
from qkflow.attention import Attention, couplings
from qkflow.attention.couplings.base import Coupling
from qkflow.attention.couplings.drift import Drift
from qkflow.models import Decoder, preset
from qkflow.training import Callback, RunConfig, Trainer, train, worker
from qkflow.training.fold import fold_drifts, layers_to_fold

RunFolder = Callable[..., Path]


def small_model(coupling: str, **attention: Any) -> Decoder:
    attention |= {"coupling": coupling}
    return Decoder(preset("tiny", vocab_size=32, n_layers=2, dim=16, n_heads=4, attention=attention), seed=0)


@pytest.mark.parametrize("fold_at", [-0.1, 1.0, 2, float("nan")])
def test_bad_fold_at_is_refused(fold_at: float) -> None:
    with raises_code("bad-fold-at"):
        Attention(8, 2, coupling=f"drift:fold_at={fold_at}")


@pytest.mark.parametrize("options", ["", ":n=3", ":step_per=layer", ":learn_step=false"])
def test_fold_keeps_the_logits(options: str) -> None:
    model = small_model(f"drift:step=0.4:fold_at=0.25{options}", qk_norm=True, bias=True).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.arange(12)[None]
    before, keys = model.logits(model(ids)), set(model.state_dict())
    pending = layers_to_fold(model)
    assert len(pending) == 2
    assert not fold_drifts(pending, 0.24)
    assert fold_drifts(pending, 0.25)
    assert pending == []
    torch.testing.assert_close(model.logits(model(ids)), before, rtol=1e-12, atol=1e-12)
    assert set(model.state_dict()) == keys
    for layer in layers_to_fold(model):
        assert layer.coupling.is_identity()
        assert not any(p.requires_grad for p in layer.coupling.parameters())
    folded = {name: value.clone() for name, value in model.state_dict().items()}
    assert fold_drifts(layers_to_fold(model), 0.5)
    assert all(torch.equal(value, folded[name]) for name, value in model.state_dict().items())


class RecordSteps(Callback):
    """Records the step size, its gradient and its moments after every step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.moments: list[float] = []
        self.losses: list[float] = []

    def on_step(self, trainer: Trainer, loss: Tensor) -> None:
        name = "blocks.0.attention.coupling.step.value"
        self.losses.append(float(loss))
        self.values.append(float(trainer.stepper.decoder.state_dict()[name].abs().max()))
        self.moments.append(float(trainer.stepper.state_dict()[f"optimizer.mean.{name}"].abs().max()))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_run_folds_at_the_fraction_and_keeps_the_step_size_at_zero(
    run_folder: RunFolder, optimizer: str
) -> None:
    runs = []
    for fold_at in (0, 0.5):
        model = {"attention": {"coupling": f"drift:fold_at={fold_at}"}}
        folder = run_folder(f"fold-{fold_at}", model=model, steps=10, optimizer=optimizer)
        runs.append(RecordSteps())
        train(folder, RunConfig.load(folder / "config.yaml"), runs[-1])
    never, folded = runs
    assert folded.values[:5] == never.values[:5]
    assert folded.losses[:5] == never.losses[:5]
    assert folded.losses[5] == pytest.approx(never.losses[5], rel=1e-6)  # the first loss after the fold
    assert folded.losses[6:] != never.losses[6:]
    assert min(never.values) > 0
    assert folded.values[5:] == [0.0] * 5
    assert set(folded.moments[4:]) == {folded.moments[4]}


def test_run_killed_around_the_fold_is_bit_identical(run_folder: RunFolder) -> None:
    model = {"attention": {"coupling": "drift:fold_at=0.2"}}
    options: dict[str, Any] = {"steps": 30, "save_every": 1, "evaluations": 3}
    whole, killed = (run_folder(name, model=model, **options) for name in ("whole", "killed"))
    assert worker.main([str(whole)]) == 0
    script = Path(__file__).with_name("kill_worker.py")
    done = subprocess.run([sys.executable, script, killed, "exact", "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = ((f / "model" / "model.safetensors").read_bytes() for f in (whole, killed))
    assert first == second


def test_fold_needs_a_key_projection() -> None:
    with raises_code("merge-collapsed-circuit"):
        layers_to_fold(small_model("drift:fold_at=0.2", circuit="CAFO", rope=False))
    with raises_code("fold-sharded-weights"):
        layers_to_fold(small_model("drift:fold_at=0.2"), is_sharded=True)
    assert layers_to_fold(small_model("drift"), is_sharded=True) == []


class TwoFactors(Coupling):
    """A linear drift a·b of another package, whose own `remove_drift` keeps a."""

    name: ClassVar[str] = "two_factors"
    fold_at = 0.5

    def __init__(self, layer: Attention) -> None:
        super().__init__(layer.head_shapes)
        self.a = nn.Parameter(torch.full((self.head_shapes.n_q,), 0.5))
        self.b = nn.Parameter(torch.full((self.head_shapes.n_q,), 0.5))

    def linear_drift(self) -> Tensor:
        return (self.a * self.b).detach()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q + (self.a * self.b)[:, None] * k, k


class Exponential(TwoFactors):
    """A drift whose parametrization has no zero: it must override `remove_drift`."""

    def linear_drift(self) -> Tensor:
        return self.a.exp().detach()


def test_fold_of_a_third_party_coupling() -> None:
    layer = Attention(16, 4, seed=0).double()
    layer.coupling, layer.coupling_spec = TwoFactors(layer).double(), couplings.check("drift")
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    before = layer(x)
    assert fold_drifts(layers_to_fold(layer), 0.5)
    torch.testing.assert_close(layer(x), before, rtol=1e-12, atol=1e-12)
    layer.coupling = Exponential(layer)
    with raises_code("drift-remains"):
        layers_to_fold(layer)


def test_default_drift_is_never_folded() -> None:
    assert Drift.fold_at == 0
    assert layers_to_fold(small_model("drift")) == []
