"""Do the run in a folder: `python -m qkflow.studies.pace.worker FOLDER`. Exit codes: `training.worker`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

import yaml

from qkflow.errors import InputError
from qkflow.studies.runner.engines import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from qkflow.training.run_dir import write_failure


def main(folder: Path) -> int:
    import torch

    from qkflow.studies.pace.config import PaceRunConfig
    from qkflow.studies.pace.run import train_and_measure

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_flush_denormal(True)
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
        train_and_measure(folder, PaceRunConfig.from_dict(config))
    except InputError as error:
        print(f"qkflow: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except Exception as error:
        traceback.print_exc()
        write_failure(folder, f"{type(error).__name__}: {error}")
        return 1
    return 0


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(EXIT_INTERRUPTED)  # nothing to save: a run this short begins anew


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main(Path(sys.argv[1])))
