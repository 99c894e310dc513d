"""Windows: each once per epoch, a pure function of (seed, step), divided among ranks; exact byte counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from input_errors import raises_code
from qkflow.data.windows import EvalWindows, TrainWindows, document_ids, feistel_permutation


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_feistel_is_a_permutation(size: int, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 2**64, 6, dtype=np.uint64)
    assert sorted(feistel_permutation(np.arange(size), size, keys).tolist()) == list(range(size))


@given(
    count=st.integers(2, 600),
    length=st.integers(1, 40),
    batch=st.integers(1, 9),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_epoch_has_every_window_once(count: int, length: int, batch: int, seed: int, epoch: int) -> None:
    if count < length + 1:
        return
    windows = TrainWindows(np.arange(count), length, batch, seed)
    size = windows.windows_per_epoch
    first, last = epoch * size // batch, ((epoch + 1) * size - 1) // batch
    starts = np.concatenate([windows.starts(step) for step in range(first, last + 1)])
    starts = np.sort(starts[epoch * size - first * batch :][:size])
    assert np.all(np.diff(starts) == length)  # distinct and consecutive
    assert starts[0] >= 0
    assert starts[-1] + length + 1 <= count
    assert size >= count // length - 2  # at most two windows are left out


def test_window_tokens_are_consecutive() -> None:
    batch = TrainWindows(np.arange(1000, dtype=np.uint16), 7, 5, seed=3).batch(11)
    assert batch.shape == (5, 8)
    assert batch.dtype == np.int64
    assert np.all(np.diff(batch, axis=1) == 1)


def test_batch_is_a_pure_function_of_seed_and_step() -> None:
    tokens = np.arange(10_000)
    one, other = TrainWindows(tokens, 16, 4, seed=1), TrainWindows(tokens, 16, 4, seed=1)
    backwards = {step: other.batch(step) for step in reversed(range(400))}
    assert all(np.array_equal(one.batch(step), backwards[step]) for step in range(400))
    assert not np.array_equal(one.batch(0), TrainWindows(tokens, 16, 4, seed=2).batch(0))


def test_epochs_differ_in_order_and_offset() -> None:
    windows = TrainWindows(np.arange(10_000), 32, 1, seed=0)
    epochs = [
        np.concatenate(
            [windows.starts(epoch * windows.windows_per_epoch + i) for i in range(windows.windows_per_epoch)]
        )
        for epoch in range(6)
    ]
    assert len({int(starts[0] % 32) for starts in epochs}) > 3
    orders = [tuple(np.argsort(starts)) for starts in epochs]
    assert len(set(orders)) == 6
    # Neither a rotation nor a stride: consecutive windows of an epoch are not adjacent in the text.
    assert all(np.mean(np.abs(np.diff(order)) == 1) < 0.05 for order in orders)


ORDER_OF_SEED_42 = [6898, 8608, 7968, 6828, 3938, 1058]


def test_order_of_a_seed_is_fixed() -> None:
    windows = TrainWindows(np.arange(10_000), 10, 6, seed=42)
    assert windows.starts(0).tolist() == ORDER_OF_SEED_42


@given(world=st.sampled_from([1, 2, 3, 6]), step=st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_ranks_divide_the_global_batch(world: int, step: int) -> None:
    tokens = np.arange(2000)
    whole = TrainWindows(tokens, 8, 12, seed=5).batch(step)
    parts = [
        TrainWindows(tokens, 8, 12, seed=5, rank=rank, world_size=world).batch(step) for rank in range(world)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


def test_huge_corpus_needs_no_table() -> None:
    class Endless:
        def __len__(self) -> int:
            return 10**13

    starts = TrainWindows(Endless(), 1024, 8, seed=0).starts(10**7)  # type: ignore[arg-type]
    assert len(set(starts.tolist())) == 8
    assert np.all((starts >= 0) & (starts < 10**13))


@given(count=st.integers(1, 300), length=st.integers(1, 50), batch=st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_eval_windows_have_every_token_as_target_once(count: int, length: int, batch: int) -> None:
    tokens = np.arange(count) + 5
    windows = EvalWindows(tokens, length, batch, token_bytes=np.arange(count + 5))
    batches = list(windows)
    assert len(batches) == len(windows)
    inputs = np.concatenate([i.ravel() for i, _ in batches])
    targets = np.concatenate([t.ravel() for _, t in batches])
    real = targets != -100
    assert targets[real].tolist() == tokens.tolist()
    assert inputs[real].tolist() == [tokens[-1], *tokens[:-1]]
    assert windows.n_targets == count
    assert windows.n_target_bytes == tokens.sum()


def test_max_tokens_spreads_windows_and_counts_bytes() -> None:
    tokens = np.arange(1000)
    windows = EvalWindows(tokens, 10, 4, max_tokens=100, token_bytes=np.arange(1000))
    targets = np.concatenate([t.ravel() for _, t in windows])
    assert windows.n_targets == len(targets) == 100
    assert windows.n_target_bytes == targets.sum()
    assert targets[0] == 0
    assert targets[-1] == 909
    assert len(set(targets.tolist())) == 100


def test_document_ids_include_the_eos_token() -> None:
    inputs = np.array([[7, 9, 7, 7, 9, 9], [9, 7, 7, 7, 7, 7]])
    assert document_ids(inputs, 9).tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]


@given(st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_document_ids_never_return_to_an_earlier_document(rows: list[list[int]]) -> None:
    ids = document_ids(np.array(rows), 0)
    steps = np.diff(ids, axis=1)
    assert np.all(ids[:, 0] == 0)
    assert np.all((steps == 0) | (steps == 1))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"seq_len": 10}, "text-too-short"),
        ({"seq_len": 0}, "invalid-window"),
        ({"batch_size": 4, "world_size": 3}, "batch-not-divisible"),
    ],
)
def test_invalid_windows(options: dict[str, int], code: str) -> None:
    with raises_code(code):
        TrainWindows(np.arange(10), **{"seq_len": 4, "batch_size": 2, "seed": 0, **options})


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    tokens = np.array([0, 1, 2, 3, 9, 1], np.uint16)
    assert TrainWindows(tokens, 5, 1, 0, vocab_size=10).batch(0).max() == 9
    with raises_code("corrupt-token-set"):
        TrainWindows(tokens, 5, 1, 0, vocab_size=9).batch(0)
    with raises_code("corrupt-token-set"):
        EvalWindows(tokens, 4, 2, token_bytes=np.ones(9, np.int32))


def test_empty_split_cannot_be_evaluated() -> None:
    with raises_code("empty-split"):
        EvalWindows(np.arange(0), 4, 2)
