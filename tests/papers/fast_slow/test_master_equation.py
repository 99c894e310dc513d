"""Stationary distributions: closed forms, agreement of the solvers, input checks and file formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from input_errors import raises_code
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


def rates(*entries: tuple[int, int, float]) -> Tensor:
    """Build a generator from (source, target, rate) triples."""
    N = 1 + max(max(source, target) for source, target, _ in entries)
    W = torch.zeros(N, N, dtype=torch.float64)
    for source, target, rate in entries:
        W[target, source] = rate
    return generator_from_rates(W)


@st.composite
def irreducible(draw: st.DrawFn) -> Tensor:
    """A batch of sparse generators over four decades, each with a ring through all states."""
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
def test_solvers_agree_to_rounding(W: Tensor) -> None:
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
def test_two_states(method: str, scale: float) -> None:
    W = scale * rates((0, 1, 3.0), (1, 0, 1.0))
    torch.testing.assert_close(
        stationary_distribution(W, method), torch.tensor([0.25, 0.75], dtype=torch.float64)
    )


@pytest.mark.parametrize("method", SOLVERS)
def test_birth_death_chain_has_detailed_balance(method: str) -> None:
    births, deaths = [2.0, 0.5, 3.0, 1.5], [1.0, 4.0, 0.7, 2.0]
    W = rates(*[(i, i + 1, b) for i, b in enumerate(births)], *[(i + 1, i, d) for i, d in enumerate(deaths)])
    ratios = torch.tensor(births, dtype=torch.float64) / torch.tensor(deaths, dtype=torch.float64)
    expected = torch.cat([torch.ones(1, dtype=torch.float64), ratios.cumprod(0)])
    torch.testing.assert_close(
        stationary_distribution(W, method), expected / expected.sum(), rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("method", SOLVERS)
def test_ring_without_detailed_balance(method: str) -> None:
    leave = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    W = rates(*[(i, (i + 1) % 3, float(rate)) for i, rate in enumerate(leave)])
    torch.testing.assert_close(
        stationary_distribution(W, method), leave.reciprocal() / leave.reciprocal().sum()
    )


@pytest.mark.parametrize("method", SOLVERS)
def test_solver_gradcheck(method: str) -> None:
    free = torch.rand(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    torch.autograd.gradcheck(lambda r: SOLVERS[method](generator_from_rates(r)), free.requires_grad_())


def test_gth_is_accurate_for_ill_conditioned_generators() -> None:
    slow = 1e-12  # two weakly connected pairs; by symmetry each pair has probability one half
    W = rates((0, 1, 1.0), (1, 0, 1.0), (2, 3, 2.0), (3, 2, 2.0), (1, 2, slow), (2, 1, slow))
    torch.testing.assert_close(
        stationary_distribution(W, "gth"), torch.full((4,), 0.25).double(), rtol=1e-14, atol=0
    )
    with raises_code("ill-conditioned-generator") as error:
        stationary_distribution(W, "bordered")
    assert "{0, 1}, {2, 3}" in str(error.value)
    assert "'gth'" in str(error.value)


def test_gth_does_not_overflow() -> None:
    births = [(i, i + 1, 1e10) for i in range(40)]
    p = stationary_distribution(rates(*births, *[(i + 1, i, 1.0) for i in range(40)]), "gth")
    torch.testing.assert_close(p[-1], torch.tensor(1 - 1e-10, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("entries", "states"),
    [
        (
            [(0, 1, 1.0), (1, 0, 1.0), (2, 3, 1.0), (3, 2, 1.0)],
            ["2 closed classes", "{0, 1}, {2, 3}"],
        ),
        ([(0, 1, 1.0), (0, 2, 1.0)], ["2 closed classes", "{1}, {2}"]),
        ([(0, 1, 1.0), (1, 2, 1.0), (2, 1, 1.0)], ["{0}", "{1, 2}"]),
    ],
)
@pytest.mark.parametrize("method", SOLVERS)
def test_reducible_generator_names_its_states(
    method: str, entries: list[tuple[int, int, float]], states: list[str]
) -> None:
    with raises_code("reducible-generator") as error:
        stationary_distribution(rates(*entries), method)
    assert all(named in str(error.value) for named in states)


def test_isolated_state_is_a_closed_class() -> None:
    W = torch.zeros(3, 3)
    W[:2, :2] = rates((0, 1, 1.0), (1, 0, 2.0))
    assert communicating_classes(W) == [([0, 1], True), ([2], True)]
    with raises_code("reducible-generator"):
        stationary_distribution(W)


def test_invalid_generator_is_named_by_its_batch_index() -> None:
    W = random_generator(3, (2, 4))
    W[1, 2] = torch.zeros(3, 3)
    with raises_code("reducible-generator") as error:
        stationary_distribution(W)
    assert "[1, 2]" in str(error.value)
    W = random_generator(3, (4,))
    W[3, 0, 1] = -1.0
    with raises_code("negative-rate") as error:
        stationary_distribution(W)
    assert "generator 3 " in str(error.value)
    assert "row 0, column 1" in str(error.value)


@pytest.mark.parametrize(
    ("matrix", "code", "advice"),
    [
        (
            [[-1.0, 2.0], [1.0, -2.5]],
            "column-sum-not-zero",
            "column 1 sums to -0.5, not to zero; set each diagonal",
        ),
        (
            [[-1.0, 1.0], [2.0, -2.0]],
            "column-sum-not-zero",
            "transpose",
        ),
        ([[1.0, -1.0], [-1.0, 1.0]], "negative-rate", "row 0, column 1"),
        ([[-1.0, float("nan")], [1.0, 0.0]], "non-finite-rate", ""),
        ([[0.0, 1.0]], "generator-not-square", "(1, 2)"),
        ([[0.0]], "too-few-states", "(1, 1)"),
        ([1.0, 2.0], "generator-not-square", "(2,)"),
        (5.0, "generator-not-square", "()"),
        (torch.zeros(0, 3, 3), "too-few-states", "(0, 3, 3)"),
    ],
)
def test_check_generator_raises(matrix: Any, code: str, advice: str) -> None:
    with raises_code(code) as error:
        check_generator(torch.as_tensor(matrix))
    assert advice in str(error.value)


def test_float32_rounding_of_columns_is_accepted() -> None:
    W = 1e3 * random_generator(8, seed=3)
    torch.testing.assert_close(
        stationary_distribution(W.float()), stationary_distribution(W), rtol=1e-5, atol=0
    )
    assert solver_disagreement(check_generator(W.float()))["any_two"] < 1e-13


def test_unknown_solver_and_too_few_states_raise() -> None:
    with raises_code("unknown-solver"):
        stationary_distribution(random_generator(3), "cofactor")
    with raises_code("too-few-states"):
        random_generator(1)


def test_load_generator_formats(tmp_path: Path) -> None:
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
        ("w.npy", b"PK\x03\x04 an archive, which numpy.load would open"),
    ],
)
def test_load_generator_raises_for_corrupt_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with raises_code("corrupt-generator-file"):
        load_generator(tmp_path / name)


def test_corrupt_file_error_names_the_reason(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"rates": [[1]]}')
    with raises_code("corrupt-generator-file") as error:
        load_generator(tmp_path / "w.json")
    assert "'generator'" in str(error.value)
    np.save(tmp_path / "w.npy", random_generator(3).numpy() * (1 + 0.5j))
    with raises_code("corrupt-generator-file") as error:
        load_generator(tmp_path / "w.npy")
    assert "complex" in str(error.value)


def test_pickled_unknown_and_missing_files_raise(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with raises_code("corrupt-generator-file"):
        load_generator(tmp_path / "w.npy")
    with raises_code("unknown-generator-file-format"):
        load_generator(tmp_path / "w.txt")
    with raises_code("generator-file-not-found"):
        load_generator(tmp_path / "w.csv")
