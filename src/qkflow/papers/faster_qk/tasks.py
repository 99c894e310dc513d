"""What a faster query-key circuit does on the tasks of the paper, with nothing else changed."""

from __future__ import annotations

from qkflow.papers.claims import Results
from qkflow.papers.faster_qk.claims import read_change

TASKS = ("agreement", "hatexplain", "squad")
MEASURES = {
    "performance": "test performance",
    "mass": "attention on the rationale",
    "confidence": "attention confidence",
    "comprehensiveness": "comprehensiveness",
    "sufficiency": "sufficiency",
    "qk_scale": "scale of QK",
}


def task_rows(results: Results) -> list[dict[str, str]]:
    """Return one row per task and ratio: every measure, and the interval of its difference to r = 1."""
    rows = []
    for task in TASKS:
        output = results.output(f"pace-{task}")
        for row in output["rows"]:
            cells = {"task": task, "r": str(row["ratio"]), "seeds": str(len(row["seeds"]))}
            for name, label in MEASURES.items():
                if row["ratio"] == output["baseline"]:
                    cells[label] = f"{row['measures'][name]['mean']:.3g}"
                else:
                    cells[label] = read_change(output, name, row["ratio"]).effect
            rows.append(cells)
    return rows
