"""Train the run in a folder: `python -m qkflow.training.worker FOLDER [--threads N] [--parallel MODE]`.

Exit codes: 0 finished, 75 stopped by a signal after a checkpoint, 2 bad input, 1 failed (see result.json).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, get_args

import torch

from qkflow import files
from qkflow.config_io import THREADS
from qkflow.errors import InputError
from qkflow.files import DiskFullError
from qkflow.training.callbacks import Callback, StderrCallback
from qkflow.training.config import ParallelMode, RunConfig
from qkflow.training.distributed import LostProcessError
from qkflow.training.loop import StoppedError, train
from qkflow.training.run_dir import (
    CHECKPOINTS_DIR,
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LOCKED,
    RESULT_FILE,
    RUN_CONFIG_FILE,
    read_result,
    write_failure,
)
from qkflow.training.step import NonFiniteError


def run_worker(
    folder: Path,
    callback: Callback | None = None,
    parallel: ParallelMode | None = None,
    config_to_save: RunConfig | None = None,
) -> int:
    """Train until the run is finished, stopped or failed. Return the exit code.

    `config_to_save` is the config of a new run, or of a resumed run with changes, to write to the folder.
    """
    if (read_result(folder) or {}).get("status") == "finished":
        shutil.rmtree(folder / CHECKPOINTS_DIR, ignore_errors=True)  # left by a kill after result.json
        return EXIT_FINISHED
    if (folder / RESULT_FILE).is_file():  # failed or damaged: retry from the last checkpoint
        (folder / RESULT_FILE).unlink(missing_ok=True)
    config = config_to_save or RunConfig.load(folder / RUN_CONFIG_FILE)
    if parallel is not None:
        config = replace(config, train=replace(config.train, parallel=parallel))
    try:
        train(folder, config, callback or StderrCallback(), config_to_save=config_to_save)
    except StoppedError as stopped:
        print(f"qkflow: {stopped}: the same command resumes it", file=sys.stderr)
        return EXIT_INTERRUPTED
    except LostProcessError as error:  # no result.json: the run can be resumed
        reason = "torchrun names the first process that ended"
        print(f"qkflow: {error}: {reason}, and the same command resumes the run", file=sys.stderr)
        return EXIT_FAILED
    except NonFiniteError as error:
        write_failure(folder, str(error))
        print(f"qkflow: {error}", file=sys.stderr)
        return EXIT_FAILED
    except DiskFullError as error:
        return report_disk_full(error)
    return EXIT_FINISHED


def report_disk_full(error: OSError) -> int:
    """Print how to finish the run. No result.json is written: the run can be resumed with more space."""
    reason = error if isinstance(error, DiskFullError) else f"the disk is full ({error.filename or error})"
    print(InputError(str(reason), code="disk-full").to_line(), file=sys.stderr)
    return EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qkflow.training.worker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=None, help="default: $OMP_NUM_THREADS, or all cores")
    parser.add_argument(
        "--parallel", choices=get_args(ParallelMode), help="parallel mode of the processes of torchrun"
    )
    options = parser.parse_args(argv)

    def run() -> int:
        configure_process(options.threads)
        return run_worker(options.folder, parallel=options.parallel)

    return exit_code_of(options.folder, run)


def exit_code_of(folder: Path, run: Callable[[], int]) -> int:
    """Return the exit code of `run`. Print its error; write a failed result.json for unexpected ones."""
    try:
        return run()
    except InputError as error:
        print(error.to_line(), file=sys.stderr)
        return EXIT_LOCKED if error.code == "folder-locked" else EXIT_BAD_INPUT
    except PermissionError as error:
        print(f"qkflow: {error.strerror} ({error.filename})", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_FAILED
    except Exception as error:
        if isinstance(error, OSError) and files.is_disk_full(error):
            return report_disk_full(error)
        traceback.print_exc()
        write_failure(folder, f"{type(error).__name__}: {error}")
        return EXIT_FAILED


def configure_process(threads: int | None) -> None:
    """Set the number of CPU threads of this process, and flush denormals to zero."""
    if threads is not None:
        THREADS.check("--threads", threads)
        torch.set_num_threads(threads)
    # Moments of gradients that stay zero (rare tokens) decay to denormals, which are slow on CPUs.
    torch.set_flush_denormal(True)


def run() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    run()
