"""Pooling and feedback against their definitions, and by perturbation: nothing of the future gets through."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from qkflow.attention.masks import build_mask
from qkflow.errors import InputError
from qkflow.models.slow_path.pooling import (
    PackedBlockPooling,
    UniformBlockPooling,
    build_block_pooling,
    check_ratio,
)

RATIOS = st.sampled_from([2, 3, 4, 8])


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def documents(draw):
    """Document ids (B, T) in rows of equal length, each cut at its own places."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    cuts = [draw(st.sets(st.integers(1, T), max_size=5)) for _ in range(B)]
    return torch.tensor([[sum(cut <= t for cut in row) for t in range(T)] for row in cuts])


def spans(row):
    """(first, past the last) token of each document in one row of ids."""
    edges = [0, *[t for t in range(1, len(row)) if row[t] != row[t - 1]], len(row)]
    return list(pairwise(edges))


def textbook_pool(x, ids, P):
    """Block means of each row, as a list, by the definition."""
    return [
        [
            row[start : min(start + P, end)].mean(0)
            for first, end in spans(ids[b])
            for start in range(first, end, P)
        ]
        for b, row in enumerate(x)
    ]


def textbook_feedback(u, ids, P):
    out = torch.zeros(len(ids), len(ids[0]), u.shape[-1], dtype=u.dtype)
    for b, row in enumerate(ids):
        before = 0  # blocks of earlier documents
        for first, end in spans(row):
            for t in range(first, end):
                block = (t - first + 1) // P - 1
                if block >= 0:
                    out[b, t] = u[b, before + block]
            before += -(-(end - first) // P)
    return out


@given(documents(), RATIOS)
@settings(deadline=None)
def test_packed_blocks_follow_the_definition(ids, P):
    layout = build_block_pooling(ids.shape[1], P, ids)
    x = numbers(*ids.shape, 3)
    expected = textbook_pool(x, ids.tolist(), P)
    pooled = layout.pool(x)
    assert layout.n_blocks == max(len(row) for row in expected)
    for b, row in enumerate(expected):
        torch.testing.assert_close(pooled[b, : len(row)], torch.stack(row))
        assert bool((pooled[b, len(row) :] == 0).all())
    u = numbers(len(ids), layout.n_blocks, 2, seed=1)
    assert torch.equal(layout.upsample(u), textbook_feedback(u, ids.tolist(), P))


@given(st.integers(1, 3), st.integers(1, 40), RATIOS)
@settings(deadline=None)
def test_plain_blocks_are_packed_blocks_of_one_document(B, T, P):
    plain, packed = build_block_pooling(T, P), build_block_pooling(T, P, torch.zeros(B, T, dtype=torch.long))
    x, u = numbers(B, T, 3), numbers(B, plain.n_blocks, 2, seed=1)
    assert plain.n_blocks == packed.n_blocks == -(-T // P)
    torch.testing.assert_close(plain.pool(x), packed.pool(x))
    assert torch.equal(plain.upsample(u), packed.upsample(u))
    assert plain.document_ids is None
    assert torch.equal(packed.document_ids, torch.ones(B, plain.n_blocks, dtype=torch.long))


def through(layout, x):
    """Token rate → block rate → attention over blocks → token rate: the slow path with its gate wide open."""
    y = layout.pool(x)
    mask = build_mask(layout.count, layout.count, causal=True, document_ids=layout.documents)
    heads = y[:, None]
    y = scaled_dot_product_attention(
        heads, heads, heads, attn_mask=mask.to_bool(layout.count, layout.count, y.device)
    )
    return layout.feedback(y[:, 0])


@given(documents(), RATIOS, st.data())
@settings(max_examples=200, deadline=None)
def test_a_token_reaches_its_own_document_from_the_end_of_its_block_on_and_nothing_else(ids, P, data):
    B, T = ids.shape
    layout = build_block_pooling(T, P, ids) if data.draw(st.booleans()) else None
    if layout is None:
        ids, layout = torch.zeros_like(ids), build_block_pooling(T, P)
    b, t = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, T - 1))
    x = numbers(B, T, 4)
    changed = x.clone()
    changed[b, t] += 1
    differs = (through(layout, x) != through(layout, changed)).any(-1)
    first, end = next(span for span in spans(ids[b].tolist()) if span[0] <= t < span[1])
    expected = torch.zeros(B, T, dtype=torch.bool)
    expected[b, first + ((t - first) // P + 1) * P - 1 : end] = True
    assert torch.equal(differs, expected)


def test_low_precision_keeps_its_type_and_sums_in_float32():
    dtype = torch.bfloat16
    x = numbers(2, 150, 3, dtype=dtype) + 10
    exact = UniformBlockPooling(150, 64).pool(x.double()).to(dtype)
    for pooled in (UniformBlockPooling(150, 64).pool(x), PackedBlockPooling(torch.zeros(2, 150), 64).pool(x)):
        assert pooled.dtype == dtype
        # at most one unit in the last place, where a running bf16 sum would be off by many
        torch.testing.assert_close(pooled, exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_a_fixed_count_adds_blocks_nobody_reads():
    ids = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    x = numbers(2, 5, 3)
    exact, roomy = PackedBlockPooling(ids, 2), PackedBlockPooling(ids, 2, n_blocks=5)
    assert exact.n_blocks == 3
    torch.testing.assert_close(through(roomy, x), through(exact, x))
    assert roomy.document_ids.tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 0, 0]]


def test_gradients_reach_exactly_the_tokens_of_completed_blocks():
    x = numbers(1, 7, 2).requires_grad_()
    layout = UniformBlockPooling(7, 3)
    layout.feedback(layout.pool(x)).sum().backward()
    assert (x.grad[0, :, 0] != 0).tolist() == [True] * 6 + [False]
    torch.autograd.gradcheck(
        lambda x: through(PackedBlockPooling(torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), 3), x), x
    )


def test_pooling_compiles_as_one_graph():
    def run(x):
        layout = UniformBlockPooling(x.shape[1], 4)
        return layout.feedback(layout.pool(x))

    x = numbers(2, 10, 3)
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


def test_bad_ratios_and_shapes_are_refused():
    for make in (
        lambda: UniformBlockPooling(8, 1),
        lambda: PackedBlockPooling(torch.zeros(1, 8), 0),
        lambda: UniformBlockPooling(8, 2.5),
    ):
        with pytest.raises(InputError, match="at least 2"):
            make()
    with pytest.raises(InputError, match="P = 9 is longer than the 8 tokens"):
        check_ratio(9, 8)
    check_ratio(8, 8)
    with pytest.raises(InputError, match=r"shape \(batch, 8\)"):
        build_block_pooling(8, 2, torch.zeros(1, 7))
