from __future__ import annotations

from dataclasses import replace

import pytest

from qkflow.studies.config import ComparisonConfig
from qkflow.studies.design import Verdict
from qkflow.studies.results import ArmSummary, CorrectedDifference
from qkflow.studies.screening import CellData, Screening
from qkflow.studies.sentences import format_p_value, interval_phrase, percent_phrase
from qkflow.studies.stats import PairedDifference
from qkflow.studies.verdicts import correct_family, decide_verdict, judge


def difference(mean: float = -0.1, p: float | None = 0.01, pairs: int = 3) -> PairedDifference:
    return PairedDifference(mean, mean - 0.05, mean + 0.05, mean, mean, p, pairs)


def corrected(mean: float, p_holm: float | None, pairs: int = 3) -> CorrectedDifference:
    direction = -1 if mean < 0 else 1
    interval = (mean - 0.05, mean + 0.05, mean, mean)
    return CorrectedDifference(mean, *interval, p_holm, pairs, direction=direction, p_holm=p_holm)


@pytest.mark.parametrize(
    ("tested", "verdict"),
    [
        (None, Verdict.NO_VERDICT),
        (difference(), Verdict.NO_VERDICT),  # not corrected
        (corrected(-0.1, None, pairs=1), Verdict.NO_VERDICT),
        (corrected(-0.1, 0.001, pairs=2), Verdict.NO_VERDICT),
        (corrected(-0.1, 0.0499), Verdict.HELPS),
        (corrected(0.1, 0.0499), Verdict.HURTS),
        (corrected(-0.1, 0.0501), Verdict.UNDECIDED),
        (replace(corrected(-0.001, 0.2), p_equivalent_holm=0.01), Verdict.EQUIVALENT),
        (replace(corrected(-0.001, 0.01), p_equivalent_holm=0.01), Verdict.HELPS),
    ],
)
def test_decide_verdict(tested: PairedDifference | None, verdict: Verdict) -> None:
    assert decide_verdict(tested, 0.95, margin=0.01) == verdict


def test_correct_family_skips_missing_differences() -> None:
    family = correct_family({"a": difference(p=0.01), "b": None, "c": difference(p=0.03)})
    assert {name: tested.p_holm for name, tested in family.items()} == pytest.approx({"a": 0.02, "c": 0.03})


def test_planned_tests_without_p_count_in_the_correction() -> None:
    assert correct_family({"a": difference(p=0.01)}, planned=3)["a"].p_holm == pytest.approx(0.03)


def test_judge_without_verdicts_still_corrects() -> None:
    reference = ArmSummary("standard", "reference", "gpt2", "standard@gpt2")
    euler = ArmSummary("euler", "variant", "gpt2", "euler@gpt2", difference=difference())
    config = ComparisonConfig(verdict=False)
    cells = {name: CellData(f"{name}@gpt2", "gpt2") for name in ("standard", "euler")}
    races = {name: Screening(cell, (cell,)) for name, cell in cells.items()}
    first, second = judge([reference, euler], races, races["standard"], config)
    assert (first.verdict, second.verdict) == (Verdict.REFERENCE, Verdict.NO_VERDICT)
    assert second.p_holm == 0.01
    assert "no verdict requested" in second.sentence


def test_phrases() -> None:
    assert percent_phrase(-2.34) == "2.3% lower"
    assert percent_phrase(0.4) == "0.40% higher"
    assert percent_phrase(0.001) == "0.00%"
    assert percent_phrase(float("inf")) == "immeasurably higher"
    assert interval_phrase(-3.5, -1.1) == "between 1.1% and 3.5% lower"
    assert interval_phrase(-1.2, 0.5) == "between 1.2% lower and 0.50% higher"
    assert [format_p_value(p) for p in (1e-5, 0.04, 0.5)] == ["p < 0.001", "p = 0.040", "p = 0.50"]
