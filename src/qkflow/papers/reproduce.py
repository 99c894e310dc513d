"""The comparisons of the papers, as studies for any corpus: `qkflow reproduce NAME`.

The papers' training recipes are not public. The outcome is therefore consistent with a paper or not; it is
never *the* reproduction. Each study is one or more comparisons, each in its own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qkflow import files
from qkflow.config_io import parse_count
from qkflow.errors import unknown
from qkflow.papers.coupled_dynamics import study as coupling_study
from qkflow.papers.fast_slow import study as fast_slow_study
from qkflow.papers.paper_study import PaperStudy, Stage
from qkflow.report import write_outputs
from qkflow.studies.compare import Comparison, compare

PAPER_STUDIES: dict[str, PaperStudy] = {
    "coupling": coupling_study.STUDY,
    "fast-slow": fast_slow_study.STUDY,
}


def get_paper_study(name: str) -> PaperStudy:
    """Return a study by name."""
    if name not in PAPER_STUDIES:
        raise unknown("study", name, PAPER_STUDIES)
    return PAPER_STUDIES[name]


def reproduce(
    name: str,
    out: str | Path,
    *,
    stages: tuple[str, ...] = (),
    on_stage_end: Callable[[Stage, Comparison, dict[str, Any]], None] | None = None,
    execution_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run the comparisons of a paper; return their summaries and findings, as stored in `findings.json`.

    `settings` are fields of `ComparisonConfig`, `execution_kwargs` the other arguments of `compare`.
    """
    study = get_paper_study(name)
    stages_by_name = {stage.name: stage for stage in study.stages}
    for stage_name in stages:
        if stage_name not in stages_by_name:
            raise unknown(f"stage of {name}", stage_name, stages_by_name)
    values = {"tokens": study.tokens, "seeds": study.seeds, **study.settings, **settings}
    tokens = parse_count(values.pop("tokens"))
    report: dict[str, Any] = {"study": name, "paper": study.paper, "claim": study.claim, "stages": {}}
    for stage in (stages_by_name[stage_name] for stage_name in stages or stages_by_name):
        budget = {"variants": stage.variants, "tokens": tokens * stage.token_multiplier}
        comparison = compare(out=Path(out) / stage.name, **{**values, **budget}, **(execution_kwargs or {}))
        write_outputs(comparison)
        findings = study.findings(comparison) if study.findings else {}
        report["stages"][stage.name] = {"summary": comparison.summary.to_dict(), **findings}
        if on_stage_end:
            on_stage_end(stage, comparison, findings)
    files.write_json(Path(out) / "findings.json", report)
    return report
