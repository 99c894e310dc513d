"""Promises of the whole layer, over sampled combinations of its parts."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from input_errors import raises_code
from parts import scatter
from qkflow.attention import Attention, couplings, merge, scorings

DIM, N_HEADS = 32, 4
PAIRS = list(itertools.product(couplings.names(), scorings.names()))


def sampled(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Every coupling × scoring pair, each with other options drawn at random."""
    draw = random.Random(seed)
    cases: list[dict[str, object]] = []
    for coupling, scoring in itertools.islice(itertools.cycle(PAIRS), max(count, len(PAIRS))):
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
    return cases


CASES = sampled(len(PAIRS))


def label(case: dict[str, object]) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


each_case = pytest.mark.parametrize("case", CASES, ids=label)


def make(case: dict[str, object], dtype: torch.dtype = torch.float64, **more: object) -> Attention:
    layer = Attention(DIM, N_HEADS, init="fan_in", seed=1, dtype=dtype, **case, **more)  # type: ignore[arg-type]
    scatter(layer, 0.15)
    return layer.eval()


def inputs(length: int = 11, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64)


@each_case
def test_equals_reference(case: dict[str, object]) -> None:
    layer, x = make(case), inputs()
    assert (layer(x) - layer.reference(x)[0]).abs().max().item() <= 1e-12


@each_case
def test_causal_by_perturbation(case: dict[str, object]) -> None:
    layer, x = make(case), inputs()
    before = layer(x)
    for t in (0, 4, 10):
        changed = x.clone()
        changed[:, t] += 1.0
        after = layer(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t], before[:, t])


@each_case
def test_window_by_perturbation(case: dict[str, object]) -> None:
    layer, x = make({**case, "window": 3}), inputs()
    changed = x.clone()
    changed[:, 2] += 1.0
    difference = (layer(changed) - layer(x)).abs().amax((0, 2))
    assert difference[5:].max().item() == 0
    assert difference[2:5].min().item() > 0


@each_case
def test_cached_equals_full_for_random_chunks(case: dict[str, object]) -> None:
    layer, x = make(case), inputs(length=17)
    full = layer(x)
    draw = random.Random(7)
    for _ in range(3):
        cuts = sorted(draw.sample(range(1, 17), draw.choice((1, 4, 9))))
        cache, pieces = layer.new_cache(2, 17), []
        for begin, end in itertools.pairwise((0, *cuts, 17)):
            pieces.append(layer(x[:, begin:end], cache=cache))
        torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-12)


@each_case
def test_packed_documents_match_separate(case: dict[str, object]) -> None:
    layer = make(case)
    lengths = (5, 1, 7)
    parts = [inputs(length, batch=1) for length in lengths]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = layer(torch.cat(parts, 1), document_ids=documents)
    separate = torch.cat([layer(part) for part in parts], 1)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)


@each_case
def test_packed_and_cached_equals_full(case: dict[str, object]) -> None:
    layer, x = make(case), inputs(length=12, batch=1)
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
def test_padding_is_ignored(case: dict[str, object], causal: bool) -> None:
    layer, x = make(case, causal=causal), inputs(length=6, batch=1)
    alone = layer(x)
    junk = 100 * torch.randn(1, 3, DIM, dtype=torch.float64)
    for padded, real in ((torch.cat((x, junk), 1), slice(0, 6)), (torch.cat((junk, x), 1), slice(3, 9))):
        padding = torch.zeros(1, 9, dtype=torch.bool)
        padding[:, real] = True
        out = layer(padded, attention_mask=padding)
        assert out.isfinite().all()
        torch.testing.assert_close(out[:, real], alone, rtol=0, atol=1e-11)


@each_case
def test_merge_keeps_the_outputs(case: dict[str, object]) -> None:
    layer, x = make(case), inputs()
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
def test_prepared_cached_decoding_matches_full(case: dict[str, object]) -> None:
    layer, x = make(case), inputs(length=9)
    full = layer(x)
    cache = layer.new_cache(2, 9)
    with torch.no_grad():
        layer.prepare_for_inference()
        pieces = [layer(x[:, begin:end], cache=cache) for begin, end in ((0, 5), (5, 6), (6, 7), (7, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-12)


@each_case
def test_bf16_tolerance(case: dict[str, object]) -> None:
    layer, x = make(case), inputs()
    exact = layer(x)
    rough = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16())
    assert rough.dtype == torch.bfloat16
    assert ((rough.double() - exact).norm() / exact.norm()).item() < 0.1


@each_case
def test_autocast_trains_and_decodes(case: dict[str, object]) -> None:
    """Weights in float32, tokens in bfloat16, as everyone trains in mixed precision."""
    layer = make(case, dtype=torch.float32)
    x = inputs(length=64).float()  # enough tokens for the shortcuts through products of weights
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = layer(x)
        with torch.no_grad():
            cached = layer(x, cache=layer.new_cache(*x.shape[:2]))
    rough.float().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    for out in (rough, cached):
        assert ((out.float() - exact).norm() / exact.norm()).item() < 0.1


@each_case
def test_captured_whole_by_the_compiler(case: dict[str, object]) -> None:
    torch.compiler.reset()
    layer = make(case, dtype=torch.float32)
    x = inputs().float()
    captured = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, out = layer(x), captured(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    got = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    expected.sum().backward()
    wanted = [p.grad for p in layer.parameters() if p.grad is not None]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compiled_with_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    layer = make({"coupling": "leapfrog:n=3", "n_kv_heads": 2}, dtype=torch.float32)
    x = inputs().float()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-5, atol=1e-5)


@each_case
def test_state_dict_round_trip(case: dict[str, object]) -> None:
    saved, x = make(case), inputs()
    other = Attention(DIM, N_HEADS, seed=2, dtype=torch.float64, **case)  # type: ignore[arg-type]
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other.eval()(x), saved(x))


@each_case
def test_builds_on_the_meta_device(case: dict[str, object]) -> None:
    layer = Attention(DIM, N_HEADS, device="meta", **case)  # type: ignore[arg-type]
    assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    assert layer(torch.empty(2, 5, DIM, device="meta")).shape == (2, 5, DIM)
