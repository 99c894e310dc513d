"""Stationary distributions: known closed forms, agreement of the solvers, and what is refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.errors import InputError
from qkflow.papers.fast_slow.master_equation import (
    SOLVERS,
    check_generator,
    communicating_classes,
    condition_number,
    generator_from_rates,
    load_generator,
    random_generator,
    solver_disagreement,
    stationary_distribution,
)

EPS = torch.finfo(torch.float64).eps


def rates(*entries):
    """A generator from (source, target, rate) triples."""
    N = 1 + max(max(source, target) for source, target, _ in entries)
    W = torch.zeros(N, N, dtype=torch.float64)
    for source, target, rate in entries:
        W[target, source] = rate
    return generator_from_rates(W)


@st.composite
def irreducible(draw):
    """A batch of sparse generators over four decades, each with a ring through all its states."""
    N, batch = draw(st.integers(2, 9)), draw(st.sampled_from([(), (3,), (2, 2)]))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = (*batch, N, N)
    W = 10 ** (4 * torch.rand(size, generator=source, dtype=torch.float64) - 2)
    keep = torch.rand(size, generator=source) < draw(st.floats(0, 1))
    ring = torch.randperm(N, generator=source)
    keep[..., ring.roll(1), ring] = True
    return generator_from_rates(W * keep)


@given(irreducible())
@settings(max_examples=100, deadline=None)
def test_all_solvers_find_the_same_distribution_to_rounding(W):
    tolerance = 20 * W.shape[-1] * EPS * float(condition_number(W).max())
    assert solver_disagreement(check_generator(W))["any_two"] <= tolerance
    p = stationary_distribution(W)
    assert p.shape == W.shape[:-1]
    assert bool((p > 0).all())
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
    flow = (W @ p[..., None]).abs().amax() / W.abs().amax()
    assert float(flow) < 1e-13


@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_two_states_split_by_their_rates(method, scale):
    W = scale * rates((0, 1, 3.0), (1, 0, 1.0))
    torch.testing.assert_close(
        stationary_distribution(W, method), torch.tensor([0.25, 0.75], dtype=torch.float64)
    )


@pytest.mark.parametrize("method", SOLVERS)
def test_birth_and_death_obey_detailed_balance(method):
    births, deaths = [2.0, 0.5, 3.0, 1.5], [1.0, 4.0, 0.7, 2.0]
    W = rates(*[(i, i + 1, b) for i, b in enumerate(births)], *[(i + 1, i, d) for i, d in enumerate(deaths)])
    ratios = torch.tensor(births, dtype=torch.float64) / torch.tensor(deaths, dtype=torch.float64)
    expected = torch.cat([torch.ones(1, dtype=torch.float64), ratios.cumprod(0)])
    torch.testing.assert_close(
        stationary_distribution(W, method), expected / expected.sum(), rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("method", SOLVERS)
def test_a_ring_without_detailed_balance_waits_where_leaving_is_slow(method):
    leave = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    W = rates(*[(i, (i + 1) % 3, float(rate)) for i, rate in enumerate(leave)])
    torch.testing.assert_close(
        stationary_distribution(W, method), leave.reciprocal() / leave.reciprocal().sum()
    )


@pytest.mark.parametrize("method", SOLVERS)
def test_gradients_flow_through_every_solver(method):
    free = torch.rand(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    torch.autograd.gradcheck(lambda r: SOLVERS[method](generator_from_rates(r)), free.requires_grad_())


def test_gth_keeps_every_digit_where_the_others_must_refuse():
    slow = 1e-12  # two pairs that hardly meet; by symmetry of the rates each pair holds one half
    W = rates((0, 1, 1.0), (1, 0, 1.0), (2, 3, 2.0), (3, 2, 2.0), (1, 2, slow), (2, 1, slow))
    torch.testing.assert_close(
        stationary_distribution(W, "gth"), torch.full((4,), 0.25).double(), rtol=1e-14, atol=0
    )
    with pytest.raises(InputError, match=r"ill-conditioned.*2 parts, \{0, 1\}, \{2, 3\}.*gth"):
        stationary_distribution(W, "bordered")


def test_gth_survives_ratios_beyond_the_largest_number():
    births = [(i, i + 1, 1e10) for i in range(40)]
    p = stationary_distribution(rates(*births, *[(i + 1, i, 1.0) for i in range(40)]), "gth")
    torch.testing.assert_close(p[-1], torch.tensor(1 - 1e-10, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [(0, 1, 1.0), (1, 0, 1.0), (2, 3, 1.0), (3, 2, 1.0)],
            r"2 closed classes of states, \{0, 1\}, \{2, 3\}",
        ),
        ([(0, 1, 1.0), (0, 2, 1.0)], r"2 closed classes of states, \{1\}, \{2\}"),
        ([(0, 1, 1.0), (1, 2, 1.0), (2, 1, 1.0)], r"states \{0\} drain into \{1, 2\}"),
    ],
)
@pytest.mark.parametrize("method", SOLVERS)
def test_a_reducible_generator_is_explained(method, entries, message):
    with pytest.raises(InputError, match=message):
        stationary_distribution(rates(*entries), method)


def test_a_state_without_rates_is_a_closed_class_of_its_own():
    W = torch.zeros(3, 3)
    W[:2, :2] = rates((0, 1, 1.0), (1, 0, 2.0))
    assert communicating_classes(W) == [([0, 1], True), ([2], True)]
    with pytest.raises(InputError, match="reducible"):
        stationary_distribution(W)


def test_a_bad_generator_is_named_by_its_place_in_the_batch():
    W = random_generator(3, (2, 4))
    W[1, 2] = torch.zeros(3, 3)
    with pytest.raises(InputError, match=r"generator \[1, 2\] of the batch is reducible"):
        stationary_distribution(W)
    W = random_generator(3, (4,))
    W[3, 0, 1] = -1.0
    with pytest.raises(
        InputError, match="generator 3 of the batch has the negative rate -1 from state 1 to state 0"
    ):
        stationary_distribution(W)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[-1.0, 2.0], [1.0, -2.5]], "column 1 sums to -0.5, not to zero; set each diagonal"),
        (
            [[-1.0, 1.0], [2.0, -2.0]],
            "column 0 sums to 1, not to zero; its rows do sum to zero, so transpose it",
        ),
        ([[1.0, -1.0], [-1.0, 1.0]], "negative rate -1 from state 1 to state 0"),
        ([[-1.0, float("nan")], [1.0, 0.0]], "nan or infinite"),
        ([[0.0, 1.0]], "square"),
        ([[0.0]], "at least 2 states"),
        ([1.0, 2.0], "square"),
        (5.0, "square"),
        (torch.zeros(0, 3, 3), "at least one"),
    ],
)
def test_what_is_no_generator_is_refused(matrix, message):
    with pytest.raises(InputError, match=message):
        check_generator(torch.as_tensor(matrix))


def test_columns_may_miss_zero_by_the_rounding_of_their_type():
    W = 1e3 * random_generator(8, seed=3)
    torch.testing.assert_close(
        stationary_distribution(W.float()), stationary_distribution(W), rtol=1e-5, atol=0
    )
    assert solver_disagreement(check_generator(W.float()))["any_two"] < 1e-13


def test_unknown_solver_and_too_few_states():
    with pytest.raises(InputError, match="did you mean 'cofactors'"):
        stationary_distribution(random_generator(3), "cofactor")
    with pytest.raises(InputError, match="at least 2 states"):
        random_generator(1)


def test_generators_are_read_from_csv_json_and_npy(tmp_path):
    W = random_generator(4, seed=2)
    (tmp_path / "w.csv").write_text("\n".join(",".join(repr(float(x)) for x in row) for row in W) + "\n\n")
    (tmp_path / "w.json").write_text(json.dumps(W.tolist()))
    (tmp_path / "named.json").write_text(json.dumps({"generator": W.tolist()}))
    np.save(tmp_path / "w.npy", W.numpy())
    for name in ("w.csv", "w.json", "named.json", "w.npy"):
        assert torch.equal(load_generator(tmp_path / name), W)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("w.json", b"[[1" + b"0" * 400 + b"]]"),
        ("w.csv", b"1,2\n3\n"),
        ("w.csv", b"a,b\n1,2\n"),
        ("w.csv", b"\xff\xfe\x00"),
        ("w.json", b"{"),
        ("w.json", b'{"rates": [[1]]}'),
        ("w.json", b'[["a"]]'),
        ("w.npy", b"nothing"),
        ("w.npy", b""),
    ],
)
def test_a_file_without_a_matrix_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="does not hold a matrix of numbers"):
        load_generator(tmp_path / name)


def test_why_a_file_holds_no_matrix(tmp_path):
    (tmp_path / "w.json").write_text('{"rates": [[1]]}')
    with pytest.raises(InputError, match=r"w\.json does not .*: an object needs the key 'generator'"):
        load_generator(tmp_path / "w.json")
    np.save(tmp_path / "w.npy", random_generator(3).numpy() * (1 + 0.5j))
    with pytest.raises(InputError, match=r"w\.npy does not .*: its entries are complex, and rates are real"):
        load_generator(tmp_path / "w.npy")


def test_pickled_and_unknown_files_are_refused(tmp_path):
    np.save(tmp_path / "w.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="does not hold a matrix"):
        load_generator(tmp_path / "w.npy")
    with pytest.raises(InputError, match=r"kind of generator file '\.txt'"):
        load_generator(tmp_path / "w.txt")
    with pytest.raises(InputError, match="no generator file"):
        load_generator(tmp_path / "w.csv")
