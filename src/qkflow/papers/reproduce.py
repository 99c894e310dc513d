"""Run the comparisons of a recipe: `qkflow reproduce NAME`.

The papers' training recipes are not public. The outcome is therefore consistent with a paper or not; it is
never *the* reproduction. Each stage is a comparison in its own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkflow import files
from qkflow.papers.claims import find_arm
from qkflow.papers.recipe import Recipe, load_recipe
from qkflow.report import write_outputs
from qkflow.report.tables import format_difference
from qkflow.studies.compare import Comparison, compare
from qkflow.studies.design import SeedDesign
from qkflow.studies.slow_path_findings import gate_findings

StageCallback = Callable[[str, Comparison, dict[str, Any]], None]


def reproduce(
    name: str,
    out: str | Path,
    *,
    scale: str = "tiny",
    stages: tuple[str, ...] = (),
    on_stage_end: StageCallback | None = None,
    execution_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run the comparisons of a recipe; return their summaries and findings, as stored in `findings.json`.

    `settings` replace those of the recipe, `execution_kwargs` are the other arguments of `compare`.
    """
    recipe = load_recipe(name)
    values = {
        stage: recipe.stage_settings(scale, stage, **settings) for stage in stages or recipe.stage_names
    }
    report: dict[str, Any] = {
        "recipe": recipe.name,
        "scale": scale,
        "paper": recipe.paper,
        "claim": recipe.claim,
        "published": recipe.published,
        "stages": {},
    }
    finished: dict[str, Comparison] = {}
    for stage, stage_settings in values.items():
        comparison = compare(out=Path(out) / stage, **stage_settings, **(execution_kwargs or {}))
        write_outputs(comparison)
        finished[stage] = comparison
        findings = stage_findings(recipe, finished, comparison)
        report["stages"][stage] = {"summary": comparison.summary.to_dict(), **findings}
        if on_stage_end:
            on_stage_end(stage, comparison, findings)
    files.write_json(Path(out) / "findings.json", report)
    return report


def stage_findings(recipe: Recipe, finished: Mapping[str, Comparison], latest: Comparison) -> dict[str, Any]:
    """Return what a recipe measures beyond losses, after each of its stages."""
    if recipe.findings == "gate":
        return gate_findings(latest)
    if recipe.findings == "longer-training" and {"equal", "longer"} <= finished.keys():
        return longer_training_findings(finished["equal"], finished["longer"])
    return {}


def longer_training_findings(equal: Comparison, longer: Comparison) -> dict[str, Any]:
    """Compare the coupling with standard attention that was trained on more tokens, by seed."""
    coupled, standard = find_arm(equal, "euler").losses, find_arm(longer, "standard").losses
    seeds = sorted(coupled.keys() & standard.keys())
    config = equal.summary.config
    design = SeedDesign.fixed(config.confidence, config.margin_nats)
    difference = design.difference([standard[s] for s in seeds], [coupled[s] for s in seeds])
    ratio = float(np.divide(longer.summary.config.tokens or 1, config.tokens or 1))
    mean, interval = format_difference(difference)
    sentence = (
        f"standard attention trained on {ratio:.2g} times the tokens, against euler: {mean} ({interval}), "
        f"{len(seeds)} seeds; the two were trained in different stages with the same seeds"
    )
    return {
        "longer_training": {"ratio": ratio, "seeds": seeds, "mean": difference.mean},
        "sentences": [sentence],
    }
