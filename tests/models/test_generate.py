import pytest
import torch

from qkflow.attention import couplings, scorings
from qkflow.errors import InputError
from qkflow.models import Decoder, preset
from qkflow.models.cpu_decoder import CPUDecoder
from qkflow.models.generate import MIN_TOKENS_TO_PREPARE, Sampler, generate

LONG = MIN_TOKENS_TO_PREPARE + 8  # enough for the layout made for single tokens


def small_model(dtype=torch.float64, **options):
    shape = {"vocab_size": 50, "n_layers": 2, "dim": 32, "n_heads": 4, "init": "fan_in", **options}
    return Decoder(preset("tiny", **shape), seed=0, dtype=dtype)


def prompt(batch=1, length=5):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(0))


def without_cache(model, ids, count):
    for _ in range(count):
        ids = torch.cat([ids, model.logits(model(ids))[:, -1:].argmax(dim=-1)], dim=1)
    return ids


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"feed_forward": "swiglu", "tie_embeddings": False, "n_kv_heads": 2},
        {"attention": {"coupling": "leapfrog:n=2", "qk_norm": True, "window": 4}},
        {"attention": {"scoring": "differential", "rope": False}},
        {"attention": {"circuit": "CACO", "rope": False}},
        {"attention": {"bias": True}},
    ],
)
def test_cached_equals_uncached(options, batch):
    model = small_model(**options)
    ids = prompt(batch)
    made = generate(model, ids, LONG, temperature=0)
    assert torch.equal(made, without_cache(model, ids, LONG))
    assert model.training


def check_token_by_token(model, length, read):
    """Logits of the tokens after the first `read`, off the start, where some couplings do nothing yet."""
    ids = prompt(length=length)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        caches = model.new_caches(1, length)
        model(ids[:, :read], caches=caches)
        decoder = CPUDecoder(model, caches)
        found = torch.stack([decoder.logits(int(token)) for token in ids[0, read:]])
        torch.testing.assert_close(found, model.logits(model(ids))[0, read:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"n_kv_heads": 2, "qk_norm": True}, {"n_kv_heads": 4, "rope": False}]
)
@pytest.mark.parametrize("scoring", scorings.names())
@pytest.mark.parametrize("coupling", [*couplings.names(), "leapfrog:n=3:bias=true", "affine:n=3:bias=true"])
def test_token_by_token_gives_the_models_own_logits(coupling, scoring, options):
    options = dict(options)
    shape = {"n_kv_heads": options.pop("n_kv_heads")} if "n_kv_heads" in options else {}
    model = small_model(attention={"coupling": coupling, "scoring": scoring, **options}, **shape).eval()
    check_token_by_token(model, length=12, read=6)


@pytest.mark.parametrize("slow", [{"ratio": 2}, {"ratio": 3, "gate": "vector", "inject": "each"}])
def test_token_by_token_with_a_slow_path_that_is_heard(slow):
    model = small_model(slow=slow, attention={"coupling": "leapfrog"}).eval()
    check_token_by_token(model, length=14, read=5)


def shifted(module, given, out):
    return out + 1.0


@pytest.mark.parametrize("place", ["blocks.0", "blocks.0.feed_forward.up", "blocks.1.attention.ov.v", "norm"])
def test_a_hook_is_heard_however_many_tokens_are_made(place):
    model = small_model()
    model.get_submodule(place).register_forward_hook(shifted)
    made = generate(model, prompt(), LONG, temperature=0)
    assert torch.equal(made, without_cache(model, prompt(), LONG))


def test_no_temperature_is_too_low():
    model = small_model()
    coldest = generate(model, prompt(), 5, temperature=1e-40, seed=0)
    assert torch.equal(coldest, generate(model, prompt(), 5, temperature=0))


def test_prompts_of_different_lengths():
    model = small_model()
    short, long = prompt(length=3), prompt(length=7)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), short], dim=1)
    ids = torch.cat([padded, long])
    real = torch.tensor([[False] * 4 + [True] * 3, [True] * 7])
    made = generate(model, ids, 6, temperature=0, attention_mask=real)
    assert torch.equal(made[0, 4:], generate(model, short, 6, temperature=0)[0])
    assert torch.equal(made[1], generate(model, long, 6, temperature=0)[0])


def test_a_seed_repeats_and_another_does_not():
    model = small_model()
    made = [generate(model, prompt(), LONG, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_an_end_token_ends_a_sequence_and_the_stream_sees_every_token():
    model = small_model()
    free = generate(model, prompt(2), 12, seed=3)
    end = int(free[0, 7])  # the third new token of the first sequence
    seen = []
    made = generate(
        model, prompt(2), 12, seed=3, eos_token_id=end, on_token=lambda token: seen.append(token.tolist())
    )
    stop = int((made[0, 5:] == end).nonzero()[0]) + 5
    assert (made[0, stop:] == end).all()
    assert torch.tensor(seen).T.tolist() == made[:, 5:].tolist()


def test_frequencies_follow_the_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)

    def shares(**options):
        drawn = Sampler(**options, generator=torch.Generator().manual_seed(0))(logits)
        return (torch.bincount(drawn, minlength=4) / len(drawn)).tolist()

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_k=3, top_p=0.4) == [1, 0, 0, 0]
    assert shares(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert shares(temperature=0) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_k": 0}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"ids": torch.tensor([[99]])}, "outside the model's vocabulary"),
        ({"ids": torch.tensor([1])}, "shape"),
        ({"ids": torch.tensor([[1, 2]]), "padding": torch.tensor([[True, False]])}, "on the left"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(InputError, match=words):
        generate(small_model(), **{"ids": prompt(), "max_new_tokens": 3, **options})
