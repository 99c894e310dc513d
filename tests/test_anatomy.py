from __future__ import annotations

import pytest
import torch
from torch import nn

from families import FUSED, tiny, token_ids
from qkflow.anatomy import Layout, fold_drift, outputs_first, self_attentions
from qkflow.attention.heads import Heads
from qkflow.errors import InputError


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (6, 2), (3, 1)])
def test_a_layout_cuts_and_joins(grouped: bool, queries: int, keys: int) -> None:
    layout = Layout(Heads(queries, keys, keys, 5, 5, queries, 5), grouped)
    fused = torch.randn(2, 3, (queries + 2 * keys) * 5)
    q, k, v = layout.split(fused)
    assert q.shape == (2, 3, queries, 5)
    assert k.shape == v.shape == (2, 3, keys, 5)
    assert torch.equal(layout.join(q, k, v), fused)
    for part, rows in zip((q, k, v), layout.rows(), strict=True):
        assert torch.equal(part.flatten(-2), fused[..., rows])


@pytest.mark.parametrize(
    ("family", "grouped"),
    [
        ("gpt2", False),
        ("gpt_bigcode", True),  # the same name c_attn, cut in another way
        ("gpt_neox", True),
        ("falcon", True),
        ("phi3", False),
        ("modernbert", False),
    ],
)
def test_the_model_tells_how_its_fused_projection_is_cut(family: str, grouped: bool) -> None:
    model = tiny(family).train()
    sites = self_attentions(model)
    assert all(site.layout is not None and site.layout.grouped is grouped for site in sites)
    assert all(module.training for module in model.modules()), "asking leaves no trace"


@pytest.mark.parametrize("family", FUSED)
def test_fused_queries_are_the_ones_other_tokens_never_read(family: str) -> None:
    """Checked through the whole layer by gradients, independently of how the layout was found."""
    model = tiny(family)
    site = self_attentions(model)[0]
    kept: dict[str, torch.Tensor] = {}

    def keep(_: nn.Module, __: object, out: torch.Tensor) -> torch.Tensor:
        kept["fused"] = out.detach().requires_grad_()
        return kept["fused"]

    def read(_: nn.Module, __: object, out: object) -> None:
        kept["out"] = out if isinstance(out, torch.Tensor) else out[0]

    site.module.get_submodule(site.q).register_forward_hook(keep)
    site.module.register_forward_hook(read)
    model(input_ids=token_ids(1, 4))
    kept["out"][:, -1].square().sum().backward()
    first = kept["fused"].grad[0, 0]
    q, k, v = site.layout.rows()
    assert not first[q].any()
    assert (first[k] != 0).float().mean() > 0.9
    assert (first[v] != 0).float().mean() > 0.9


def test_a_model_that_cannot_be_run_is_refused_where_it_must_be() -> None:
    class Attention(nn.Module):
        head_dim, num_heads = 4, 2

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

    with pytest.raises(InputError, match=r"could not be run on 2 tokens to learn how it is cut"):
        self_attentions(nn.Sequential(Attention()))


def test_a_drift_folds_into_weights_and_biases() -> None:
    class Attention(nn.Module):
        head_dim, num_heads = 4, 4

        def __init__(self, query_bias: bool = True) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 16, bias=query_bias), nn.Linear(8, 8)

    site = self_attentions(nn.Sequential(Attention()))[0]
    q, k = site.module.q_proj, site.module.k_proj
    x, amount = torch.randn(3, 8), torch.tensor([0.5, -1.0, 2.0, 0.0])
    with torch.no_grad():
        keys = k(x).view(3, 2, 4).repeat_interleave(2, 1)
        expected = (q(x).view(3, 4, 4) + amount[:, None] * keys).flatten(1)
        fold_drift(site, amount)
        torch.testing.assert_close(q(x), expected)
    unbalanced = self_attentions(nn.Sequential(Attention(query_bias=False)))[0]
    with pytest.raises(InputError, match=r"keys have a bias and queries none"):
        fold_drift(unbalanced, amount)


def test_weights_come_outputs_first() -> None:
    c_attn = tiny("gpt2").transformer.h[0].attn.c_attn
    assert outputs_first(c_attn).shape == (192, 64)
    assert outputs_first(c_attn).data_ptr() == c_attn.weight.data_ptr()
