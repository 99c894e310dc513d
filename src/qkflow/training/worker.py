"""Train the run in a folder: `python -m qkflow.training.worker FOLDER [--threads N] [--parallel ddp|fsdp]`.

Exit codes: 0 finished, 75 stopped by a signal with its state saved, 2 bad input, 1 failed (see result.json).
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, get_args

import torch

from qkflow.errors import InputError
from qkflow.training.checkpoint import DiskFullError
from qkflow.training.config import ParallelMode, RunConfig
from qkflow.training.loop import (
    RESULT_FILE,
    RUN_CONFIG_FILE,
    Callback,
    StoppedError,
    read_result,
    train,
    write_failure,
)
from qkflow.training.step import NonFiniteError

EXIT_FINISHED, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 75


class StderrCallback(Callback):
    """Says what is out of the ordinary, nothing else."""

    def on_message(self, text: str) -> None:
        print(f"qkflow: {text}", file=sys.stderr, flush=True)


def run_worker(
    folder: Path,
    callback: Callback | None = None,
    parallel: ParallelMode | None = None,
    config_to_save: RunConfig | None = None,
) -> int:
    """Run to the end of the run, or of what can be done; the exit code.

    `record` is the config of a run that is new in the folder, or goes on with changes; it is written there.
    """
    if (read_result(folder) or {}).get("status") == "finished":
        return EXIT_FINISHED
    if (folder / RESULT_FILE).is_file():
        (folder / RESULT_FILE).unlink(
            missing_ok=True
        )  # failed, or damaged: tried again from the last good state
    config = config_to_save or RunConfig.load(folder / RUN_CONFIG_FILE)
    if parallel is not None:
        config = replace(config, train=replace(config.train, parallel=parallel))
    try:
        train(folder, config, callback or StderrCallback(), config_to_save=config_to_save)
    except StoppedError as stopped:
        print(f"qkflow: {stopped}: the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    except NonFiniteError as error:
        write_failure(folder, str(error))
        print(f"qkflow: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_FINISHED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qkflow.training.worker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=None, help="default: $OMP_NUM_THREADS, or all cores")
    parser.add_argument(
        "--parallel", choices=get_args(ParallelMode), help="how the processes of torchrun share work"
    )
    given = parser.parse_args(argv)
    try:
        configure_process(given.threads)
        return run_worker(given.folder, parallel=given.parallel)
    except InputError as error:
        print(f"qkflow: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except PermissionError as error:
        print(f"qkflow: {error.strerror} ({error.filename})", file=sys.stderr)
        return EXIT_BAD_INPUT
    except DiskFullError as error:  # nothing has failed for good: with room it goes on
        print(f"qkflow: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        write_failure(given.folder, f"{type(error).__name__}: {error}")
        return EXIT_FAILED


def configure_process(threads: int | None) -> None:
    """Settings of the whole process."""
    if threads is not None and threads < 1:
        raise InputError(f"--threads must be at least 1, not {threads}")
    if threads is not None:
        torch.set_num_threads(threads)
    # Averages of gradients that have long been zero (rare tokens) fade into numbers too small for full speed.
    torch.set_flush_denormal(True)


def run() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    run()
