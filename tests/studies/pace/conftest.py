"""Data shared by the tests of the pace study."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkflow.studies.pace.dataset import DataLimits, TaskData
from toy_task import load_task, write_squad


@pytest.fixture(scope="session")
def agreement() -> TaskData:
    return load_task("agreement", "generate", DataLimits(False, 200, 60))


@pytest.fixture(scope="session")
def squad(tmp_path_factory: pytest.TempPathFactory) -> TaskData:
    return load_task("squad", write_squad(tmp_path_factory.mktemp("squad")))


@pytest.fixture
def squad_file(tmp_path: Path) -> Path:
    return write_squad(tmp_path)
