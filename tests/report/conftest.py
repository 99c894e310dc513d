"""Synthetic studies on disk, for tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_study import FINAL, HOSTILE, write_study
from qkflow.studies.config import ComparisonConfig


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of three variants and the two controls."""
    config = ComparisonConfig(
        variants=("standard", "euler", "leapfrog:n=7"), tokens=200_000, seeds=3, inits=("gpt2", "fan_in")
    )
    return write_study(tmp_path_factory.mktemp("made") / "study", config, FINAL)


@pytest.fixture(scope="session")
def hostile_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with text that must be escaped, and a variant whose runs all failed."""
    config = ComparisonConfig(
        data=HOSTILE, variants=("standard", "euler@gpt2"), tokens=200_000, seeds=3, inits=("gpt2", "fan_in")
    )
    return write_study(tmp_path_factory.mktemp("made") / "hostile", config, FINAL, fail="euler@gpt2")
