"""What a coupling costs: the stored output of `qkflow bench`, beside the published factor."""

from __future__ import annotations

from qkflow.papers.claims import Results

BENCHMARK = "bench-block"
PUBLISHED_TIME_RATIO = 2.4  # standard attention trained this much longer in wall-clock time does as well


def cost_rows(results: Results) -> list[dict[str, str]]:
    """Return time, FLOPs and memory of a training step of one block, relative to standard attention."""
    rows = []
    for row in results.output(BENCHMARK)["rows"]:
        steps = f", {row['steps']} steps" if (row["steps"] or 1) > 1 else ""
        rows.append(
            {
                "coupling": row["variant"] + steps,
                "time (95%)": f"{row['ratio']:.3f}× ({row['low']:.3f}…{row['high']:.3f})",
                "FLOPs": f"{row['flop_ratio']:.3f}×",
                "memory": f"{row['memory_ratio']:.3f}×",
            }
        )
    return rows
