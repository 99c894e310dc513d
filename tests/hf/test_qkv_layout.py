from __future__ import annotations

import pytest
import torch
from torch import nn

from families import FUSED, tiny, token_ids
from input_errors import raises_code
from qkflow.attention.projections import HeadShapes
from qkflow.hf.attention_layers import find_attention_layers
from qkflow.hf.qkv_layout import QKVLayout


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (6, 2), (3, 1)])
def test_layout_split_and_fuse(interleaved: bool, queries: int, keys: int) -> None:
    layout = QKVLayout(HeadShapes(queries, keys, keys, 5, 5, queries, 5), interleaved)
    fused = torch.randn(2, 3, (queries + 2 * keys) * 5)
    q, k, v = layout.split(fused)
    assert q.shape == (2, 3, queries, 5)
    assert k.shape == v.shape == (2, 3, keys, 5)
    assert torch.equal(layout.fuse(q, k, v), fused)
    for part, rows in zip((q, k, v), layout.rows(), strict=True):
        assert torch.equal(part.flatten(-2), fused[..., rows])


@pytest.mark.parametrize(
    ("family", "interleaved"),
    [
        ("gpt2", False),
        ("gpt_bigcode", True),  # the same name c_attn, another column order
        ("gpt_neox", True),
        ("falcon", True),
        ("phi3", False),
        ("modernbert", False),
    ],
)
def test_infer_layout(family: str, interleaved: bool) -> None:
    model = tiny(family).train()
    layers = find_attention_layers(model)
    assert all(layer.layout is not None and layer.layout.interleaved is interleaved for layer in layers)
    assert all(module.training for module in model.modules()), "train mode is restored"


@pytest.mark.parametrize("family", FUSED)
def test_layout_matches_gradients(family: str) -> None:
    """Gradients of the last token: zero for other queries, nonzero for keys and values."""
    model = tiny(family)
    layer = find_attention_layers(model)[0]
    captured: dict[str, torch.Tensor] = {}

    def replace(_: nn.Module, __: object, out: torch.Tensor) -> torch.Tensor:
        captured["fused"] = out.detach().requires_grad_()
        return captured["fused"]

    def read(_: nn.Module, __: object, out: object) -> None:
        captured["out"] = out if isinstance(out, torch.Tensor) else out[0]

    layer.module.get_submodule(layer.q_name).register_forward_hook(replace)
    layer.module.register_forward_hook(read)
    model(input_ids=token_ids(1, 4))
    captured["out"][:, -1].square().sum().backward()
    first = captured["fused"].grad[0, 0]
    q, k, v = layer.layout.rows()
    assert not first[q].any()
    assert (first[k] != 0).float().mean() > 0.9
    assert (first[v] != 0).float().mean() > 0.9


def test_layout_of_a_model_that_fails() -> None:
    class Attention(nn.Module):
        head_dim, num_heads = 4, 2

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

    with raises_code("qkv-probe-failed"):
        _ = find_attention_layers(nn.Sequential(Attention()))[0].layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 50.0])
def test_infer_layout_for_any_weights(scale: float, dtype: torch.dtype) -> None:
    """Neither a zero output projection nor saturated attention hides the layout."""
    model = tiny("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn.c_proj" in name or (scale and "attn." in name):
                parameter.mul_(scale)
    assert not any(layer.layout.interleaved for layer in find_attention_layers(model.to(dtype)))


def test_layout_is_inferred_lazily() -> None:
    class Unread(nn.Module):
        head_dim, num_heads = 16, 4

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

    model = tiny("gpt2")
    model.vision = Unread()
    first, *_, unread = find_attention_layers(model)
    assert not first.layout.interleaved
    with raises_code("qkv-probe-failed"):
        _ = unread.layout
