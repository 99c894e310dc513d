"""Contracts of a whole attention layer, over sampled combinations of its parts."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from input_errors import raises_code
from parts import scatter
from qkflow.attention import Attention, couplings, merge, scorings

DIM, N_HEADS = 32, 4
Case = dict[str, Any]  # options of `Attention`


def sample_cases(seed: int = 0) -> list[Case]:
    """Return every pair of coupling and scoring, with the other options drawn at random."""
    draw = random.Random(seed)
    cases: list[Case] = []
    for coupling, scoring in itertools.product(couplings.names(), scorings.names()):
        steps = f":n={draw.choice((1, 3, 7))}" if "steps" in couplings.options(coupling) else ""
        cases.append(
            {
                "coupling": coupling + steps,
                "scoring": scoring,
                "n_kv_heads": draw.choice((2, 4)),
                "qk_norm": draw.random() < 0.3,
                "bias": draw.random() < 0.3,
                "window": draw.choice((None, None, 4)),
                "rope": draw.choice((True, False, {"base": 500.0, "scaling": "linear", "factor": 2.0})),
            }
        )
    for index, case in enumerate(case for case in cases if case["qk_norm"]):
        case["qk_norm_gain"] = 1.5 if index % 2 else "learned"
    return cases


def case_id(case: Case) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


each_case = pytest.mark.parametrize("case", sample_cases(), ids=case_id)


def make(case: Case, dtype: torch.dtype = torch.float64, **more: Any) -> Attention:
    layer = Attention(DIM, N_HEADS, init="fan_in", seed=1, dtype=dtype, **case, **more)
    scatter(layer, 0.15)
    return layer.eval()


def make_input(length: int = 11, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64)


@each_case
def test_matches_reference(case: Case) -> None:
    layer, x = make(case), make_input()
    assert (layer(x) - layer.reference(x)[0]).abs().max().item() <= 1e-12


@each_case
def test_causal_by_perturbation(case: Case) -> None:
    layer, x = make(case), make_input()
    before = layer(x)
    for t in (0, 4, 10):
        changed = x.clone()
        changed[:, t] += 1.0
        after = layer(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t], before[:, t])


@each_case
def test_window_by_perturbation(case: Case) -> None:
    layer, x = make({**case, "window": 3}), make_input()
    changed = x.clone()
    changed[:, 2] += 1.0
    difference = (layer(changed) - layer(x)).abs().amax((0, 2))
    assert difference[5:].max().item() == 0
    assert difference[2:5].min().item() > 0


@each_case
def test_cached_decoding_in_chunks_matches_full(case: Case) -> None:
    layer, x = make(case), make_input(length=17)
    full = layer(x)
    draw = random.Random(7)
    for _ in range(3):
        cuts = sorted(draw.sample(range(1, 17), draw.choice((1, 4, 9))))
        cache, pieces = layer.new_cache(2, 17), []
        for begin, end in itertools.pairwise((0, *cuts, 17)):
            pieces.append(layer(x[:, begin:end], cache=cache))
        torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-12)


@each_case
def test_packed_documents_match_separate(case: Case) -> None:
    layer = make(case)
    lengths = (5, 1, 7)
    parts = [make_input(length, batch=1) for length in lengths]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = layer(torch.cat(parts, 1), document_ids=documents)
    separate = torch.cat([layer(part) for part in parts], 1)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)


@each_case
def test_packed_cached_decoding_matches_full(case: Case) -> None:
    layer, x = make(case), make_input(length=12, batch=1)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    full = layer(x, document_ids=documents)
    cache = layer.new_cache(1, 12)
    pieces = [
        layer(x[:, begin:end], document_ids=documents[:, :end], cache=cache)
        for begin, end in ((0, 3), (3, 8), (8, 9), (9, 12))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-12)


@each_case
@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_ignored(case: Case, causal: bool) -> None:
    layer, x = make(case, causal=causal), make_input(length=6, batch=1)
    alone = layer(x)
    junk = 100 * torch.randn(1, 3, DIM, dtype=torch.float64)
    for padded, real in ((torch.cat((x, junk), 1), slice(0, 6)), (torch.cat((junk, x), 1), slice(3, 9))):
        attention_mask = torch.zeros(1, 9, dtype=torch.bool)
        attention_mask[:, real] = True
        out = layer(padded, attention_mask=attention_mask)
        assert out.isfinite().all()
        torch.testing.assert_close(out[:, real], alone, rtol=0, atol=1e-11)


@each_case
def test_merge_keeps_outputs(case: Case) -> None:
    layer, x = make(case), make_input()
    if layer.coupling.linear_drift() is None and case["coupling"] != "none":
        with raises_code("merge-not-linear"):
            merge(layer)
        return
    before = layer(x)
    merged = merge(copy.deepcopy(layer))
    torch.testing.assert_close(merged(x), before, rtol=0, atol=1e-12)
    standard = make({**case, "coupling": "none"})
    standard.load_state_dict(merged.state_dict())
    torch.testing.assert_close(standard(x), before, rtol=0, atol=1e-12)


@each_case
def test_prepared_cached_decoding_matches_full(case: Case) -> None:
    layer, x = make(case), make_input(length=9)
    full = layer(x)
    cache = layer.new_cache(2, 9)
    with torch.no_grad():
        layer.prepare_for_inference()
        pieces = [layer(x[:, begin:end], cache=cache) for begin, end in ((0, 5), (5, 6), (6, 7), (7, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-12)


@each_case
def test_bf16_tolerance(case: Case) -> None:
    layer, x = make(case), make_input()
    exact = layer(x)
    rough = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16())
    assert rough.dtype == torch.bfloat16
    assert ((rough.double() - exact).norm() / exact.norm()).item() < 0.1


@each_case
def test_autocast_trains_and_decodes(case: Case) -> None:
    """Parameters in float32, activations in bfloat16."""
    layer = make(case, dtype=torch.float32)
    x = make_input(length=64).float()
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = layer(x)
        with torch.no_grad():
            cached = layer(x, cache=layer.new_cache(*x.shape[:2]))
    rough.float().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    for out in (rough, cached):
        assert ((out.float() - exact).norm() / exact.norm()).item() < 0.1


def compiled_cases() -> list[Case]:
    """Return every coupling with one scoring, in turn: compiling every pair takes a second each."""
    n = len(scorings.names())
    return [case for index, case in enumerate(sample_cases()) if index % n == index // n % n]


@pytest.mark.parametrize("case", compiled_cases(), ids=case_id)
def test_compile_fullgraph(case: Case) -> None:
    torch.compiler.reset()
    layer = make(case, dtype=torch.float32)
    x = make_input().float()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, out = layer(x), compiled(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    compiled_grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    expected.sum().backward()
    eager_grads = [p.grad for p in layer.parameters() if p.grad is not None]
    for a, b in zip(compiled_grads, eager_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compile_with_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    layer = make({"coupling": "leapfrog:n=3", "n_kv_heads": 2}, dtype=torch.float32)
    x = make_input().float()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-5, atol=1e-5)


@each_case
def test_state_dict_round_trip(case: Case) -> None:
    saved, x = make(case), make_input()
    other = Attention(DIM, N_HEADS, seed=2, dtype=torch.float64, **case)
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other.eval()(x), saved(x))


@each_case
def test_builds_on_the_meta_device(case: Case) -> None:
    layer = Attention(DIM, N_HEADS, device="meta", **case)
    assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    assert layer(torch.empty(2, 5, DIM, device="meta")).shape == (2, 5, DIM)
