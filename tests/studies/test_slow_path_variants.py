"""The ablations by name: what each changes, and that compute is matched."""

import pytest

from qkflow.errors import InputError
from qkflow.models import Decoder, ModelConfig, preset
from qkflow.models.cost import flops_per_token
from qkflow.roles import freeze_roles
from qkflow.studies.slow_path_variants import slow_path_variant

TINY = {"preset": "tiny", "attention": {"coupling": "euler"}, "init": "fan_in"}


def built(name, base=TINY, length=128):
    changes = slow_path_variant(name, base, length)
    values = {**base, **changes.model}
    model = Decoder(preset(values.pop("preset"), **values), seed=0)
    freeze_roles(model, changes.train.get("freeze", []))
    return model, changes


@pytest.mark.parametrize(
    ("name", "start", "freezes"),
    [
        ("slow", 0.0, []),
        ("slow:closed", 0.0, ["slow", "gate"]),
        ("slow:frozen", 0.0, ["slow"]),
        ("slow:warm-gate", 0.1, []),
        ("slow:warm-gate:start=0.3", 0.3, []),
        ("slow:start=0.2:frozen", 0.2, ["slow"]),
    ],
)
def test_each_ablation_changes_what_it_says(name, start, freezes):
    model, changes = built(name)
    assert model.slow.gates["0"].value.item() == pytest.approx(start)
    assert changes.train == ({"freeze": freezes} if freezes else {})
    assert model.slow.ratio == 8
    assert len(model.slow.blocks) == 2, "half of the fast layers"
    assert model.slow.blocks[0].attention.coupling_spec.name == "euler"
    held = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert held == {
        name
        for name, _ in model.named_parameters()
        if name.startswith("slow.") and ("gate" if "gates" in name else "slow") in freezes
    }


def test_options_follow_the_name_and_a_slow_path_already_there_is_kept():
    assert slow_path_variant("slow:P=4:inject=each:gate=vector", TINY, 128).model["slow"] == {
        "ratio": 4, "n_layers": 2, "hidden_dim": None, "gate": "vector", "gate_init": 0.0, "inject": "each",
        "output": "drawn", "attention": {},
    }  # fmt: skip
    base = preset(
        "tiny", slow={"ratio": 3, "n_layers": 1, "gate_init": 0.5, "attention": {"coupling": "drift"}}
    )
    kept = slow_path_variant("slow:frozen:layers=4", base, 128).model["slow"]
    assert (kept["ratio"], kept["n_layers"], kept["gate_init"]) == (3, 4, 0.5)
    assert kept["attention"] == {"coupling": "drift"}
    assert slow_path_variant("slow:closed", base, 128).model["slow"]["gate_init"] == 0.0
    assert slow_path_variant("dense-matched", base, 128).model["slow"] is None


@pytest.mark.parametrize(
    ("options", "length"),
    [("", 128), (":ratio=2:layers=4", 128), (":ratio=3:layers=1", 50), (":ratio=2:layers=9", 64)],
)
def test_dense_matched_spends_the_same_compute_at_token_rate(options, length):
    slow, _ = built(f"slow{options}", length=length)
    dense, changes = built(f"dense-matched{options}", length=length)
    assert dense.slow is None
    plain = preset("tiny", attention=TINY["attention"])
    for training in (False, True):
        spent, matched, least = (
            flops_per_token(config, length, training=training)
            for config in (slow.config, dense.config, plain)
        )
        assert matched == pytest.approx(spent, rel=0.01)
        assert matched > least
    assert (changes.model["layers"] > 4) is ("layers=9" in options or "layers=4" in options)


@pytest.mark.parametrize("name", ["small", "60m"])
def test_dense_matched_holds_at_every_size(name):
    base = preset(name)
    slow = ModelConfig.from_dict({**base.to_dict(), **slow_path_variant("slow", base, 512).model})
    dense = ModelConfig.from_dict({**base.to_dict(), **slow_path_variant("dense-matched", base, 512).model})
    assert flops_per_token(dense, 512) == pytest.approx(flops_per_token(slow, 512), rel=0.01)
    assert dense.resolved_hidden_dim % 8 == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slo", "unknown timescale variant 'slo': did you mean 'slow'"),
        ("slow:clsed", "did you mean 'closed'"),
        ("slow:closed:frozen", r"two ablations \(closed, frozen\)"),
        ("slow:closed:start=0.1", "holds the gate at zero"),
        ("slow:rati=4", "did you mean 'ratio'"),
        ("slow:ratio=1", "at least 2"),
        ("slow:ratio=129", "P = 129 is longer than the 128 tokens"),
        ("slow:inject=ech", "did you mean 'each'"),
        ("slow:output=zero", "can never learn"),
        ("dense-matched:closed", "option of variant 'dense-matched' 'closed'"),
        ("dense-matched:ratio=500", "P = 500 is longer"),
    ],
)
def test_bad_names_are_refused(name, message):
    with pytest.raises(InputError, match=message):
        slow_path_variant(name, TINY, 128)


def test_a_model_too_narrow_to_match_is_refused():
    base = {"vocab_size": 8, "n_layers": 8, "dim": 2, "n_heads": 1, "feed_forward": "gelu"}
    with pytest.raises(InputError, match="dense-matched needs a wider model"):
        slow_path_variant("dense-matched:layers=1", base, 16)
