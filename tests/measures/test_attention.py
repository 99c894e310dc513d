"""Attention measures against their definitions, probes of every part, and attention maps."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from qkflow.attention import couplings, scorings
from qkflow.measures import attention_maps
from qkflow.measures.attention import probe_attention, summarize_probe
from qkflow.models import Decoder, preset


def small_model(**options: Any) -> Any:
    shape = {"vocab_size": 50, "n_layers": 2, "dim": 32, "n_heads": 4, "init": "fan_in", **options}
    return Decoder(preset("tiny", **shape), seed=0)


IDS = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))


def test_measures_of_uniform_attention() -> None:
    model = small_model()
    for block in model.blocks:
        torch.nn.init.zeros_(
            block.attention.qk.q.weight
        )  # every score is 0: query t has uniform weights over t + 1 keys
    for layer in probe_attention(model, IDS, keep_weights=True):
        assert layer.entropy == pytest.approx([sum(math.log(t) for t in range(1, 13)) / 12] * 4, rel=1e-5)
        assert layer.sink_mass == pytest.approx([sum(1 / t for t in range(2, 13)) / 11] * 4, rel=1e-5)
        assert layer.max_logit == [0.0] * 4
        sigma = torch.linalg.svdvals(torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None])
        assert layer.spectral_gap == pytest.approx([1 - float(sigma[1] / sigma[0])] * 4, rel=1e-4)
        p = sigma / sigma.sum()
        assert layer.effective_rank == pytest.approx([math.exp(-float((p * p.log()).sum()))] * 4, rel=1e-4)


def test_max_logit_matches_scores() -> None:
    model = small_model(n_layers=1, attention={"rope": False})
    block = model.blocks[0]
    x = block.attention_norm(model.embedding(IDS))
    q, k = block.attention.qk(x, x)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
    visible = torch.ones(12, 12).tril().bool()
    expected = scores.masked_fill(~visible, -math.inf).amax(dim=(0, 2, 3))
    assert probe_attention(model, IDS)[0].max_logit == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("scoring", scorings.names())
@pytest.mark.parametrize("coupling", couplings.names())
def test_probe_of_every_coupling_and_scoring(coupling: str, scoring: str) -> None:
    model = small_model(attention={"coupling": coupling, "scoring": scoring})
    before = model.logits(model(IDS))
    summary = summarize_probe(probe_attention(model, IDS))
    assert torch.equal(model.logits(model(IDS)), before)
    assert model.training
    assert all(len(values) == 2 and all(map(math.isfinite, values)) for values in summary.values())
    has_step = any(name.endswith("step.value") for name in model.state_dict())
    assert ("step_size" in summary) == has_step


def test_diagnostics_of_a_third_party_coupling_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    coupling = type(model.blocks[0].attention.coupling)
    monkeypatch.setattr(coupling, "diagnostics", lambda self: {"angle": torch.tensor([0.1, 0.2, 0.3, 0.4])})
    layers = probe_attention(model, IDS, keep_weights=True)
    assert layers[0].to_dict()["angle"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert layers[1].head_value("angle", 2) == pytest.approx(0.3)
    assert summarize_probe(layers)["angle"] == pytest.approx([0.25, 0.25])


def test_kept_weights_are_of_the_first_window() -> None:
    model = small_model()
    layer = probe_attention(model, IDS, keep_weights=True)[0]
    x = model.blocks[0].attention_norm(model.embedding(IDS[:1]))
    torch.testing.assert_close(layer.weights, model.blocks[0].attention.reference(x)[1][0])


def test_attention_maps_as_png(tmp_path: Path) -> None:
    layers = probe_attention(small_model(), IDS[:1], keep_weights=True)
    image = tmp_path / "maps.png"
    attention_maps.write_png(image, layers)
    content = image.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert width == 2 * height - attention_maps.GAP_PIXELS  # four heads in a row, two layers
    (size,) = struct.unpack(">I", content[33:37])
    assert len(zlib.decompress(content[41 : 41 + size])) == height * (1 + 3 * width)


def test_layer_shows_its_maps_in_a_notebook() -> None:
    (layer, _) = probe_attention(small_model(), IDS[:1], keep_weights=True)
    image = layer._repr_png_()
    assert image is not None
    assert image.startswith(b"\x89PNG")
    (layer, _) = probe_attention(small_model(), IDS[:1])
    assert layer._repr_png_() is None
