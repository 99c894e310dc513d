"""The table of step times, from the stored output of `qkflow bench`."""

from __future__ import annotations

import pytest

from qkflow.papers.claims import Results
from qkflow.papers.coupled_dynamics.step_time import RECORD, VARIANTS, find_time, step_time_rows


def test_noise_level_contains_one() -> None:
    row = find_time(Results().output(RECORD), "none")
    assert row["low"] <= 1 <= row["high"]


def test_rows_are_those_of_the_command() -> None:
    rows = step_time_rows(Results())
    assert [row["variant"] for row in rows] == [name.partition(" n=")[0] for name in VARIANTS.split(",")]


def test_variant_that_was_not_timed() -> None:
    with pytest.raises(LookupError, match="euler with 5 steps"):
        find_time(Results().output(RECORD), "euler", 5)
