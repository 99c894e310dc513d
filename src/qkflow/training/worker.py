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
from qkflow.training.config import Parallel, RunConfig
from qkflow.training.loop import CONFIG, RESULT, Listener, StoppedError, read_result, train, write_failure
from qkflow.training.step import NonFiniteError

FINISHED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 75


class Notes(Listener):
    """Says what is out of the ordinary, nothing else."""

    def note(self, text: str) -> None:
        print(f"qkflow: {text}", file=sys.stderr, flush=True)


def work(
    folder: Path,
    listener: Listener | None = None,
    parallel: Parallel | None = None,
    record: RunConfig | None = None,
) -> int:
    """Run to the end of the run, or of what can be done; the exit code.

    `record` is the config of a run that is new in the folder, or goes on with changes; it is written there.
    """
    if (read_result(folder) or {}).get("status") == "finished":
        return FINISHED
    if (folder / RESULT).is_file():
        (folder / RESULT).unlink(missing_ok=True)  # failed, or damaged: tried again from the last good state
    config = record or RunConfig.load(folder / CONFIG)
    if parallel is not None:
        config = replace(config, train=replace(config.train, parallel=parallel))
    try:
        train(folder, config, listener or Notes(), record=record)
    except StoppedError as stopped:
        print(f"qkflow: {stopped}: the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    except NonFiniteError as error:
        write_failure(folder, str(error))
        print(f"qkflow: {error}", file=sys.stderr)
        return FAILED
    return FINISHED


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qkflow.training.worker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=None, help="default: $OMP_NUM_THREADS, or all cores")
    parser.add_argument(
        "--parallel", choices=get_args(Parallel), help="how the processes of torchrun share work"
    )
    given = parser.parse_args(arguments)
    try:
        prepare_process(given.threads)
        return work(given.folder, parallel=given.parallel)
    except InputError as error:
        print(f"qkflow: {error}", file=sys.stderr)
        return BAD_INPUT
    except PermissionError as error:
        print(f"qkflow: {error.strerror} ({error.filename})", file=sys.stderr)
        return BAD_INPUT
    except DiskFullError as error:  # nothing has failed for good: with room it goes on
        print(f"qkflow: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return FAILED
    except Exception as error:
        traceback.print_exc()
        write_failure(given.folder, f"{type(error).__name__}: {error}")
        return FAILED


def prepare_process(threads: int | None) -> None:
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
