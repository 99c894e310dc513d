"""The table of learning-rate ratios in language modeling, from losses with known differences."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from qkflow.papers.faster_qk.schedules import read_schedules, schedule_rows
from qkflow.studies import ComparisonConfig

GELU = "model.feed_forward=gelu,model.hidden_dim=512"
LOSSES = {
    "standard": 4.0,
    f"standard{{{GELU}}}": 4.2,
    "standard+pace=4": 4.1,
    f"standard+pace=4{{{GELU}}}": 4.1,
    "standard{train.pace=early:0.25}": 3.9,
}


@dataclass
class Arm:
    variant: str
    losses: dict[int, float]


def comparison(seeds: int = 5) -> SimpleNamespace:
    arms = [
        Arm(name, {seed: loss + 0.1 * seed + 1e-4 * seed**2 for seed in range(seeds)})
        for name, loss in LOSSES.items()
    ]
    return SimpleNamespace(summary=SimpleNamespace(arms=arms, config=ComparisonConfig()))


def test_arms_by_ratio_and_feed_forward() -> None:
    assert set(read_schedules(comparison())) == {
        ("1", "swiglu"),
        ("1", "gelu"),
        ("4", "swiglu"),
        ("4", "gelu"),
        ("early:0.25", "swiglu"),
    }


def test_each_ratio_is_compared_within_its_feed_forward() -> None:
    results = SimpleNamespace(comparison=lambda name: comparison())
    rows = {row["train.pace"]: list(row.values())[1:] for row in schedule_rows(results)}
    assert rows.keys() == {"4", "early:0.25"}
    gated, plain = rows["4"]
    assert gated.startswith("+10.5%")
    assert plain.startswith("−9.5")
    assert rows["early:0.25"][1] == "–"
