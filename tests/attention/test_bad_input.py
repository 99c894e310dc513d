"""Bad input gets one clear sentence."""

from __future__ import annotations

import pytest
import torch

from qkflow import Attention
from qkflow.attention import couplings, initialize
from qkflow.attention.heads import HeadShapes
from qkflow.attention.registry import Registry
from qkflow.models import Decoder, ModelConfig, preset


def two_tokens(**given: torch.Tensor) -> torch.Tensor:
    return Attention(16, 2)(torch.randn(3, 2, 16), **given)


CASES = [
    (lambda: Attention(10, 3), "width 10 does not divide into 3 heads"),
    (lambda: Attention(16, 4, n_kv_heads=3), "4 heads cannot share 3 key/value heads evenly"),
    (lambda: Attention(16, 0), "must all be at least 1"),
    (lambda: Attention(16, 2, window=0), "window must hold at least one token"),
    (lambda: Attention(16, 2, dropout=1.5), "dropout must lie in"),
    (lambda: Attention(6, 2), "head size must be even"),
    (lambda: Attention(16, 2, coupling="leapfrg"), "did you mean 'leapfrog'"),
    (lambda: Attention(16, 2, scoring="sofmax"), "did you mean 'softmax'"),
    (lambda: Attention(16, 2, coupling="euler:stps=3"), "did you mean 'steps'"),
    (lambda: Attention(16, 2, coupling="none:n=3"), "takes no options"),
    (lambda: Attention(16, 2, coupling="euler:n"), "write options as name:option=value"),
    (lambda: Attention(16, 2, coupling="euler:n=0"), "at least 1"),
    (lambda: Attention(16, 2, coupling="euler:n=1.5"), "must be a whole number, not '1.5'"),
    (lambda: Attention(16, 2, coupling="euler:n=many"), "must be a whole number, not 'many'"),
    (lambda: Attention(16, 2, coupling="leapfrog:conservative=7"), "must be true or false, not '7'"),
    (lambda: Attention(16, 2, coupling="euler:hidden=0"), "hidden size of a coupling network"),
    (lambda: Attention(16, 2, coupling="drift:step=nan"), "finite number"),
    (lambda: Attention(16, 2, coupling="euler:step=Infinity"), "finite number"),
    (lambda: Attention(16, 2, coupling="euler:step_per=token"), "per 'head' or per 'layer'"),
    (lambda: Attention(16, 2, coupling="affine:bound=-1"), "bound of the affine scale"),
    (lambda: Attention(16, 2, circuit="CACO"), "use rope=False"),
    (lambda: Attention(16, 2, circuit="FAFA", rope=False), "unknown circuit 'FAFA'"),
    (lambda: Attention(16, 2, circuit="CAFO", rope=False, bias=True), "has no bias"),
    (lambda: Attention(16, 2, circuit="CAFO", rope=False, init="symmetric"), "W_Q and W_K"),
    (lambda: Attention(16, 2, circuit="CAFO", rope=False, coupling="drift").merge(), "no key projection"),
    (lambda: Attention(15, 3, scoring="differential", rope=False), "must be even"),
    (lambda: Attention(16, 2, init="gtp2"), "did you mean 'gpt2'"),
    (lambda: Attention(16, 2, init="symmetric=x"), "'x' is not a number"),
    (lambda: Attention(16, 2, rope={"scaling": "log"}), "unknown rope.scaling 'log'"),
    (lambda: Attention(16, 2, rope={"base": -1.0}), "must be positive"),
    (lambda: Attention(16, 2, rope={"bse": 1.0}), "unknown key of rope 'bse'"),
    (lambda: Attention(16, 2, rope={"factor": "fast"}), "rope.factor must be a number"),
    (lambda: Attention(16, 2, rope=10_000.0), "'rope' must be a mapping"),
    (lambda: Attention(16, 2, coupling="euler:hidden=2.5"), "hidden must be a whole number, not '2.5'"),
    (lambda: Attention(16, 2, coupling=None), "name a part by its text"),
    (lambda: Attention(16, 2, head_dim=0), "head size must be at least 1"),
    (lambda: Attention(16, 2, init="symmetric=nan"), "must be a finite number"),
    (lambda: Attention(16, 2).new_cache(2, -1), "cannot hold -1 tokens"),
    (lambda: two_tokens(attention_mask=torch.ones(2, 2)), "padding is for 2 sequences, but there are 3"),
    (lambda: two_tokens(document_ids=torch.ones(2)), r"documents must have the shape \(batch, tokens\)"),
    (lambda: two_tokens(positions=torch.ones(2, 2)), r"positions are \(tokens\) or \(batch, tokens\)"),
    (lambda: preset("tiny", hidden_dim=-5), "model.hidden_dim must be at least 1"),
    (lambda: preset("tiny", norm_eps=float("nan")), "model.norm_eps must be a number above zero"),
    (lambda: Attention(16, 2)(torch.randn(2, 16)), r"shape \(batch, tokens, 16\), not \(2, 16\)"),
    (lambda: Attention(16, 2)(torch.randn(1, 4, 12)), r"not \(1, 4, 12\)"),
    (lambda: Attention(16, 2)(torch.randn(1, 4, 16), positions=torch.arange(3)), "positions covers 3 tokens"),
    (
        lambda: Attention(16, 2)(torch.randn(1, 4, 16), attention_mask=torch.ones(1, 3)),
        "padding covers 3 tokens",
    ),
    (lambda: Attention(16, 2)(torch.randn(1, 4, 16), document_ids=torch.ones(1, 9)), "documents covers 9"),
    (lambda: Attention(16, 2, causal=False).new_cache(1, 4), "this layer is bidirectional"),
    (
        lambda: Attention(16, 2, coupling="euler", causal=False, rope=False)(
            torch.randn(1, 4, 16), context=torch.randn(1, 5, 16)
        ),
        "cross-attention no token has both",
    ),
    (
        lambda: Attention(16, 2)(torch.randn(1, 4, 16), context=torch.randn(1, 5, 16)),
        "causal=False and rope=False",
    ),
    (lambda: couplings.build("euler", HeadShapes(4, 3, 3, 8, 8, 4, 8)), "cannot be shared out"),
    (
        lambda: couplings.build("euler", HeadShapes(2, 2, 2, 8, 8, 2, 8)).inverse(
            *[torch.zeros(1, 1, 2, 8)] * 2
        ),
        "no inverse",
    ),
    (lambda: preset("tinny"), "did you mean 'tiny'"),
    (lambda: preset("tiny", widht=3), "did you mean 'width'"),
    (lambda: preset("tiny", attention={"copling": "euler"}), "did you mean 'coupling'"),
    (lambda: ModelConfig(1, 1, 8, 2, feed_forward="relu"), "unknown feed-forward"),
    (lambda: preset("tiny", n_layers=0), "model.n_layers must be at least 1"),
    (
        lambda: Decoder(preset("tiny", vocab_size=8), seed=0)(torch.zeros(4, dtype=torch.long)),
        "token ids of shape",
    ),
    (lambda: initialize(Attention(8, 2), "fan_in+gpt2"), "unknown start"),
]


@pytest.mark.parametrize(("act", "message"), CASES, ids=[message for _, message in CASES])
def test_one_clear_sentence(act: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        act()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_two_parts_of_one_name_are_refused() -> None:
    registry: Registry[object] = Registry("part", "qkflow.attention.couplings", "nothing")

    class First:
        name = "same"

    class Second:
        name = "same"

    registry.register(First)
    with pytest.raises(ValueError, match="two parts are named 'same'"):
        registry.register(Second)
