"""What the explorer shows is what the model computes."""

from __future__ import annotations

import pytest
import torch

from explored import TEXT, small_model
from qkflow.explore.capture import label_tokens, quantize
from qkflow.measures.induction import induction_score, repeated_sequences

COUPLINGS = ("none", "drift:n=2", "euler:n=3", "leapfrog:n=3", "affine", "uncoupled:n=2", "nonlinear_query")


def layer_inputs(model: object, ids: list[int]) -> list[torch.Tensor]:
    """Return the input of every attention layer, block by block."""
    decoder = model.decoder  # type: ignore[attr-defined]
    x, inputs = decoder.embedding(torch.tensor([ids])), []
    for block in decoder.blocks:
        inputs.append(block.attention_norm(x))
        x = block(x, block.attention.make_rotation(x), block.attention.make_mask(x.shape[1], x.shape[1]))
    return inputs


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_weights_are_those_of_the_reference(coupling: str) -> None:
    model = small_model(coupling)
    capture = model.capture(TEXT)
    for layer, x in enumerate(layer_inputs(model, capture.ids)):
        expected = model.layers[layer].reference(x)[1][0].detach()
        error = (capture.weights(layer) - expected).abs().amax(dim=(1, 2))
        assert (error <= torch.tensor(capture.largest[layer]) / 250).all()  # 8-bit levels of the square root


def test_signed_weights_keep_their_sign() -> None:
    model = small_model(scoring="differential")
    capture = model.capture(TEXT)
    expected = model.layers[0].reference(layer_inputs(model, capture.ids)[0])[1][0].detach()
    assert (expected < 0).any()
    assert capture.signed
    error = (capture.weights(0) - expected).abs().amax(dim=(1, 2))
    assert (error <= torch.tensor(capture.largest[0]) / 120).all()


def test_quantize_of_zero_weights() -> None:
    levels, largest = quantize(torch.zeros(1, 2, 2), signed=False)
    assert not levels.any()
    assert largest == [0]


def test_ablation_equals_zeroed_output_weights() -> None:
    model = small_model("euler")
    before, after = model.capture(TEXT), model.capture(TEXT, frozenset({(0, 1), (1, 3)}))
    assert after.final is not None
    for layer, head in ((0, 1), (1, 3)):  # the columns of W_O that read the head
        attention = model.layers[layer]
        size = attention.head_shapes.out_head_dim
        with torch.no_grad():
            attention.ov.o.weight[:, head * size : (head + 1) * size] = 0  # type: ignore[union-attr]
    zeroed = model.capture(TEXT)
    torch.testing.assert_close(after.final, zeroed.final)
    torch.testing.assert_close(after.losses, zeroed.losses)
    assert after.loss != before.loss
    assert after.levels[1].equal(zeroed.levels[1])


def test_ablation_does_not_outlive_the_request() -> None:
    model = small_model()
    first = model.capture(TEXT)
    model.capture(TEXT, frozenset({(0, 0)}))
    assert torch.equal(model.capture(TEXT).final, first.final)  # type: ignore[arg-type]


def test_lens_of_the_last_layer_is_the_model() -> None:
    model = small_model("leapfrog:n=2")
    capture = model.capture(TEXT)
    logits = model.decoder.logits(model.decoder(torch.tensor([capture.ids])))[0].detach()
    for position in (0, 7, len(capture.ids) - 1):
        rows = model.lens_logits(capture, position)
        assert [name for name, _ in rows] == ["embedding", "layer 0", "layer 1"]
        torch.testing.assert_close(rows[-1][1], logits[position])
    row = model.predictions(capture, 3)[-1]
    probabilities = logits[3].softmax(-1)
    assert row["top"][0][1] == pytest.approx(float(probabilities.max()))
    assert row["actual"] == pytest.approx(float(probabilities[capture.ids[4]]))
    assert row["rank"] == int((probabilities > probabilities[capture.ids[4]]).sum()) + 1
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(capture.ids[1:]))
    assert capture.loss == pytest.approx(float(expected))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_trajectory_ends_where_the_coupling_ends(coupling: str) -> None:
    model = small_model(coupling)
    capture = model.capture(TEXT)
    path = model.trajectory(capture, 1, 2)
    x = layer_inputs(model, capture.ids)[1]
    attention = model.layers[1]
    q, k = attention.qk(x, x)
    torch.testing.assert_close(path.q[0], q[0, :, 2])
    coupled_q, coupled_k = attention.coupling.reference(q, k)
    torch.testing.assert_close(path.q[-1], coupled_q[0, :, 2])
    torch.testing.assert_close(path.k[-1], coupled_k[0, :, 2])
    steps = 0 if coupling == "none" else getattr(attention.coupling, "steps", 1)
    assert len(path.q) == len(path.k) == steps + 1


def test_induction_score_of_any_text() -> None:
    ids = repeated_sequences(10_000, 1, 16)[0]
    weights = torch.rand(3, 32, 32).tril()
    expected = torch.stack([weights[:, 16 + i, i + 1] for i in range(16)]).mean(0)
    torch.testing.assert_close(induction_score(weights, ids), expected)
    assert induction_score(weights[:, :5, :5], torch.arange(5)).isnan().all()  # no token occurs twice
    twice = induction_score(weights[:, :2, :2], torch.tensor([1, 1]))  # nothing followed the first but itself
    assert twice.isnan().all()


def test_random_scores_are_those_of_the_random_text() -> None:
    model = small_model()
    measures = model.capture(model.random_text(seed=0)).measures
    for name in ("induction", "previous_token"):
        expected = torch.tensor(measures[name])
        torch.testing.assert_close(torch.tensor(model.random_scores[name]), expected)


def test_measures_match_the_weights() -> None:
    model = small_model("euler")
    capture = model.capture(TEXT)
    weights = capture.weights(1)
    assert capture.measures["sink_mass"][1][2] == pytest.approx(float(weights[2, 1:, 0].mean()), abs=0.01)
    step = model.layers[1].coupling.diagnostics()["step_size"]
    assert capture.measures["step_size"][1] == pytest.approx(step.tolist())


def test_labels_join_the_bytes_of_a_character() -> None:
    model = small_model()
    labels = label_tokens(model.encode("a🙂שֶ"), model.decode, model.special_label)
    assert labels == ["[end]", "a", "⋯", "⋯", "⋯", "🙂", "⋯", "ש", "⋯", "\u05b6"]
    broken = label_tokens([0xF0, 0x61, 0x62, 0x63, 0x64], model.decode, "[end]")
    assert len(broken) == 5
    assert broken[-1] == "d"


def test_random_text_repeats_itself() -> None:
    model = small_model()
    text = model.random_text(seed=3)
    assert text == model.random_text(seed=3) != model.random_text(seed=4)
    half = len(text) // 2
    assert text[:half] == text[half:]


def test_random_text_has_the_words_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    words = [f"{a}{b}" for a in "bdfg" for b in "aeiou"]
    monkeypatch.setattr(model, "decode", lambda ids: f" {words[ids[0] % len(words)]}")
    text = model.random_text(seed=3).split()
    assert text[: len(words)] == text[len(words) :]
    assert sorted(text[: len(words)]) == sorted(words)
