"""Train and measure the run in a folder: `python -m qkflow.studies.pace.worker FOLDER`.

Exit codes are those of `qkflow.training.worker`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from qkflow.plain_data import read_yaml
from qkflow.studies.pace import run
from qkflow.studies.pace.config import PaceRunConfig
from qkflow.training.run_dir import EXIT_FINISHED, EXIT_INTERRUPTED, RUN_CONFIG_FILE
from qkflow.training.worker import configure_process, exit_code_of


def main(folder: Path) -> int:
    def train_and_measure() -> int:
        configure_process(threads=int(os.environ.get("OMP_NUM_THREADS", "1")))
        config = read_yaml(folder / RUN_CONFIG_FILE)
        run.train_and_measure(folder, PaceRunConfig.from_dict(config))
        return EXIT_FINISHED

    return exit_code_of(folder, train_and_measure)


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit at once: there is no checkpoint to save, a run is trained again from step 0."""
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main(Path(sys.argv[1])))
