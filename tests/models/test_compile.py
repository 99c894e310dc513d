"""The training objective compiles as one graph, as on a GPU: every coupling and scoring, and a slow path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkflow.models import Decoder, preset
from qkflow.training.step import Objective

CASES: list[dict[str, Any]] = [
    {"attention": {"coupling": "euler", "scoring": "differential"}},
    {"attention": {"coupling": "affine", "scoring": "differential_v2", "qk_norm": True}},
    {"attention": {"coupling": "leapfrog:n=3"}, "slow": {"ratio": 4, "n_layers": 1, "gate_init": 0.5}},
]


@pytest.mark.parametrize("options", CASES, ids=["euler-differential", "affine-v2", "leapfrog-slow"])
def test_objective_compiles_fullgraph(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    config = preset("tiny", vocab_size=64, n_layers=2, dim=32, n_heads=4, init="fan_in", **options)
    eager, compiled = (Decoder(config, seed=0) for _ in range(2))
    ids = torch.randint(64, (2, 17))
    step = torch.compile(Objective(compiled), fullgraph=True, backend="aot_eager")
    losses = [objective(ids[:, :-1], ids[:, 1:]) for objective in (Objective(eager), step)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, expected), parameter in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
