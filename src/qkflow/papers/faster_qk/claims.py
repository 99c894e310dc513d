"""Claims of Vashisht & Ramaswamy (ICML 2026, arXiv 2608.06776), and our evidence on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkflow.papers.claims import Claim, Output, find_row
from qkflow.papers.costs import StudyCost

PAPER = "Vashisht & Ramaswamy, ICML 2026, arXiv 2608.06776"
LABELS = {
    "performance": "test performance",
    "mass": "attention on the rationale",
    "confidence": "attention confidence",
    "qk_scale": "scale of the query-key circuit",
}
EQUAL_PERFORMANCE = 0.02  # test performance within two points counts as equal
SYNTHETIC, FLOW = "qkflow pace synthetic", "qkflow pace flow"
TASK_SCALE = "controlled task, one head"
SHARE_TOLERANCE = 5.0  # points of the heatmap: larger than the spread over seeds
PRETRAINED = "four layers, pretrained on cloze questions"  # the model of the stored SQuAD study
LOW_ATTENTION = 0.3  # attention on the distinct tokens at a loss of 1e-4


def _row(output: Any, kind: str, *, growth: bool = False, fast: bool = False) -> Any:
    """Return a row of the controlled task: `fast` with a constant faster rate, `growth` an increasing one."""
    for row in output["rows"]:
        if row["kind"] == kind and (row["growth"] != 1) == growth and (row["qk_lr"] != row["ov_lr"]) == fast:
            return row
    raise KeyError(kind)


def _attention(row: Any) -> str:
    return f"{row['mean_distinct_attention']:.2f}"


def _largest_difference(*rows: Any) -> float:
    """Return the largest difference to a published share, in points."""
    return max(abs(value) for row in rows if row.get("difference") for value in row["difference"])


def _synthetic(text: Callable[[Any], str], supports: Callable[[Any], bool | None]) -> Output:
    return Output(
        "pace-synthetic", SYNTHETIC, TASK_SCALE, text, supports, seeds=lambda output: len(output["seeds"])
    )


def _increasing_text(output: Any) -> str:
    """Return the factorized circuit and the collapsed one with an increasing rate, and how they differ."""
    rows = {"FAFO": _row(output, "FAFO"), "CACO increasing": _row(output, "CACO", growth=True)}
    parts = [
        f"{name} {_attention(row)} (loss {row['loss']:.1g}, {row['seq_len']} tokens)"
        for name, row in rows.items()
    ]
    return f"mean attention on distinct tokens: {', '.join(parts)}; not at equal loss, length and init"


def _alpha(output: Any, ratio: float) -> float:
    return float(find_row(output["rows"], "ratio", ratio)["alpha"])


def _measure(output: Any, name: str, ratio: str) -> Any:
    return find_row(output["rows"], "ratio", ratio)["measures"][name]


def _study(
    task: str, measures: tuple[str, ...], expects: str, ratio: str = "10", model: str = "one layer"
) -> Output:
    """Return what a ratio of a pace study did to some measures."""

    def changes(output: Any) -> list[Change]:
        return [read_change(output, name, ratio) for name in measures]

    def text(output: Any) -> str:
        bound = f"; equal means within {EQUAL_PERFORMANCE:g}" if expects == "no change" else ""
        return f"{task}, r = {ratio}: " + "; ".join(map(str, changes(output))) + bound

    def supports(output: Any) -> bool | None:
        verdicts = {change.verdict for change in changes(output)}
        if "lowers" in verdicts:
            return False
        if expects == "no change":
            return True if all(change.is_within(EQUAL_PERFORMANCE) for change in changes(output)) else None
        return True if verdicts == {"raises"} else None

    return Output(
        f"pace-{task}",
        None,
        f"{task}, {model}",
        text,
        supports,
        seeds=lambda output: int(output["config"]["seeds"]),
        core_hours=lambda output: sum(row["seconds"] * len(row["seeds"]) for row in output["rows"]) / 3600,
    )


@dataclass(frozen=True)
class Change:
    """What a ratio of a pace study did to a measure, with the interval of the difference."""

    name: str
    before: float
    after: float
    low: float
    high: float
    verdict: str

    def is_within(self, bound: float) -> bool:
        return -bound < self.low and self.high < bound

    @property
    def effect(self) -> str:
        """The value after the change, the interval of the difference and the verdict."""
        low, high = (f"{bound:+.3f}".replace("-", "−") for bound in (self.low, self.high))
        return f"{self.after:.3g} ({low}…{high}; {self.verdict})"

    def __str__(self) -> str:
        return f"{LABELS.get(self.name, self.name)} {self.before:.3g} → {self.effect}"


def read_change(output: Any, name: str, ratio: str) -> Change:
    """Read what a ratio did to a measure from the stored output of `qkflow pace study`."""
    before, after = (_measure(output, name, each) for each in (output["baseline"], ratio))
    difference = after["difference"]
    return Change(
        name, before["mean"], after["mean"], difference["low"], difference["high"], after["verdict"]
    )


CLAIMS = (
    Claim(
        "pace-parameterization",
        PAPER,
        "The parameterization of the circuits decides the attention pattern at equal loss",
        "share of instances by attention: FAFO .1/64.1/35.7/0/0, FACO 0/0/0/5.4/94.6",
        (
            _synthetic(
                lambda output: (
                    f"mean attention on distinct tokens: FAFO {_attention(_row(output, 'FAFO'))}, FACO "
                    f"{_attention(_row(output, 'FACO'))}, from different inits; largest difference to a "
                    f"published share {_largest_difference(*output['rows']):.1f} points"
                ),
                lambda output: _largest_difference(*output["rows"]) < SHARE_TOLERANCE,
            ),
        ),
        to_settle=StudyCost("synthetic-grid"),
    ),
    Claim(
        "pace-sharpens",
        PAPER,
        "A larger ratio r of the learning rates sharpens attention",
        "FAFO .2/.01 against .01/.01",
        (
            _synthetic(
                lambda output: (
                    f"mean attention on distinct tokens: r = 1 {_attention(_row(output, 'FAFO'))}, r = 20 "
                    f"{_attention(_row(output, 'FAFO', fast=True))}"
                ),
                lambda output: (
                    _row(output, "FAFO", fast=True)["mean_distinct_attention"]
                    > _row(output, "FAFO")["mean_distinct_attention"]
                ),
            ),
            Output(
                "pace-flow",
                FLOW,
                "reduced gradient flow",
                lambda output: (
                    f"attention at a loss of 1e-4: r = 0.1 {_alpha(output, 0.1):.2f}, r = 1 "
                    f"{_alpha(output, 1.0):.2f}, r = 10 {_alpha(output, 10.0):.2f}"
                ),
                lambda output: _alpha(output, 0.1) < _alpha(output, 1.0) < _alpha(output, 10.0),
            ),
            _study("agreement", ("mass",), "raises", ratio="3"),
            _study("agreement", ("mass",), "raises"),
            _study("hatexplain", ("mass",), "raises"),
            _study("squad", ("mass",), "raises", model=PRETRAINED),
        ),
    ),
    Claim(
        "pace-factorized",
        PAPER,
        "A factorized circuit behaves like a collapsed one with an increasing learning rate",
        "CACO increasing 0/0/2.6/86.9/10.5; FAFO increasing (not printed)",
        (
            _synthetic(
                lambda output: (
                    "CACO increasing: largest difference to a published share "
                    f"{_largest_difference(_row(output, 'CACO', growth=True)):.1f} points"
                ),
                lambda output: _largest_difference(_row(output, "CACO", growth=True)) < SHARE_TOLERANCE,
            ),
            _synthetic(_increasing_text, lambda output: None),
        ),
    ),
    Claim(
        "pace-slow",
        PAPER,
        "With r ≪ 1 the model predicts before it attends",
        "α = .149 at r = .01",
        (
            Output(
                "pace-flow",
                FLOW,
                "reduced gradient flow",
                lambda output: f"attention at a loss of 1e-4 with r = 0.01: {_alpha(output, 0.01):.3f}",
                lambda output: _alpha(output, 0.01) < LOW_ATTENTION,
            ),
        ),
    ),
    Claim(
        "pace-scale",
        PAPER,
        "A larger r gives a larger scale of the query-key circuit",
        "larger QK scale",
        (
            _study("agreement", ("qk_scale",), "raises"),
            _study("hatexplain", ("qk_scale",), "raises"),
            _study("squad", ("qk_scale",), "raises", model=PRETRAINED),
        ),
    ),
    Claim(
        "pace-performance",
        PAPER,
        "Task performance stays equal",
        "SVA 92.4 → 93.4, HateXplain 55.7 → 56.9, SQuAD 56.1 → 56.9",
        (
            _study("agreement", ("performance",), "no change", ratio="3"),
            _study("agreement", ("performance",), "no change"),
            _study("hatexplain", ("performance",), "no change"),
            _study("hatexplain", ("performance",), "no change", ratio="30"),
            _study("squad", ("performance",), "no change", model=PRETRAINED),
        ),
        to_settle=StudyCost("squad-single-knob"),
    ),
    Claim(
        "pace-faithfulness",
        PAPER,
        "Attention confidence and comprehensiveness rise",
        "AC: SVA 41.7 → 76.9, HateXplain 0 → 43.5, SQuAD 12.7 → 43.0; comprehensiveness .24 → .30, "
        ".40 → .48, .38 → .53",
        (
            _study("agreement", ("confidence", "comprehensiveness"), "raises", ratio="3"),
            _study("agreement", ("confidence", "comprehensiveness"), "raises"),
            _study("hatexplain", ("confidence", "comprehensiveness"), "raises"),
            _study("hatexplain", ("confidence", "comprehensiveness"), "raises", ratio="30"),
            _study("squad", ("confidence", "comprehensiveness"), "raises", model=PRETRAINED),
        ),
        to_settle=StudyCost("agreement-single-knob", "hatexplain-single-knob", "squad-single-knob"),
    ),
)
