"""Two real processes over gloo: the same run as one process, whichever way the work is shared."""

import subprocess
import sys
from pathlib import Path

import pytest

from qkflow.errors import InputError
from qkflow.training import RunConfig, train
from qkflow.training.metrics_log import read_rows


def losses(folder):
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def test_one_and_two_processes_and_moves_between_them(run_folder):
    options = {"steps": 8, "batch_size": 8, "accumulate": 2, "log_every": 1, "save_every": 3, "keep": 1}
    one, ddp, narrowed, widened = (
        run_folder(name, model={"n_layers": 2}, **options) for name in ("one", "ddp", "narrowed", "widened")
    )
    lives = [
        f"{one}:1:none:0",
        f"{ddp}:2:ddp:0",
        f"{narrowed}:2:fsdp:4",  # stopped at step 4 by a signal to one process,
        f"{narrowed}:1:none:0",  # and gone on with alone
        f"{widened}:1:none:4",
        f"{widened}:2:fsdp:0",
    ]
    script = Path(__file__).with_name("together.py")
    done = subprocess.run([sys.executable, script, *lives], capture_output=True, text=True)
    codes = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert codes == ["[0]", "[0, 0]", "[75, 75]", "[0]", "[75]", "[0, 0]"], done.stderr
    assert len(losses(one)) == 10
    for other in (ddp, narrowed, widened):
        assert losses(other) == pytest.approx(losses(one), rel=1e-5)


def test_a_way_to_share_work_without_others_to_share_it_with(run_folder):
    folder = run_folder(parallel="fsdp")
    with pytest.raises(InputError, match="needs several processes"):
        train(folder, RunConfig.load(folder / "config.yaml"))
