"""Does the gate of the slow path open, and does the slow path pay, with either pooling?

Each stored study compares slow paths with standard attention from the same init. A verdict is that of the
study, corrected over its arms.
"""

from __future__ import annotations

from typing import Any

from qkflow.papers.claims import Results, find_arm, judged_difference
from qkflow.report.document import format_count
from qkflow.report.tables import format_change
from qkflow.studies.slow_path_findings import gate_findings
from qkflow.studies.variants import parse_variant

STUDIES = ("fast-slow", "fast-slow-pooling")


def gate_rows(results: Results) -> list[dict[str, str]]:
    """Return one row per slow path of the stored studies: its gate at the end, and the change it makes."""
    rows = []
    for study in STUDIES:
        comparison = results.comparison(study)
        for gate in gate_findings(comparison)["gates"]:
            name = gate["variant"]
            difference, verdict = judged_difference(comparison, name)
            rows.append(
                {
                    "tokens": format_count(comparison.summary.config.tokens),
                    "slow path": f"`{parse_variant(name).slow_path}`",
                    "seeds": str(len(find_arm(comparison, name).seeds)),
                    "size of g (95%)": _interval(gate["slow_gate_last"]),
                    "‖g⊙ũ‖/‖x‖ (95%)": _interval(gate["slow_share_last"]),
                    "open": "yes" if gate["open"] else "no",
                    "change (95%)": format_change(difference),
                    "verdict": str(verdict),
                }
            )
    return rows


def _interval(value: dict[str, Any]) -> str:
    low, high = value["low"], value["high"]
    return f"{value['mean']:.4f}" + ("" if low is None else f" ({low:.4f}…{high:.4f})")
