"""What couplings and scorings cost in a training step, from the stored output of `qkflow bench`."""

from __future__ import annotations

from typing import Any

from qkflow.papers.claims import Results

RECORD = "block-time"
VARIANTS = "none,drift,euler n=1,euler n=7,leapfrog n=7,affine n=1,differential,textbook leapfrog"
COMMAND = f"qkflow bench --level block --threads 1 --rounds 11 --variants '{VARIANTS}' --json"


def find_time(output: Any, variant: str, steps: int | None = None) -> Any:
    """Return the row of a variant. Raise LookupError if it was not timed."""
    for row in output["rows"]:
        if (row["variant"], row["steps"]) == (variant, steps):
            return row
    raise LookupError(f"no row {variant} with {steps} steps")


def format_ratio(row: Any) -> str:
    return f"{row['ratio']:.3f}× ({row['low']:.3f}…{row['high']:.3f})"


def step_time_rows(results: Results) -> list[dict[str, str]]:
    """Return time, FLOPs and peak memory of a block's training step, relative to standard attention."""
    return [
        {
            "variant": row["variant"],
            "steps": str(row["steps"] or "–"),
            "time (95%)": format_ratio(row),
            "FLOPs": f"{row['flop_ratio']:.3f}×",
            "peak memory": f"{row['memory_ratio']:.2f}×",
        }
        for row in results.output(RECORD)["rows"]
    ]
