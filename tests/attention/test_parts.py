"""Rotary embedding, masks, cache, merging, and preparation for inference."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from input_errors import raises_code
from parts import scatter
from qkflow.attention import Attention, RotaryEmbedding, merge
from qkflow.attention.init import initialize
from qkflow.attention.masks import build_mask, document_positions
from qkflow.attention.rope import apply_rope
from qkflow.models import Decoder, preset


def test_rope_rotates_pairs() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    rope = RotaryEmbedding()
    rotated = apply_rope(x, rope.rotation(torch.arange(5), 8, torch.float64))
    angles = torch.arange(5, dtype=torch.float64)[:, None] * rope.frequencies(8)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotated, torch.cat((pairs.real, pairs.imag), -1), rtol=0, atol=1e-14)


def test_rope_scores_depend_on_distance() -> None:
    rope = RotaryEmbedding(base=100.0)
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(t: int, s: int) -> float:
        rotations = [rope.rotation(torch.tensor([p]), 16, torch.float64) for p in (t, s)]
        return float((apply_rope(q, rotations[0]) * apply_rope(k, rotations[1])).sum())

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-12)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)


def test_rope_matches_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=512, rope_parameters=parameters
    )
    positions = torch.arange(300)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    q = torch.randn(1, 2, 300, 16)
    theirs, _ = apply_rotary_pos_emb(q, q, cos, sin)
    rope = RotaryEmbedding(scaling="llama3", factor=8.0, original_max_position_embeddings=64)
    ours = apply_rope(q.transpose(1, 2), rope.rotation(positions, 16, torch.float32)).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def test_rope_scaling() -> None:
    plain = RotaryEmbedding().frequencies(64)
    torch.testing.assert_close(RotaryEmbedding(scaling="linear", factor=4.0).frequencies(64), plain / 4)
    ntk = RotaryEmbedding(scaling="ntk", factor=4.0).frequencies(64)
    assert ntk[0].item() == pytest.approx(plain[0].item())
    assert ntk[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-6)


def test_positions_argument() -> None:
    layer = Attention(16, 2, dtype=torch.float64, init="fan_in")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    shifted = layer(x, positions=torch.arange(7, 12))
    torch.testing.assert_close(shifted, layer(x), rtol=0, atol=1e-12)
    spread = layer(x, positions=torch.tensor([0, 2, 4, 6, 8]))
    assert not torch.allclose(spread, layer(x))


def test_document_positions_restart() -> None:
    documents = torch.tensor([[4, 4, 4, 9, 9, 4, 4]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0, 1]]


@pytest.mark.parametrize("window", [None, 3])
def test_causal_and_window_mask(window: int | None) -> None:
    mask = build_mask(4, 6, causal=True, window=window)
    matrix = mask.to_bool(4, 6, torch.device("cpu"))
    for query in range(4):
        for key in range(6):
            distance = (query + 2) - key
            assert bool(matrix[query, key]) == (0 <= distance < (window or math.inf))


def test_plain_causal_mask_has_no_tensor() -> None:
    assert build_mask(8, 8, causal=True).allowed is None
    assert build_mask(1, 8, causal=True).allowed is None


def test_cache_overflow() -> None:
    layer = Attention(16, 2)
    cache = layer.new_cache(1, 4)
    layer(torch.randn(1, 3, 16), cache=cache)
    with raises_code("cache-full"):
        layer(torch.randn(1, 2, 16), cache=cache)
    assert cache.length == 3


def test_cache_reorder_and_crop() -> None:
    layer = Attention(16, 2, dtype=torch.float64).eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    cache = layer.new_cache(2, 5)
    layer(x[:, :4], cache=cache)
    last = layer(x[:, 4:], cache=cache)
    cache.crop(4)
    cache.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(layer(x[:, 4:].flip(0), cache=cache).flip(0), last, rtol=0, atol=1e-12)


def test_merged_drift_loads_into_standard_model() -> None:
    config = preset("tiny", vocab_size=32, n_layers=2, n_kv_heads=2, attention={"coupling": "drift"})
    model = Decoder(config, seed=0, dtype=torch.float64)
    ids = torch.randint(32, (2, 9))
    before = model(ids)
    merge(model)
    plain = Decoder(preset("tiny", vocab_size=32, n_layers=2, n_kv_heads=2), seed=1, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(ids), before, rtol=0, atol=1e-12)


def test_dropout_only_in_training() -> None:
    layer = Attention(16, 2, dropout=0.5)
    x = torch.randn(1, 6, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_cross_attention() -> None:
    layer = Attention(16, 2, causal=False, rope=False, dtype=torch.float64)
    x, context = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(2, 7, 16, dtype=torch.float64)
    out, weights = layer.reference(x, context=context)
    assert weights.shape == (2, 2, 3, 7)
    torch.testing.assert_close(layer(x, context=context), out, rtol=0, atol=1e-12)


def test_repeated_document_id_starts_a_new_document() -> None:
    layer = Attention(16, 2, dtype=torch.float64)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    returning = layer(x, document_ids=torch.tensor([[0, 0, 1, 1, 0, 0]]))
    torch.testing.assert_close(returning, layer(x, document_ids=torch.tensor([[0, 0, 1, 1, 2, 2]])))


@pytest.mark.parametrize("coupling", ["none", "drift", "euler", "leapfrog:n=3", "affine", "uncoupled"])
def test_prepare_for_inference_is_explicit_and_undone_by_train(coupling: str) -> None:
    layer = Attention(16, 4, n_kv_heads=2, coupling=coupling, dtype=torch.float64).eval()
    scatter(layer, 0.2)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        regular = layer(x)
        assert not layer.is_prepared
        assert layer.prepare_for_inference().is_prepared
        torch.testing.assert_close(layer(x), regular, rtol=0, atol=1e-12)
        scatter(layer, 0.2)
        prepared = layer.prepare_for_inference()(x)  # from the new weights
        assert not torch.allclose(prepared, regular)
        layer.train().eval()
        assert not layer.is_prepared
        torch.testing.assert_close(layer(x), prepared, rtol=0, atol=1e-12)
    layer.prepare_for_inference()
    layer(x).sum().backward()  # with gradients the regular forward runs
    assert all(p.grad is not None for p in layer.qk.parameters())


def test_loading_moving_and_init_release_the_prepared_projection() -> None:
    layer = Attention(16, 2, coupling="euler").eval()
    acts: tuple[Callable[[], object], ...] = (
        lambda: layer.load_state_dict(layer.state_dict()),
        layer.double,
        lambda: initialize(layer, "fan_in", seed=1),
        lambda: copy.deepcopy(layer),
    )
    for act in acts:
        layer.prepare_for_inference()
        result = act()
        assert not (result if isinstance(result, Attention) else layer).is_prepared


@pytest.mark.parametrize("name", ["qk.q", "qk", "ov.v", "coupling"])
def test_layers_with_hooks_or_adapters_are_not_prepared(name: str) -> None:
    layer = Attention(16, 2, coupling="drift").eval()
    layer.get_submodule(name).register_forward_hook(lambda module, args, out: out)
    assert not layer.prepare_for_inference().is_prepared


def test_fixed_step_of_another_dtype_is_not_prepared() -> None:
    layer = Attention(16, 2, coupling="drift:learn_step=false", dtype=torch.bfloat16).eval()
    layer.coupling.float()
    x = torch.randn(1, 3, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        regular = layer(x)
        assert torch.equal(layer.prepare_for_inference()(x), regular)


def test_sharded_or_quantized_weights_are_not_prepared() -> None:
    class Quantized(torch.Tensor):
        pass

    layer = Attention(16, 2, coupling="euler").eval()
    layer.qk.k.weight = nn.Parameter(layer.qk.k.weight.detach().as_subclass(Quantized), requires_grad=False)
    assert not layer.prepare_for_inference().is_prepared


def test_refused_merge_leaves_the_model_unchanged() -> None:
    options = {"slow": {"ratio": 2, "attention": {"coupling": "euler"}}, "attention": {"coupling": "drift"}}
    model = Decoder(preset("tiny", vocab_size=20, n_layers=2, dim=16, n_heads=2, **options), seed=0)
    before = copy.deepcopy(model.state_dict())
    with raises_code("merge-not-linear"):
        merge(model)
    assert model.blocks[0].attention.coupling_spec.name == "drift"  # type: ignore[union-attr]
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_nonlinear_couplings_do_not_merge() -> None:
    with raises_code("merge-not-linear"):
        Attention(16, 2, coupling="euler").merge()


def test_prepare_for_inference_needs_eval_mode() -> None:
    with raises_code("not-in-eval-mode"):
        Attention(16, 2, coupling="euler").prepare_for_inference()
