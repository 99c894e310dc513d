"""Any number of processes gives the run of one process, with DDP, FSDP2 and HSDP, over gloo.

Gradients are clipped in every step, so that a norm over the local shard alone, or a gradient scaled by the
number of processes, shows in `grad_norm`. AdamW and clipping are both nearly invariant to the scale of
gradients: losses alone would not show it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from input_errors import raises_code
from qkflow.attention import couplings, scorings
from qkflow.training import RunConfig, TrainConfig, train, worker
from qkflow.training.config import ParallelMode
from qkflow.training.distributed import DistContext
from qkflow.training.metrics_log import read_rows_by_kind
from qkflow.training.muon import newton_schulz_dtype
from qkflow.training.run_dir import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_LOCKED, lock_run_dir

LAUNCHER = Path(__file__).with_name("launch_processes.py")
CLIP = 0.05
MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(run_folder: MakeFolder) -> MakeFolder:
    """Return a function that creates the folder of a run with two layers, two microbatches and clipping."""

    def make(name: str, model: dict[str, Any] | None = None, **options: Any) -> Path:
        defaults = {"steps": 6, "batch_size": 8, "accumulate": 2, "log_every": 1, "clip": CLIP}
        defaults |= {"probe_every": 0, "evaluations": 1}
        return run_folder(name, model={"n_layers": 2, **(model or {})}, **(defaults | options))

    return make


def job(processes: int, *runs: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return {"processes": processes, "runs": [{"folder": str(folder), **options} for folder, options in runs]}


def launch(*jobs: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Run the jobs. Return what each printed, and the standard error of all."""
    done = subprocess.run([sys.executable, LAUNCHER, json.dumps(jobs)], capture_output=True, text=True)
    print(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def assert_all_finish(*jobs: dict[str, Any]) -> None:
    results, _ = launch(*jobs)
    assert results == [{"codes": [[0] * each["processes"]] * len(each["runs"])} for each in jobs]


def metric(folder: Path, kind: str, name: str) -> list[float]:
    return [row[name] for row in read_rows_by_kind(folder / "metrics.jsonl")[kind]]


def assert_equal_curves(folder: Path, reference: Path, rel: float = 1e-5) -> None:
    for kind, name in (("train", "grad_norm"), ("train", "loss"), ("eval", "loss")):
        expected = metric(reference, kind, name)
        assert metric(folder, kind, name) == pytest.approx(expected, rel=rel), f"{folder.name}: {kind} {name}"
    assert min(metric(folder, "train", "grad_norm")) > CLIP


@pytest.mark.parametrize("text", ["x", "-1", "2.5"])
def test_local_world_size_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with raises_code("invalid-world-size"):
        DistContext(torch.device("cpu"), "hsdp", world_size=4).mesh_shape()


def test_grad_norms_and_losses_match_one_process(make_folder: MakeFolder) -> None:
    modes = {1: ("ddp", "fsdp"), 2: ("ddp", "fsdp"), 4: ("ddp", "fsdp", "hsdp")}
    one = make_folder("one")
    folders = {
        n: [make_folder(f"{mode}-{n}", parallel=mode, shard_degree=2) for mode in modes[n]] for n in modes
    }
    assert worker.main([str(one)]) == 0
    assert_all_finish(*(job(n, *((folder, {}) for folder in folders[n])) for n in modes))
    for folder in chain.from_iterable(folders.values()):
        assert_equal_curves(folder, one)


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_one_process_is_not_wrapped(mode: ParallelMode) -> None:
    """Without a process group: FSDP with one process would gather what it already has."""
    context, model = DistContext(torch.device("cpu"), mode), torch.nn.Linear(2, 2)
    context.shard(model, [], TrainConfig())
    assert context.wrap(model) is model
    with context.gradient_sync(model, is_last_microbatch=False):
        model(torch.ones(2)).sum().backward()
    assert type(model) is torch.nn.Linear
    assert type(model.weight.data) is torch.Tensor


PARTS: dict[str, dict[str, Any]] = {
    **{name: {"model": {"attention": {"coupling": name}}} for name in couplings.names()},
    **{name: {"model": {"attention": {"scoring": name}}} for name in scorings.names()},
    "slow-path": {"model": {"slow": {"ratio": 4, "n_layers": 1, "gate_init": 0.5}}},
    "pace": {"pace": 4},
    "increasing-pace": {"pace": "increasing:40"},
    "muon": {"optimizer": "muon"},
}


def test_parts_under_fsdp_match_one_process(make_folder: MakeFolder) -> None:
    sizes = (1, 2)
    folders = {
        (name, n): make_folder(f"{name}-{n}", steps=4, **options)
        for name, options in PARTS.items()
        for n in (0, *sizes)
    }
    for name in PARTS:
        assert worker.main([str(folders[name, 0])]) == 0
    assert_all_finish(*(job(n, *((folders[name, n], {"parallel": "fsdp"}) for name in PARTS)) for n in sizes))
    is_rounded = newton_schulz_dtype(torch.device("cpu")) is torch.bfloat16
    for name in PARTS:
        for n in sizes:
            rel = 1e-3 if name == "muon" and is_rounded else 1e-5
            assert_equal_curves(folders[name, n], folders[name, 0], rel)


def test_compute_options_match_one_process(make_folder: MakeFolder) -> None:
    compiled = {"activation_checkpointing": True, "compile": "eager"}
    rounded = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
    drift = {"attention": {"coupling": "drift:fold_at=0.5"}}
    coupled = {"attention": {"coupling": "leapfrog:n=3", "scoring": "differential"}}
    references = {
        "fold": make_folder("fold", drift, steps=4),
        "fp32": make_folder("fp32", coupled, steps=4),
        "bf16": make_folder("bf16", coupled, steps=4, precision="bf16"),
    }
    fold = make_folder("fold-ddp", drift, steps=4)
    fsdp = make_folder("compiled-fsdp", coupled, steps=4, **compiled)
    low = make_folder("bf16-fsdp", coupled, steps=4, precision="bf16", **rounded)
    for folder in references.values():
        assert worker.main([str(folder)]) == 0
    modes = ((fold, "ddp"), (fsdp, "fsdp"), (low, "fsdp"))
    assert_all_finish(job(2, *((folder, {"parallel": mode}) for folder, mode in modes)))
    assert_equal_curves(fold, references["fold"])
    assert_equal_curves(fsdp, references["fp32"])
    assert_equal_curves(low, references["bf16"], rel=2e-2)
    assert metric(low, "train", "grad_norm") != metric(references["bf16"], "train", "grad_norm")


def test_resume_at_another_world_size(make_folder: MakeFolder) -> None:
    """2 → 1, 1 → 2 and 2 → 4 processes, also to another parallel mode."""
    names = ("one", "two-to-one", "one-to-two", "two-to-four", "ddp-to-hsdp")
    one, two_to_one, one_to_two, two_to_four, ddp_to_hsdp = (make_folder(name) for name in names)
    assert worker.main([str(one)]) == 0
    fsdp = {"parallel": "fsdp"}
    stopped = {**fsdp, "stop": 3}
    results, _ = launch(
        job(1, (one_to_two, stopped)),
        job(2, (two_to_one, stopped), (two_to_four, stopped), (ddp_to_hsdp, {"parallel": "ddp", "stop": 3})),
        job(1, (two_to_one, {})),
        job(2, (one_to_two, fsdp)),
        job(4, (two_to_four, fsdp), (ddp_to_hsdp, {"parallel": "hsdp"})),
    )
    codes = [result["codes"] for result in results]
    assert codes == [[[75]], [[75, 75]] * 3, [[0]], [[0, 0]], [[0] * 4] * 2]
    for folder in (two_to_one, one_to_two, two_to_four, ddp_to_hsdp):
        assert len(metric(folder, "train", "loss")) == 6
        assert_equal_curves(folder, one)


def test_killed_rank_ends_the_job(make_folder: MakeFolder) -> None:
    folders = {mode: make_folder(mode, steps=1000, save_every=2) for mode in ("ddp", "fsdp")}
    jobs = [job(2, (folder, {"parallel": mode, "kill": 5})) for mode, folder in folders.items()]
    results, stderr = launch(*jobs)
    assert results == [{"failed_rank": 1, "signal": "SIGKILL"}] * 2
    lines = [line for line in stderr.splitlines() if line.startswith("qkflow: ")]
    assert len(lines) == 2
    assert all("rank 0 lost" in line for line in lines)
    for folder in folders.values():
        assert not (folder / "result.json").exists()  # the run can be resumed
        assert (folder / "checkpoints" / "step-00000004").is_dir()


def test_torchrun_restarts_a_killed_run(make_folder: MakeFolder) -> None:
    undisturbed, killed = (make_folder(name, save_every=2) for name in ("undisturbed", "killed"))
    runs = [{"folder": str(folder), "parallel": "fsdp"} for folder in (undisturbed, killed)]
    runs[1]["kill"] = 5  # type: ignore[assignment]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", LAUNCHER, json.dumps(runs)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stderr
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (undisturbed, killed)]
    assert weights[0] == weights[1]
    for kind in ("train", "eval"):
        assert metric(killed, kind, "loss") == metric(undisturbed, kind, "loss")


