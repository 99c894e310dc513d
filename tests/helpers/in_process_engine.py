"""An engine that runs each worker in this process: Python starts more slowly than a tiny model trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from qkflow.studies.finetune import worker as finetune_worker
from qkflow.studies.finetune.study import WORKER_MODULE as FINETUNE_WORKER
from qkflow.studies.pace import worker as pace_worker
from qkflow.studies.pace.study import WORKER_MODULE as PACE_WORKER
from qkflow.studies.runner import engines
from qkflow.training import worker as training_worker


class InProcessEngine(engines.LocalEngine):
    """Runs each worker in this process."""

    started: ClassVar[list[str]] = []

    sentinel = None

    def __init__(
        self,
        command: Sequence[str] | None = None,
        threads: int = 1,
        device: str = "auto",
        *,
        module: str = "",
        processes: int = 1,
    ) -> None:
        self.module = module

    def default_jobs(self) -> int:
        return 1

    def start(self, folder: Path, slot: int) -> InProcessEngine:
        self.started.append(folder.name)
        if self.module == FINETUNE_WORKER:
            self.code = finetune_worker.main(folder)
        elif self.module == PACE_WORKER:
            self.code = pace_worker.main(folder)
        else:
            self.code = training_worker.main([str(folder), "--threads", "1"])
        return self

    def poll(self) -> int:
        return self.code

    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
