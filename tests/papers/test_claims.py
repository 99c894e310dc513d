"""The ledger of claims: statuses follow from stored results."""

from __future__ import annotations

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.cli.main import dispatch
from qkflow.papers.claims import (
    Claim,
    Judged,
    LedgerRow,
    Measurement,
    Output,
    Paired,
    Results,
    Status,
    build_ledger,
    compare_arms,
    find_arm,
    judged_difference,
)
from qkflow.papers.coupled_dynamics import arms
from qkflow.papers.faster_qk.claims import read_change
from qkflow.papers.findings import main_findings
from qkflow.papers.ledger import CLAIMS_BY_DIAL
from qkflow.studies import compare, save_record
from qkflow.studies.design import Verdict
from toy_study import SMALL_GRID, TOY

MIN_SEEDS = 3
CLAIM = Claim("id", "paper", "text", "published")


def row(*votes: bool | None) -> LedgerRow:
    return LedgerRow(CLAIM, tuple(Measurement("", "", 5, vote, "") for vote in votes))


@pytest.mark.parametrize(
    ("votes", "status"),
    [
        ((), Status.NOT_TESTABLE),
        ((True, True), Status.CONSISTENT),
        ((False, False), Status.CONTRADICTED),
        ((False, None), Status.MIXED),
        ((True, False), Status.MIXED),
        ((True, None), Status.MIXED),
        ((None,), Status.UNDECIDED),
    ],
)
def test_status(votes: tuple[bool | None, ...], status: Status) -> None:
    assert row(*votes).status == status


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results with a toy comparison in which euler is clearly better."""
    folder = tmp_path_factory.mktemp("results")
    compare("toy text", variants="standard,euler,drift", out=folder / "study", **SMALL_GRID, **TOY)
    save_record(folder / "study", folder / "toy.json")
    (folder / "number.json").write_text(json.dumps({"x": 2}))
    return Results(folder)


def test_verdict_of_the_judge_decides(stored: Results) -> None:
    found = Judged("toy", "euler", Verdict.HELPS, "euler").read(stored)
    assert found.supports is True
    assert found.seeds == 3
    assert found.text.startswith("euler: −")
    assert found.text.endswith("helps")
    assert Judged("toy", "euler", Verdict.EQUIVALENT, "euler").read(stored).supports is False
    assert found.command == stored.comparison("toy").summary.command


def test_two_arms_are_compared_by_pairs(stored: Results) -> None:
    against_itself = Paired("toy", "euler", "euler", Verdict.EQUIVALENT, "same").read(stored)
    assert against_itself.supports is True
    assert Paired("toy", "euler", "standard", Verdict.HELPS, "better").read(stored).supports is True
    assert Paired("toy", "standard", "euler", Verdict.HELPS, "worse").read(stored).supports is False


def test_output_of_a_command(stored: Results) -> None:
    evidence = Output("number", "cmd", "scale", lambda o: f"x = {o['x']}", lambda o: o["x"] > 1)
    (ledger_row,) = build_ledger([Claim("id", "paper", "text", "published", (evidence,))], stored)
    assert ledger_row.status == Status.CONSISTENT
    assert ledger_row.findings[0].text == "x = 2"


def test_damaged_output_of_a_command(stored: Results) -> None:
    evidence = Output("number", None, "scale", lambda o: f"x = {o['x']}", lambda o: o["x"] > 1)
    (stored.folder / "number.json").write_text('{"x": "2"}')
    with raises_code("corrupt-result"):
        build_ledger([Claim("id", "paper", "text", "published", (evidence,))], stored)


def test_missing_evidence(stored: Results) -> None:
    with raises_code("result-not-found"):
        Judged("absent", "euler", Verdict.HELPS, "euler").read(stored)
    with raises_code("unknown-arm"):
        Judged("toy", "absent", Verdict.HELPS, "euler").read(stored)


def test_ledger_of_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert not dispatch(["claims", "--json"])
    ledgers = json.loads(capsys.readouterr().out)
    ids = [entry["id"] for rows in ledgers.values() for entry in rows]
    assert len(ids) == len(set(ids)) == sum(map(len, CLAIMS_BY_DIAL.values()))
    for rows in ledgers.values():
        for entry in rows:
            assert entry["findings"] or entry["to_settle"], entry["id"]
            for finding in entry["findings"]:
                assert finding["command"].startswith(("qkflow ", "python benchmarks/"))
                assert finding["seeds"] is None or finding["seeds"] >= MIN_SEEDS, entry["id"]


def test_titles_of_the_findings_hold() -> None:
    """The titles are fixed text: the verdicts behind them must agree."""
    results = Results()
    study, slow = results.comparison("ingredients"), results.comparison("fast-slow")

    def verdict(name: str, against: str | None = None) -> Verdict:
        return judged_difference(study, name, against)[1]

    assert verdict(arms.WEAK_EULER, arms.WEAK_REFERENCE) == Verdict.HELPS
    assert verdict(arms.WEAK_EULER) == verdict(arms.ADAMW_MODERN) == Verdict.HURTS
    assert verdict(arms.EULER) in (Verdict.UNDECIDED, Verdict.EQUIVALENT)
    assert judged_difference(slow, f"slow{arms.MUON}@modern")[1] != Verdict.HELPS
    assert verdict(arms.DIFFERENTIAL) == Verdict.HELPS
    for budget, expected in (("250k", Verdict.HURTS), ("4M", Verdict.HELPS)):
        comparison = results.comparison(f"tokens-{budget}")
        assert judged_difference(comparison, arms.FIXED_DIFFERENTIAL)[1] == expected
        assert judged_difference(comparison, arms.EULER)[1] != Verdict.HELPS
    short, long = results.comparison("pace-lm"), results.comparison("tokens-4M")
    assert judged_difference(short, arms.TUNED_PACE)[1] == Verdict.HELPS
    assert judged_difference(long, arms.INCREASING_PACE)[1] == Verdict.HURTS
    assert len(find_arm(long, arms.EULER).seeds) >= 5
    assert compare_arms(long, arms.PLAIN_REFERENCE, arms.REFERENCE)[1] == Verdict.HELPS
    for name in (arms.PLAIN_EULER, arms.PLAIN_DIFFERENTIAL):
        left, verdict_left = compare_arms(long, name, arms.PLAIN_REFERENCE)
        assert left is not None
        assert verdict_left == Verdict.HELPS
        assert left.mean > math.log(0.985)  # about one percent
    after_equal_flops = judged_difference(results.comparison("flops-4M"), arms.FIXED_DIFFERENTIAL)
    assert after_equal_flops[1] == Verdict.HELPS
    assert verdict(arms.SOFTMAX_NORM) == Verdict.HURTS
    assert Verdict.HELPS not in map(verdict, (arms.EULER, arms.AFFINE, arms.SYMMETRIC))
    pair = partial(compare_arms, results.comparison(arms.STUDY))
    assert pair(arms.WEAK_DRIFT, arms.WEAK_REFERENCE)[1] == Verdict.HELPS
    assert pair(arms.WEAK_SYMMETRIC, arms.WEAK_DRIFT)[1] == Verdict.HELPS
    assert pair(arms.WEAK_EULER, arms.WEAK_DRIFT)[1] in (Verdict.UNDECIDED, Verdict.EQUIVALENT)

    def verdicts(task: str, ratio: str) -> dict[str, str]:
        output = results.output(f"pace-{task}")
        return {name: read_change(output, name, ratio).verdict for name in ("mass", "performance")}

    assert verdicts("agreement", "3") == {"mass": "raises", "performance": "raises"}
    assert verdicts("agreement", "10") == {"mass": "raises", "performance": "lowers"}
    assert verdicts("hatexplain", "10") == {"mass": "raises", "performance": "no evidence"}
    assert verdicts("hatexplain", "30") == {"mass": "raises", "performance": "lowers"}
    assert verdicts("squad", "10") == {"mass": "no evidence", "performance": "lowers"}
    for finding in main_findings(results):
        assert re.search(r"\([+−][\d.]+…[+−][\d.]+; [a-z ]+\)", finding.text), finding.text


def test_claims_of_one_dial(capsys: pytest.CaptureFixture[str]) -> None:
    assert not dispatch(["claims", "timescale", "--markdown"])
    out = capsys.readouterr().out
    assert out.startswith("| claim |")  # the heading is that of the page
    assert all(claim.text in out for claim in CLAIMS_BY_DIAL["timescale"])
    assert not any(claim.text in out for claim in CLAIMS_BY_DIAL["pace"])
    with raises_code("unknown-dial"):
        dispatch(["claims", "speed"])


def test_results_folder_of_the_user(tmp_path: Path) -> None:
    with raises_code("result-not-found"):
        dispatch(["claims", "--results", str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("pace-agreement", {"baseline": "1", "rows": []}, []),
        ("pace-squad", {"baseline": "1", "rows": []}, ["--findings"]),
        ("corpus-stats", {"corpora": {"web": {}}}, ["--table", "corpora"]),
    ],
)
def test_damaged_results_of_the_user(
    tmp_path: Path, name: str, content: dict[str, Any], options: list[str]
) -> None:
    folder = shutil.copytree(Results().folder, tmp_path / "results")
    (folder / f"{name}.json").write_text(json.dumps(content))
    with raises_code("corrupt-result"):
        dispatch(["claims", "--results", str(folder), *options])
