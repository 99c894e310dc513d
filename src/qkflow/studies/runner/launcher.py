"""Run one worker in several processes: `python -m qkflow.studies.runner.launcher N MODULE FOLDER`.

torchrun starts processes too, but ends with an exit code of its own. That of a worker tells how its run has
ended, so this launcher returns the code of the first process that did not finish.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from qkflow.system import end_with_parent
from qkflow.training.run_dir import EXIT_FAILED, EXIT_FINISHED

POLL_INTERVAL = 0.1  # seconds
EXIT_TIMEOUT = 20.0  # seconds for the other processes once one has not finished


def launch(n_processes: int, command: Sequence[str]) -> int:
    """Run `command` in `n_processes` ranks of one process group; return the exit code of the run."""
    from torch.distributed import TCPStore

    # The launcher serves the store, at a port that is free: no process has to guess one.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [_start_rank(rank, n_processes, store.port, command) for rank in range(n_processes)]

    def forward(number: int, frame: object) -> None:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _start_rank(rank: int, world_size: int, port: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    env = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 does not serve a store of its own
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return subprocess.Popen(
        command,
        env={**os.environ, **{key: str(value) for key, value in env.items()}},
        preexec_fn=partial(end_with_parent, os.getpid()) if sys.platform == "linux" else None,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    first, deadline = EXIT_FINISHED, float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if first == EXIT_FINISHED:
            unfinished = [(code, rank) for rank, code in enumerate(codes) if code]
            if unfinished:
                first, rank = unfinished[0]
                deadline = time.monotonic() + EXIT_TIMEOUT
                if first < 0:
                    print(f"qkflow: rank {rank} was killed by signal {-first}", file=sys.stderr)
                    return EXIT_FAILED
        if None not in codes:
            break
        time.sleep(POLL_INTERVAL)
    return first


def main(arguments: Sequence[str]) -> int:
    n_processes, module, folder = arguments
    return launch(int(n_processes), [sys.executable, "-m", module, folder])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
