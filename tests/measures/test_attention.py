import math
import struct
import zlib

import pytest
import torch

from qkflow.attention import couplings, scorings
from qkflow.errors import InputError
from qkflow.measures import attention_maps
from qkflow.measures.attention import probe_attention, summarize_probe
from qkflow.models import Decoder, preset


def small_model(**options):
    shape = {"vocab_size": 50, "n_layers": 2, "dim": 32, "n_heads": 4, "init": "fan_in", **options}
    return Decoder(preset("tiny", **shape), seed=0)


IDS = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))


def test_uniform_attention_is_known_by_hand():
    model = small_model()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qk.q.weight)  # every score is 0: query t shares over t + 1 keys
    for layer in probe_attention(model, IDS, keep_weights=True):
        assert layer.entropy == pytest.approx([sum(math.log(t) for t in range(1, 13)) / 12] * 4, rel=1e-5)
        assert layer.sink_mass == pytest.approx([sum(1 / t for t in range(2, 13)) / 11] * 4, rel=1e-5)
        assert layer.max_logit == [0.0] * 4
        sigma = torch.linalg.svdvals(torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None])
        assert layer.spectral_gap == pytest.approx([1 - float(sigma[1] / sigma[0])] * 4, rel=1e-4)
        p = sigma / sigma.sum()
        assert layer.effective_rank == pytest.approx([math.exp(-float((p * p.log()).sum()))] * 4, rel=1e-4)


def test_the_largest_logit_is_the_largest_score():
    model = small_model(layers=1, attention={"rope": False})
    block = model.blocks[0]
    x = block.attention_norm(model.embedding(IDS))
    q, k = block.attention.qk(x, x)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
    visible = torch.ones(12, 12).tril().bool()
    expected = scores.masked_fill(~visible, -math.inf).amax(dim=(0, 2, 3))
    assert probe_attention(model, IDS)[0].max_logit == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("scoring", scorings.names())
@pytest.mark.parametrize("coupling", couplings.names())
def test_every_part_can_be_probed_and_the_model_stays_as_it_was(coupling, scoring):
    model = small_model(attention={"coupling": coupling, "scoring": scoring})
    before = model.logits(model(IDS))
    found = summarize_probe(probe_attention(model, IDS))
    assert torch.equal(model.logits(model(IDS)), before)
    assert model.training
    assert all(len(values) == 2 and all(map(math.isfinite, values)) for values in found.values())
    has_step = any(name.endswith("step.value") for name in model.state_dict())
    assert ("step_size" in found) == has_step


def test_weights_are_those_of_the_first_window():
    model = small_model()
    layer = probe_attention(model, IDS, keep_weights=True)[0]
    x = model.blocks[0].attention_norm(model.embedding(IDS[:1]))
    torch.testing.assert_close(layer.weights, model.blocks[0].attention.reference(x)[1][0])


def test_maps_as_a_page_and_as_an_image(tmp_path):
    layers = probe_attention(small_model(), IDS[:1], keep_weights=True)
    labels = ["</script>", *"abcdefghijk"]
    page = tmp_path / "maps.html"
    attention_maps.get_map_writer(page)(page, layers, labels)
    text = page.read_text("utf-8")
    assert text.count("</script>") == 2  # those of the page itself
    assert "layer 1, head 3" in text
    assert "http" not in text  # nothing is fetched
    image = tmp_path / "maps.png"
    attention_maps.get_map_writer(image)(image, layers, labels)
    content = image.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert (
        width == 2 * height - attention_maps.GAP_PIXELS
    )  # four heads beside each other, two layers below each other
    (size,) = struct.unpack(">I", content[33:37])
    assert len(zlib.decompress(content[41 : 41 + size])) == height * (1 + 3 * width)
    with pytest.raises(InputError, match=r"\.html or \.png"):
        attention_maps.get_map_writer(tmp_path / "maps.gif")
