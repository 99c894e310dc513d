"""Fuzzed command lines and files: no traceback, no hang, nothing left behind, a documented exit code.

`make fuzz` runs thousands of other cases. A case that fails is printed as JSON; repeat it with
`python tests/fuzz/run_fuzz.py --case '…'`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from fuzz_driver import case_to_json, no_network, run_case
from fuzz_grammar import Case, cases, command_options
from fuzz_world import build_world, world_files
from qkflow.cli.main import COMMANDS

CASES = 300


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    connect = socket.socket.connect
    no_network()
    yield build_world(tmp_path_factory.mktemp("fuzz") / "world")
    socket.socket.connect = connect  # type: ignore[method-assign]


def test_fuzzed_commands(world: Path) -> None:
    # Files of the cache differ from one world to the next: `make fuzz` damages them, repeatable cases do not.
    files = {name: paths for name, paths in world_files(world).items() if name != "cache"}

    @hypothesis.seed(17)
    @hypothesis.settings(
        max_examples=CASES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases(files, quick=True))
    def check(case: Case) -> None:
        outcome = run_case(case, world)
        assert outcome.kind in ("success", "refusal"), f"{case_to_json(case)}\n{outcome.problem}"

    check()


def test_the_grammar_has_every_option() -> None:
    for name in COMMANDS:
        kinds = {option.kind for option in command_options(name)}
        assert kinds <= {int, float, bool, str, Path}, f"{name}: a type the fuzzer has no values for"
