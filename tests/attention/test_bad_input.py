"""Bad input raises an `InputError` with a stable code and one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from input_errors import raises_code
from qkflow import Attention
from qkflow.attention import couplings, initialize
from qkflow.attention.projections import HeadShapes
from qkflow.attention.registry import Registry
from qkflow.models import Decoder, ModelConfig, preset


def run_two_tokens(**inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Attention(16, 2)(torch.randn(3, 2, 16), **inputs)
    return out


CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: Attention(10, 3), "dim-not-divisible"),
    (lambda: Attention(16, 4, n_kv_heads=3), "heads-not-divisible"),
    (lambda: Attention(16, 0), "bad-attention-size"),
    (lambda: Attention(16, 2, window=0), "bad-window"),
    (lambda: Attention(16, 2, dropout=1.5), "bad-dropout"),
    (lambda: Attention(6, 2), "odd-head-dim"),
    (lambda: Attention(16, 2, coupling="leapfrg"), "unknown-coupling"),
    (lambda: Attention(16, 2, scoring="sofmax"), "unknown-scoring"),
    (lambda: Attention(16, 2, coupling="euler:stps=3"), "unknown-option"),
    (lambda: Attention(16, 2, coupling="none:n=3"), "unknown-option"),
    (lambda: Attention(16, 2, coupling="euler:n"), "bad-spec"),
    (lambda: Attention(16, 2, coupling="euler:n=0"), "bad-steps"),
    (lambda: Attention(16, 2, coupling="euler:n=1.5"), "bad-option-value"),
    (lambda: Attention(16, 2, coupling="euler:n=many"), "bad-option-value"),
    (lambda: Attention(16, 2, coupling="leapfrog:conservative=7"), "bad-option-value"),
    (lambda: Attention(16, 2, coupling="euler:hidden=0"), "bad-hidden-dim"),
    (lambda: Attention(16, 2, coupling="drift:step=nan"), "step-not-finite"),
    (lambda: Attention(16, 2, coupling="euler:step=Infinity"), "step-not-finite"),
    (lambda: Attention(16, 2, coupling="euler:step_per=token"), "unknown-step-per"),
    (lambda: Attention(16, 2, coupling="affine:bound=-1"), "bad-bound"),
    (lambda: Attention(16, 2, circuit="CACO"), "collapsed-circuit-rope"),
    (lambda: Attention(16, 2, circuit="FAFA", rope=False), "unknown-circuit"),
    (lambda: Attention(16, 2, circuit="CAFO", rope=False, bias=True), "collapsed-circuit-bias"),
    (lambda: Attention(16, 2, circuit="CAFO", rope=False, init="symmetric"), "init-needs-factorized"),
    (
        lambda: Attention(16, 2, circuit="CAFO", rope=False, coupling="drift").merge(),
        "merge-collapsed-circuit",
    ),
    (lambda: Attention(15, 3, scoring="differential", rope=False), "differential-odd-heads"),
    (lambda: Attention(16, 2, init="gtp2"), "unknown-init"),
    (lambda: Attention(16, 2, init="symmetric=x"), "bad-init-strength"),
    (lambda: Attention(16, 2, rope={"scaling": "log"}), "unknown-scaling"),
    (lambda: Attention(16, 2, rope={"base": -1.0}), "bad-rope"),
    (lambda: Attention(16, 2, rope={"bse": 1.0}), "unknown-key"),
    (lambda: Attention(16, 2, rope={"factor": "fast"}), "wrong-type"),
    (lambda: Attention(16, 2, rope=10_000.0), "not-a-mapping"),
    (lambda: Attention(16, 2, coupling="euler:hidden=2.5"), "bad-option-value"),
    (lambda: Attention(16, 2, coupling=None), "bad-spec"),
    (lambda: Attention(16, 2, head_dim=0), "bad-head-dim"),
    (lambda: Attention(16, 2, init="symmetric=nan"), "bad-init-strength"),
    (lambda: Attention(16, 2, qk_norm_gain=1.5), "qk-norm-gain-without-norm"),
    (lambda: Attention(16, 2, qk_norm=True, qk_norm_gain=0.0), "bad-qk-norm-gain"),
    (lambda: Attention(16, 2, qk_norm=True, qk_norm_gain=float("nan")), "bad-qk-norm-gain"),
    (lambda: Attention(16, 2, qk_norm=True, qk_norm_gain="learnt"), "bad-qk-norm-gain"),
    (lambda: preset("tiny", attention={"qk_norm_gain": "learnt"}), "unknown-qk-norm-gain"),
    (lambda: preset("tiny", logit_softcap=0.0), "below-minimum"),
    (lambda: preset("tiny", logit_softcap=float("inf")), "not-finite"),
    (lambda: Attention(16, 2).new_cache(2, -1), "bad-cache-size"),
    (lambda: run_two_tokens(attention_mask=torch.ones(2, 2)), "mask-batch-size"),
    (lambda: run_two_tokens(document_ids=torch.ones(2)), "mask-shape"),
    (lambda: run_two_tokens(positions=torch.ones(2, 2)), "positions-shape"),
    (lambda: preset("tiny", hidden_dim=-5), "below-minimum"),
    (lambda: preset("tiny", norm_eps=float("nan")), "not-finite"),
    (lambda: Attention(16, 2)(torch.randn(2, 16)), "attention-input-shape"),
    (lambda: Attention(16, 2)(torch.randn(1, 4, 12)), "attention-input-shape"),
    (lambda: Attention(16, 2)(torch.randn(1, 4, 16), positions=torch.arange(3)), "positions-length"),
    (lambda: Attention(16, 2)(torch.randn(1, 4, 16), attention_mask=torch.ones(1, 3)), "mask-length"),
    (lambda: Attention(16, 2)(torch.randn(1, 4, 16), document_ids=torch.ones(1, 9)), "mask-length"),
    (lambda: Attention(16, 2, causal=False).new_cache(1, 4), "cache-not-causal"),
    (
        lambda: Attention(16, 2, coupling="euler", causal=False, rope=False)(
            torch.randn(1, 4, 16), context=torch.randn(1, 5, 16)
        ),
        "coupling-cross-attention",
    ),
    (
        lambda: Attention(16, 2)(torch.randn(1, 4, 16), context=torch.randn(1, 5, 16)),
        "cross-attention-positions",
    ),
    (lambda: couplings.build("euler", HeadShapes(4, 3, 3, 8, 8, 4, 8)), "heads-not-divisible"),
    (
        lambda: couplings.build("euler", HeadShapes(2, 2, 2, 8, 8, 2, 8)).inverse(
            *[torch.zeros(1, 1, 2, 8)] * 2
        ),
        "no-inverse",
    ),
    (lambda: preset("tinny"), "unknown-preset"),
    (lambda: preset("tiny", widht=3), "unknown-key"),
    (lambda: preset("tiny", attention={"copling": "euler"}), "unknown-key"),
    (lambda: ModelConfig(1, 1, 8, 2, feed_forward="relu"), "unknown-feed-forward"),
    (lambda: preset("tiny", n_layers=0), "below-minimum"),
    (
        lambda: Decoder(preset("tiny", vocab_size=8), seed=0)(torch.zeros(4, dtype=torch.long)),
        "token-ids-shape",
    ),
    (lambda: initialize(Attention(8, 2), "unknown-init"), "unknown-init"),
]


@pytest.mark.parametrize(("act", "code"), CASES)
def test_input_error_code(act: Callable[[], object], code: str) -> None:
    with raises_code(code) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_duplicate_part_name() -> None:
    registry: Registry[object] = Registry("part", "qkflow.attention.couplings", "nothing")

    class First:
        name = "same"

    class Second:
        name = "same"

    registry.register(First)
    with raises_code("duplicate-name"):
        registry.register(Second)
