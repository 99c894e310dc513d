"""Does differential scoring still pay if its higher cost per token is counted?

Stored studies compare it with standard attention after equal tokens and after equal FLOPs. The reference has
the same runs in both; with equal FLOPs the arm is trained on fewer tokens.
"""

from __future__ import annotations

from qkflow.papers.claims import Results, find_arm, judged_difference
from qkflow.papers.coupled_dynamics.arms import FIXED_DIFFERENTIAL
from qkflow.report.document import format_count
from qkflow.report.tables import format_change

STUDIES = ("tokens-4M", "flops-4M")


def equal_cost_rows(results: Results) -> list[dict[str, str]]:
    """Return one row per budget that both arms share, with the tokens that it buys."""
    rows = []
    for name in STUDIES:
        comparison = results.comparison(name)
        arm, reference = find_arm(comparison, FIXED_DIFFERENTIAL), comparison.summary.reference
        assert reference is not None
        assert arm.cost.step_time_ratio is not None
        difference, verdict = judged_difference(comparison, FIXED_DIFFERENTIAL)
        rows.append(
            {
                "compared after equal": comparison.summary.config.match,
                "tokens, standard": format_count(reference.cost.tokens),
                "tokens, differential": format_count(arm.cost.tokens),
                "time per step, CPU": f"{arm.cost.step_time_ratio:.2f}×",
                "seeds": str(len(arm.seeds)),
                "change by differential (95%)": format_change(difference),
                "verdict": str(verdict),
            }
        )
    return rows