def test_folder_that_processes_do_not_share(make_folder: MakeFolder) -> None:
    """As on two nodes, each with a local folder of the same name."""
    folders = [make_folder(f"rank-{rank}") for rank in range(2)]
    results, stderr = launch(job(2, (folders[0].with_name("rank-RANK"), {"parallel": "fsdp"})))
    assert results == [{"codes": [[EXIT_BAD_INPUT] * 2]}]
    assert stderr.count("[folder-not-shared]") == 2
    for folder in folders:
        assert not {path.name for path in folder.iterdir()} - {"config.yaml", ".worker.lock"}


def test_bad_input_ends_all_processes(make_folder: MakeFolder) -> None:
    """One sentence per process, no traceback, and the process group stays usable for the next run."""
    uneven = make_folder("uneven", batch_size=6, accumulate=1)
    locked = make_folder("locked")
    missing = make_folder("missing", data={"corpus": "/nowhere.txt"})
    degree = make_folder("degree", shard_degree=3)
    stopped, other = make_folder("stopped", {"dim": 32}), make_folder("other")
    (stopped / "checkpoints").mkdir()
    (other / "checkpoints").symlink_to(stopped / "checkpoints")
    fsdp = {"parallel": "fsdp"}
    runs = [(uneven, fsdp), (locked, fsdp), (missing, fsdp), (degree, {"parallel": "hsdp"})]
    with lock_run_dir(locked, DistContext(torch.device("cpu"))):
        results, stderr = launch(job(4, *runs, (stopped, {**fsdp, "stop": 3}), (other, fsdp)))
    codes = (EXIT_BAD_INPUT, EXIT_LOCKED, EXIT_BAD_INPUT, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BAD_INPUT)
    assert results == [{"codes": [[code] * 4 for code in codes]}]
    for code in (
        *("batch-not-divisible", "folder-locked", "corpus-not-found", "shard-degree-not-divisor"),
        "checkpoint-of-another-config",
    ):
        assert stderr.count(f"[{code}]") == 4, code
    assert "Traceback" not in stderr


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_parallel_mode_needs_torchrun(run_folder: MakeFolder, parallel: str) -> None:
    folder = run_folder(parallel=parallel)
    with raises_code("not-distributed"):
        train(folder, RunConfig.load(folder / "config.yaml"))


def test_parallel_none_under_torchrun(run_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = run_folder(parallel="none")
    with raises_code("parallel-none"):
        train(folder, RunConfig.load(folder / "config.yaml"))
