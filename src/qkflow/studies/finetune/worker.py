"""Fine-tune the run in a folder: `python -m qkflow.studies.finetune.worker FOLDER`.

Exit codes are those of `qkflow.training.worker`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from qkflow.plain_data import read_yaml
from qkflow.studies.finetune.config import FinetuneRunConfig
from qkflow.studies.finetune.run import finetune_and_score
from qkflow.studies.pace.worker import exit_on_signal
from qkflow.training.run_dir import EXIT_FAILED, EXIT_FINISHED, RUN_CONFIG_FILE, write_failure
from qkflow.training.step import NonFiniteError
from qkflow.training.worker import configure_process, exit_code_of


def main(folder: Path) -> int:
    def finetune() -> int:
        configure_process(threads=int(os.environ.get("OMP_NUM_THREADS", "1")))
        config = read_yaml(folder / RUN_CONFIG_FILE)
        try:
            finetune_and_score(folder, FinetuneRunConfig.from_dict(config))
        except NonFiniteError as error:
            write_failure(folder, str(error))
            print(f"qkflow: {error}", file=sys.stderr)
            return EXIT_FAILED
        return EXIT_FINISHED

    return exit_code_of(folder, finetune)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main(Path(sys.argv[1])))
