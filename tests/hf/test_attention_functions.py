from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from families import output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf


def scored(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Eager attention that applies only the mask it receives."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def leaks(implementation: str) -> bool:
    model = tiny("llama")
    model.set_attn_implementation(implementation)
    ids, changed = token_ids(), token_ids()
    changed[:, -1] = (changed[:, -1] + 1) % 90 + 3
    return not torch.equal(output(model, ids)[:, :-1], output(model, changed)[:, :-1])


def test_registered_attention_is_causal() -> None:
    hf.register_attention("test_scored", scored, mask="eager")
    assert not leaks("test_scored")
    model = tiny("llama")
    expected = output(model, token_ids())
    model.set_attn_implementation("test_scored")
    torch.testing.assert_close(output(model, token_ids()), expected)


def test_attention_without_mask_is_not_causal() -> None:
    """`register_attention` exists because of this; if this test fails, it is no longer needed."""
    from transformers import AttentionInterface

    AttentionInterface.register("test_unmasked", scored)
    assert leaks("test_unmasked")


def test_invalid_mask_is_refused() -> None:
    with raises_code("unknown-mask"):
        hf.register_attention("x", scored, mask="sdpaa")
    with raises_code("not-callable"):
        hf.register_attention("x", scored, mask=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mask"):
        hf.register_attention("x", scored)  # type: ignore[call-arg]
