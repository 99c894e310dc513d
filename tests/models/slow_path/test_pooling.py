"""Block pooling and upsampling against their definitions, and causality under perturbation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from input_errors import raises_code
from qkflow.attention.masks import build_mask
from qkflow.models.slow_path.pooling import (
    BlockPooling,
    PackedBlockPooling,
    UniformBlockPooling,
    build_block_pooling,
    check_ratio,
)

RATIOS = st.sampled_from([2, 3, 4, 8])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def documents(draw: st.DrawFn) -> Tensor:
    """Document ids (B, T) with random boundaries per row."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    cuts = [draw(st.sets(st.integers(1, T), max_size=5)) for _ in range(B)]
    return torch.tensor([[sum(cut <= t for cut in row) for t in range(T)] for row in cuts])


def spans(row: list[int]) -> list[tuple[int, int]]:
    """Half-open token range of each document in one row of ids."""
    edges = [0, *[t for t in range(1, len(row)) if row[t] != row[t - 1]], len(row)]
    return list(pairwise(edges))


def reference_pool(x: Tensor, ids: list[list[int]], P: int) -> list[list[Tensor]]:
    """Block means of each row, by the definition."""
    return [
        [
            row[start : min(start + P, end)].mean(0)
            for first, end in spans(ids[b])
            for start in range(first, end, P)
        ]
        for b, row in enumerate(x)
    ]


def reference_upsample(u: Tensor, ids: list[list[int]], P: int) -> Tensor:
    out = torch.zeros(len(ids), len(ids[0]), u.shape[-1], dtype=u.dtype)
    for b, row in enumerate(ids):
        offset = 0  # blocks of earlier documents
        for first, end in spans(row):
            for t in range(first, end):
                block = (t - first + 1) // P - 1
                if block >= 0:
                    out[b, t] = u[b, offset + block]
            offset += -(-(end - first) // P)
    return out


@given(documents(), RATIOS)
@settings(deadline=None)
def test_packed_pooling_matches_reference(ids: Tensor, P: int) -> None:
    pooling = build_block_pooling(ids.shape[1], P, ids)
    x = randn(*ids.shape, 3)
    expected = reference_pool(x, ids.tolist(), P)
    pooled = pooling.pool(x)
    assert pooling.n_blocks == max(len(row) for row in expected)
    for b, row in enumerate(expected):
        torch.testing.assert_close(pooled[b, : len(row)], torch.stack(row))
        assert bool((pooled[b, len(row) :] == 0).all())
    u = randn(len(ids), pooling.n_blocks, 2, seed=1)
    assert torch.equal(pooling.upsample(u), reference_upsample(u, ids.tolist(), P))


@given(st.integers(1, 3), st.integers(1, 40), RATIOS)
@settings(deadline=None)
def test_uniform_pooling_matches_packed_pooling_of_one_document(B: int, T: int, P: int) -> None:
    plain, packed = build_block_pooling(T, P), build_block_pooling(T, P, torch.zeros(B, T, dtype=torch.long))
    x, u = randn(B, T, 3), randn(B, plain.n_blocks, 2, seed=1)
    assert plain.n_blocks == packed.n_blocks == -(-T // P)
    torch.testing.assert_close(plain.pool(x), packed.pool(x))
    assert torch.equal(plain.upsample(u), packed.upsample(u))
    assert plain.document_ids is None
    assert packed.document_ids is not None
    assert torch.equal(packed.document_ids, torch.ones(B, plain.n_blocks, dtype=torch.long))


def pool_attend_upsample(pooling: BlockPooling, x: Tensor) -> Tensor:
    """Pool, attend over blocks, upsample: the slow path at g = 1."""
    y = pooling.pool(x)
    K = pooling.n_blocks
    mask = build_mask(K, K, causal=True, document_ids=pooling.document_ids)
    heads = y[:, None]
    y = scaled_dot_product_attention(heads, heads, heads, attn_mask=mask.to_bool(K, K, y.device))
    return pooling.upsample(y[:, 0])


@given(documents(), RATIOS, st.data())
@settings(max_examples=200, deadline=None)
def test_perturbation_reaches_only_later_tokens_of_the_document(
    ids: Tensor, P: int, data: st.DataObject
) -> None:
    B, T = ids.shape
    pooling = build_block_pooling(T, P, ids) if data.draw(st.booleans()) else None
    if pooling is None:
        ids, pooling = torch.zeros_like(ids), build_block_pooling(T, P)
    b, t = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, T - 1))
    x = randn(B, T, 4)
    changed = x.clone()
    changed[b, t] += 1
    differs = (pool_attend_upsample(pooling, x) != pool_attend_upsample(pooling, changed)).any(-1)
    first, end = next(span for span in spans(ids[b].tolist()) if span[0] <= t < span[1])
    expected = torch.zeros(B, T, dtype=torch.bool)
    expected[b, first + ((t - first) // P + 1) * P - 1 : end] = True
    assert torch.equal(differs, expected)


def test_bf16_pooling_accumulates_in_float32() -> None:
    dtype = torch.bfloat16
    x = randn(2, 150, 3, dtype=dtype) + 10
    exact = UniformBlockPooling(150, 64).pool(x.double()).to(dtype)
    for pooled in (UniformBlockPooling(150, 64).pool(x), PackedBlockPooling(torch.zeros(2, 150), 64).pool(x)):
        assert pooled.dtype == dtype
        # within one ulp; a running bf16 sum would be off by many
        torch.testing.assert_close(pooled, exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_fixed_n_blocks_pads_with_unread_blocks() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    x = randn(2, 5, 3)
    exact, padded = PackedBlockPooling(ids, 2), PackedBlockPooling(ids, 2, n_blocks=5)
    assert exact.n_blocks == 3
    torch.testing.assert_close(pool_attend_upsample(padded, x), pool_attend_upsample(exact, x))
    assert padded.document_ids is not None
    assert padded.document_ids.tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 0, 0]]


def test_gradients_reach_tokens_of_completed_blocks_only() -> None:
    x = randn(1, 7, 2).requires_grad_()
    pooling = UniformBlockPooling(7, 3)
    pooling.upsample(pooling.pool(x)).sum().backward()
    assert x.grad is not None
    assert (x.grad[0, :, 0] != 0).tolist() == [True] * 6 + [False]
    torch.autograd.gradcheck(
        lambda x: pool_attend_upsample(PackedBlockPooling(torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), 3), x), x
    )


def test_pooling_compiles_fullgraph() -> None:
    def run(x: Tensor) -> Tensor:
        pooling = UniformBlockPooling(x.shape[1], 4)
        return pooling.upsample(pooling.pool(x))

    x = randn(2, 10, 3)
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


def test_invalid_ratios_and_shapes_raise() -> None:
    invalid: tuple[Callable[[], BlockPooling], ...] = (
        lambda: UniformBlockPooling(8, 1),
        lambda: PackedBlockPooling(torch.zeros(1, 8), 0),
        lambda: UniformBlockPooling(8, 2.5),  # type: ignore[arg-type]
    )
    for build in invalid:
        with raises_code("invalid-pooling-ratio"):
            build()
    with raises_code("ratio-exceeds-length"):
        check_ratio(9, 8)
    check_ratio(8, 8)
    with raises_code("document-ids-shape"):
        build_block_pooling(8, 2, torch.zeros(1, 7))
