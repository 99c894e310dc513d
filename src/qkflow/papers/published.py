"""The papers' own questions as comparisons anyone can run: `qkflow reproduce NAME`.

No recipe of these papers is public, so what comes out is consistent with them or not; it is never "the"
reproduction. Each question is one or more comparisons, one after the other, each in a folder of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkflow import files
from qkflow.errors import unknown
from qkflow.studies.compare import Comparison, compare, parse_comparison_config
from qkflow.studies.slow_path_findings import gate_findings

FindingsFn = Callable[[Comparison], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One comparison of a study; `longer` multiplies the tokens asked for."""

    name: str
    variants: tuple[str, ...]
    token_multiplier: int = 1


@dataclass(frozen=True)
class PaperStudy:
    """A paper's question: its comparisons, and what is read from each beyond losses."""

    paper: str
    claim: str
    tokens: str
    seeds: int
    stages: tuple[Stage, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    findings: FindingsFn | None = None


PAPER_STUDIES = {
    "coupling": PaperStudy(
        "Gahtan & Bronstein, arXiv 2604.01683",
        "coupled queries and keys lower perplexity by 6 to 7% at 60M parameters, Euler and leapfrog alike, "
        "and an uncoupled network of the same size does not",
        tokens="1M",
        seeds=3,
        stages=(Stage("main", ("standard", "drift", "euler", "leapfrog")),),
        settings={"controls": "symmetric,uncoupled", "inits": "gpt2,fan_in"},
    ),
    "fast-slow": PaperStudy(
        "Gao, arXiv 2606.16730",
        "at 500k tokens the slow path is neutral: its gate stays closed, and coupled and frozen are within "
        "the noise of each other",
        tokens="500k",
        seeds=5,
        stages=(
            Stage(
                "short",
                ("standard", "slow", "slow:closed", "slow:frozen", "slow:warm-gate", "dense-matched"),
            ),
            Stage("long", ("standard", "slow", "slow:warm-gate"), token_multiplier=10),
        ),
        settings={"controls": "none", "inits": "gpt2"},
        findings=gate_findings,
    ),
}


def get_paper_study(name: str) -> PaperStudy:
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
    """Ask a paper's question; `settings` are those of `Question`, `execution` those of `compare`.

    `shown` is called after each comparison. What was found is in `findings.json` of the folder as well.
    """
    study = get_paper_study(name)
    known = {stage.name: stage for stage in study.stages}
    for wanted in stages:
        if wanted not in known:
            raise unknown(f"stage of {name}", wanted, known)
    values = {"tokens": study.tokens, "seeds": study.seeds, **study.settings, **settings}
    tokens = parse_comparison_config("", {"tokens": values.pop("tokens")}).tokens or 0
    answer: dict[str, Any] = {"study": name, "paper": study.paper, "claim": study.claim, "stages": {}}
    for stage in (known[wanted] for wanted in stages or known):
        budget = {"variants": stage.variants, "tokens": tokens * stage.token_multiplier}
        comparison = compare(out=Path(out) / stage.name, **{**values, **budget}, **(execution_kwargs or {}))
        found = study.findings(comparison) if study.findings else {}
        answer["stages"][stage.name] = {"summary": comparison.summary, **found}
        if on_stage_end:
            on_stage_end(stage, comparison, found)
    files.write_json(Path(out) / "findings.json", answer)
    return answer
