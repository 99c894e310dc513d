"""Two processes over gloo give the same run as one process, with DDP and with FSDP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.training import RunConfig, train
from qkflow.training.metrics_log import read_rows_by_kind


def metric(folder: Path, kind: str, name: str) -> list[float]:
    return [row[name] for row in read_rows_by_kind(folder / "metrics.jsonl")[kind]]


def launch(launches: list[str]) -> list[str]:
    """Run `launch_processes.py`. Return the exit codes of each launch, as printed."""
    script = Path(__file__).with_name("launch_processes.py")
    done = subprocess.run([sys.executable, script, *launches], capture_output=True, text=True)
    print(done.stderr)
    return [line.split(" ", 1)[1] for line in done.stdout.splitlines()]


def test_two_processes_match_one_and_resume_each_other(run_folder: Callable[..., Path]) -> None:
    """Gradients are clipped in every step, so a gradient scaled by the world size shows in `grad_norm`.

    AdamW and clipping are both nearly invariant to the scale of gradients: losses alone would not show it.
    """
    clip = 0.05
    options = {"steps": 8, "batch_size": 8, "accumulate": 2, "log_every": 1, "save_every": 3, "clip": clip}
    names = ("one", "ddp", "fsdp", "fsdp-to-one", "one-to-fsdp")
    one, ddp, fsdp, fsdp_to_one, one_to_fsdp = (
        run_folder(name, model={"n_layers": 2}, keep_latest_k=1, **options) for name in names
    )
    launches = [
        f"{one}:1:none:0",
        f"{ddp}:2:ddp:0",
        f"{fsdp}:2:fsdp:0",
        f"{fsdp_to_one}:2:fsdp:4",  # stopped at step 4 by a signal to one process
        f"{fsdp_to_one}:1:none:0",
        f"{one_to_fsdp}:1:none:4",
        f"{one_to_fsdp}:2:fsdp:0",
    ]
    codes = launch(launches)
    assert codes == ["[0]", "[0, 0]", "[0, 0]", "[75, 75]", "[0]", "[75]", "[0, 0]"]
    norms = metric(one, "train", "grad_norm")
    assert len(norms) == 8
    assert min(norms) > clip
    for other in (ddp, fsdp, fsdp_to_one, one_to_fsdp):
        assert metric(other, "train", "grad_norm") == pytest.approx(norms, rel=1e-4), other.name
        for kind in ("train", "eval"):
            assert metric(other, kind, "loss") == pytest.approx(metric(one, kind, "loss"), rel=1e-5), kind


def test_muon_with_two_processes_matches_one(run_folder: Callable[..., Path]) -> None:
    """Up to the rounding of bfloat16: Muon orthogonalizes whole matrices, also where they are sharded."""
    options = {"steps": 8, "batch_size": 8, "log_every": 1, "save_every": 3, "optimizer": "muon"}
    one, ddp, fsdp, fsdp_to_one = (
        run_folder(name, model={"n_layers": 2}, **options) for name in ("one", "ddp", "fsdp", "fsdp-to-one")
    )
    launches = [f"{one}:1:none:0", f"{ddp}:2:ddp:0", f"{fsdp}:2:fsdp:0"]
    launches += [f"{fsdp_to_one}:2:fsdp:4", f"{fsdp_to_one}:1:none:0"]
    assert launch(launches) == ["[0]", "[0, 0]", "[0, 0]", "[75, 75]", "[0]"]
    for other in (ddp, fsdp, fsdp_to_one):
        for kind in ("train", "eval"):
            assert metric(other, kind, "loss") == pytest.approx(metric(one, kind, "loss"), rel=2e-4), (
                other.name
            )


def test_fold_with_two_processes_matches_one(run_folder: Callable[..., Path]) -> None:
    model = {"attention": {"coupling": "drift:fold_at=0.5"}}
    options = {"steps": 8, "batch_size": 8, "accumulate": 2, "log_every": 1, "clip": 0.05}
    one, ddp = (run_folder(name, model=model, **options) for name in ("one", "ddp"))
    assert launch([f"{one}:1:none:0", f"{ddp}:2:ddp:0"]) == ["[0]", "[0, 0]"]
    assert metric(ddp, "train", "grad_norm") == pytest.approx(metric(one, "train", "grad_norm"), rel=1e-4)
    assert metric(ddp, "train", "loss") == pytest.approx(metric(one, "train", "loss"), rel=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_parallel_mode_needs_several_processes(run_folder: Callable[..., Path], parallel: str) -> None:
    folder = run_folder(parallel=parallel)
    with raises_code("not-distributed"):
        train(folder, RunConfig.load(folder / "config.yaml"))


def test_parallel_none_under_torchrun(
    run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = run_folder(parallel="none")
    with raises_code("parallel-none"):
        train(folder, RunConfig.load(folder / "config.yaml"))
