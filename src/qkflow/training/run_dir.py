"""The folder of a run: the only interface between the process that trains and everything else.

    config.yaml        the config; the only input
    metrics.jsonl      rows of kind train, eval and probe, appended while training
    checkpoints/       see `checkpoint`; removed when the run is finished
    model/             config.json, model.safetensors, tokenizer.json: the trained model
    result.json        written last, when the run has ended: status `finished` or `failed`

The exit code of a worker process tells finished, failed and interrupted runs apart.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from qkflow import files, locks
from qkflow.errors import InputError, shorten
from qkflow.plain_data import is_number, read_json
from qkflow.system import handle_signals, termination_signals
from qkflow.training.distributed import DistContext

RUN_CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS_DIR = "checkpoints"
MODEL_DIR = "model"
RESULT_FILE = "result.json"
RUN_LOCK = ".worker.lock"
MAX_RESULT_BYTES = 1 << 20  # a study reads one per run; they have kilobytes

RESULT_NUMBERS = (
    *("loss", "perplexity", "bits_per_byte", "tokens", "steps", "seconds", "step_seconds"),
    *("peak_memory_bytes", "parameters", "flops_per_token"),
)

EXIT_FINISHED = 0
EXIT_FAILED = 1  # the reason is in result.json, unless the disk is full
EXIT_BAD_INPUT = 2
EXIT_LOCKED = 74  # another process trains in the folder
EXIT_INTERRUPTED = 75  # stopped by a signal after saving a checkpoint: can be resumed


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the content of result.json; None if it is missing or damaged.

    Raise InputError for a folder or pipe of this name: a run that was trained again could not replace it.
    """
    try:
        result = read_json(folder / RESULT_FILE, MAX_RESULT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except InputError as error:
        if error.code == "not-a-file":
            raise
        return None
    return result if isinstance(result, dict) else None


def check_result(result: dict[str, Any], source: Path | str) -> dict[str, Any]:
    """Return the content of a result.json whose values have the types that readers rely on.

    Raise InputError (code `corrupt-result`) that names file, key and value otherwise.
    """
    for key, value in result.items():
        expected = _wrong_result_type(key, value)
        if expected:
            raise InputError(
                f"{source}: '{key}' is {shorten(value)}, not {expected}: remove the file to train the run "
                "again",
                code="corrupt-result",
            )
    return result


def _wrong_result_type(key: str, value: Any) -> str:
    """Return what a value of a result should be, if it is not."""
    if key in RESULT_NUMBERS and not is_number(value, or_none=True):
        return "a number"
    if key in ("status", "error") and not isinstance(value, str | None):
        return "text"
    if key in ("environment", "stability", "parameters_by_role") and not isinstance(value, dict | None):
        return "a mapping"
    if key == "stability" and value and not all(map(is_number, value.values())):
        return "a mapping to numbers"
    return ""


def write_failure(folder: Path, error: str) -> None:
    """Write the result.json of a failed run."""
    files.write_json(folder / RESULT_FILE, {"status": "failed", "error": error})


@contextmanager
def lock_run_dir(folder: Path, dist_context: DistContext) -> Iterator[None]:
    """Lock the run folder in the main process; two runs in one folder would overwrite each other."""
    with ExitStack() as stack:
        dist_context.run_on_main(lambda: stack.enter_context(locks.lock_folder(folder, RUN_LOCK)))
        _check_shared(folder, dist_context)
        yield


def _check_shared(folder: Path, dist_context: DistContext) -> None:
    """Raise InputError in all processes if one of them does not see the folder of the main process."""
    if dist_context.world_size == 1:
        return
    probe = folder / f".probe-{dist_context.broadcast(secrets.token_hex(8))}"
    dist_context.run_on_main(lambda: files.write_atomic(probe, ""))
    (is_missing,) = dist_context.any_rank(not probe.exists())
    if dist_context.is_main:
        probe.unlink()
    if is_missing:
        raise InputError(
            f"not every process can read {folder}, which process 0 writes: the nodes of a run need a shared "
            "file system; train in a folder there",
            code="folder-not-shared",
        )


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set an event on Ctrl-C, SIGTERM or SIGHUP; raise KeyboardInterrupt on the second signal."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with handle_signals(handle, (signal.SIGINT, *termination_signals())):
        yield stop
