"""Wall-clock time of a grid of eight runs on a Ray cluster of this machine, relative to local processes.

    python benchmarks/engines.py                       # tiny, 200k tokens per run, 3 rounds
    python benchmarks/engines.py --tokens 50k --rounds 5

Both engines execute two runs at a time, in turns. The time of Ray includes starting and stopping its cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from qkflow.studies import compare


def seconds(engine: str, settings: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the wall-clock time of a study, and the losses of its runs."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        comparison = compare("speeches", out=Path(folder) / "study", engine=engine, **settings)
        elapsed = time.perf_counter() - start
    return elapsed, [run.result["loss"] for run in comparison.compared_runs if run.result]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--tokens", default="200k")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = {
        "variants": "euler",
        "controls": "none",
        "inits": "gpt2",
        "seeds": 4,
        "verdict": False,
        "preset": options.preset,
        "tokens": options.tokens,
        "jobs": options.jobs,
    }
    compare("speeches", out=Path(tempfile.mkdtemp()) / "warmup", **{**settings, "seeds": 1, "tokens": "4k"})
    rows = []
    for _ in range(options.rounds):
        (local, losses), (ray, ray_losses) = (seconds(engine, settings) for engine in ("local", "ray"))
        assert losses == ray_losses
        rows.append({"local": local, "ray": ray, "ratio": ray / local})
        if not options.json:
            print(f"local {local:6.1f} s   ray {ray:6.1f} s   ratio {ray / local:.3f}", flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    print(json.dumps({"rounds": rows, "ratio": ratio}) if options.json else f"median ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
