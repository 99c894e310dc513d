"""Studies with made-up runs on disk, for tests and benchmarks that only read them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import RunSpec, build_grid
from qkflow.studies.plan import StudyPlan
from qkflow.studies.runner.study_dir import StudyDir

# Final loss by cell; seeds add shared and independent noise.
FINAL = {
    "standard@gpt2": 4.69,
    "standard@fan_in": 5.05,
    "euler@gpt2": 4.70,
    "euler@fan_in": 4.97,
    "leapfrog:n=7@gpt2": 4.71,
    "leapfrog:n=7@fan_in": 4.97,
    "standard@gpt2+symmetric=1": 4.69,
    "standard@fan_in+symmetric=1": 4.58,
    "uncoupled@gpt2": 4.745,
    "uncoupled@fan_in": 5.06,
}
POINTS = 20
HOSTILE = "</script><script>alert(1)</script><img src=https://example.com/x.png> 🦉 שלום"


def write_study(
    path: Path,
    config: ComparisonConfig,
    final: dict[str, float],
    fail: str | None = None,
    points: int = POINTS,
    layers: int = 4,
) -> Path:
    """Write the folder of a finished comparison; losses decrease to those in `final`."""
    study_dir, grid = StudyDir(path), build_grid(config)
    models = {cell.variant.model_name for cell in grid.cells}
    tokens = dict.fromkeys(models, config.tokens or 0)
    runs = grid.build_runs("compare", range(config.n_seeds), tokens_by_model=tokens)
    arms, planned = tuple(arm.plan() for arm in grid.arms), tuple(run.plan() for run in runs)
    StudyPlan(config, config.to_command(str(path)), arms, tokens, jobs=2, runs=planned).save(study_dir)
    for run in runs:
        run_dir = study_dir.run_dir(run.id)
        run_dir.write_config(run.config)
        if run.cell == fail:
            (run_dir.path / "log.txt").write_text("step 3\nloss is <nan> & gone\n")
            run_dir.write_failure("loss is <nan> & gone")
        else:
            _write_run(run_dir.path, run, final[run.cell], points, layers)
    return path


def _write_run(path: Path, run: RunSpec, final: float, points: int, layers: int) -> None:
    shared = np.random.default_rng(run.seed).normal() * 0.012
    own = np.random.default_rng([run.seed, *run.cell.encode()])
    final += shared + own.normal() * 0.004
    step_seconds = 0.11 * (1.04 if "leapfrog" in run.cell else 1.0) * math.exp(own.normal() * 0.01)
    rows: list[dict[str, Any]] = []
    for i in range(points + 1):
        share = i / points
        step = round(share * run.steps)
        loss = final + (7.6 - final) * (1 - share) ** 2 * math.exp(-4 * share)
        common = {"step": step, "tokens": step * 2048}
        rows.append({"kind": "train", **common, "loss": loss, "tokens_per_second": 2048 / step_seconds})
        rows.append(
            {
                "kind": "eval",
                **common,
                "seconds": step * step_seconds,
                "flops": common["tokens"] * 8e6,
                "loss": loss,
                "perplexity": math.exp(loss),
                "bits_per_byte": loss / math.log(2) / 3.4,
            }
        )
        depth = np.arange(layers)
        probe = {
            "attention_entropy": (3.8 - 1.6 * share - 0.2 * depth + own.normal() * 0.02).tolist(),
            "sink_mass": (0.02 + 0.2 * share * (1 + depth) / layers).tolist(),
            "spectral_gap": (0.2 + 0.4 * share / (1 + depth)).tolist(),
            "max_logit": (3 + 5 * share + 0.1 * depth).tolist(),
            "qk_scale": (1 + share * (1 + depth)).tolist(),
            "ov_scale": (1 + 0.5 * share * (layers - depth)).tolist(),
            "effective_pace": (1 + 0.1 * depth + share).tolist(),
            "copy_gain": 0.4 * share,  # of the whole model
        }
        if "euler" in run.cell or "leapfrog" in run.cell or "uncoupled" in run.cell:
            probe["step_size"] = (0.1 + 0.3 * share * (depth - 1)).tolist()
        rows.append({"kind": "probe", **common, **probe})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {
        "status": "finished",
        "error": None,
        "loss": rows[-2]["loss"],
        "perplexity": math.exp(rows[-2]["loss"]),
        "bits_per_byte": rows[-2]["bits_per_byte"],
        "tokens": run.steps * 2048,
        "steps": run.steps,
        "seconds": run.steps * step_seconds,
        "step_seconds": step_seconds,
        "peak_memory_bytes": 312_000_000,
        "parameters": 1_049_728,
        "parameters_by_role": {"embed": 262144, "mlp": 524288},
        "flops_per_token": 8e6,
        "environment": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "device": "cpu",
            "threads": 1,
            "commit": "1a2b3c4",
        },
    }
    (path / "result.json").write_text(json.dumps(result))


def put_markup_everywhere(folder: Path) -> None:
    """Put markup into every text that a study has: plan, results, environments, logs."""
    path = folder / "study.yaml"
    study = yaml.safe_load(path.read_text())
    names = {cell["name"]: f"{cell['name']}{HOSTILE}" for arm in study["arms"] for cell in arm["cells"]}
    study |= {"command": HOSTILE, "created_at": HOSTILE}
    study["config"] |= {"data": HOSTILE, "tokenizer": HOSTILE, "device": HOSTILE}
    for arm in study["arms"]:
        arm |= {"name": f"{arm['name']}{HOSTILE}", "added_at": HOSTILE}
        for cell in arm["cells"]:
            cell |= {"name": names[cell["name"]], "init": HOSTILE}
    for number, run in enumerate(study["runs"]):
        run["cell"] = names[run["cell"]]
        result = folder / "runs" / run["id"] / "result.json"
        if not result.exists():
            continue
        values = json.loads(result.read_text())
        values["environment"] = {HOSTILE: HOSTILE, "commit": HOSTILE, "python": f"{HOSTILE}{number}"}
        failed = {"status": "failed", "error": HOSTILE}
        result.write_text(json.dumps(failed if number == 0 else values))
    path.write_text(yaml.safe_dump(study, allow_unicode=True))
