"""The summary of a pace study, for tests of its report."""

from __future__ import annotations

from pathlib import Path

from qkflow.studies.pace import PaceStudyConfig, PaceSummary
from qkflow.studies.pace.results import (
    AttributionContrasts,
    MeasureSummary,
    RatioSummary,
    RunCounts,
    StudyFacts,
)
from qkflow.studies.results import CorrectedDifference
from qkflow.studies.stats import paired_difference

HOSTILE = "</script><script>alert(1)</script>"
AOPC = {"comprehensiveness": 0.2, "sufficiency": 0.1}


def ratio_summary(ratio: str, measures: dict[str, MeasureSummary], finished: bool = True) -> RatioSummary:
    deletions = dict.fromkeys(("attention", "rollout", "gradient", "random"), AOPC)
    heatmap = [[0.0, 25.0], [50.0, 25.0]] if finished else None
    return RatioSummary(ratio, [0, 1, 2], measures, heatmap, deletions if finished else {}, 1.0, [HOSTILE])


def pace_summary() -> PaceSummary:
    """Return the summary of a pace study with text that must be escaped."""
    config = PaceStudyConfig("agreement", data=HOSTILE, confidence=0.9)
    difference = paired_difference([0.6, 0.61, 0.63], [0.2, 0.21, 0.22], confidence=0.9)
    contrast = {"attention_random": difference, "gradient_random": difference}
    corrected = CorrectedDifference(**vars(difference), p_holm=0.001)
    raised = MeasureSummary(0.613, [0.6, 0.61, 0.63], corrected, "raises")
    return PaceSummary(
        config=config,
        command=config.to_command(Path("out")),
        recipe=config.resolve_recipe(),
        facts=StudyFacts(steps=4, train=64, test=30, majority=0.5, vocab_size=9, notes={}),
        baseline="1",
        rows=[
            ratio_summary("1", {"mass": MeasureSummary(0.21, [0.2, 0.21, 0.22])}),
            ratio_summary("10", {"mass": raised}),
            ratio_summary("30", {}, finished=False),
        ],
        explains=[AttributionContrasts(ratio, contrast) for ratio in ("1", "10")],
        published={"performance": (0.9243, 0.9341)},
        runs=RunCounts(planned=9, finished=6, failures=[]),
        curves={"1": {"mass": [(2.0, 0.1, 0.0, 0.2), (4.0, 0.2, 0.1, 0.3)]}},
        environment={"torch": HOSTILE},
        headline=HOSTILE,
        notes=[HOSTILE],
    )
