from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from input_errors import raises_code
from qkflow.cli import main
from qkflow.data.corpus_size import measure_corpus
from qkflow.studies import estimate
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.estimate import MAX_RUNS, check_run_count, vocab_size
from qkflow.studies.grid import build_grid
from qkflow.studies.preview import preview
from qkflow.studies.workload import trained_models

TWELVE_ARMS = (
    "euler{attention.qk_norm=false,true, train.schedule=cosine,wsd},"
    "drift{attention.qk_norm=false,true, train.schedule=cosine,wsd},"
    "standard{attention.qk_norm=true, train.schedule=cosine,wsd},uncoupled,symmetric"
)


@pytest.fixture(autouse=True)
def _fixed_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of this machine does not matter."""
    monkeypatch.setattr("qkflow.studies.preview.matmul_flops_per_second", lambda *a: 1e11)
    monkeypatch.setattr("qkflow.studies.preview.training_utilization", lambda *a: estimate.UTILIZATION)
    monkeypatch.setattr(estimate, "matmul_flops_per_second", lambda *a: 1e11)


def test_runs_tokens_and_hours() -> None:
    planned = preview(variants="euler", controls="none", inits="gpt2,fan_in", tokens="100k", jobs=2)
    assert [(arm.name, arm.role, arm.runs, arm.tokens) for arm in planned.arms] == [
        ("standard", "reference", 21, 100_000),  # 2 inits with 3 + 5 seeds, 5 for the noise floor
        ("euler", "variant", 16, 100_000),
    ]
    assert (planned.cells, planned.runs) == (4, 37)
    assert any("at least 27" in note for note in planned.notes)  # 4 cells screened, 3 of them judged
    assert planned.flops == sum(arm.flops for arm in planned.arms)
    start_up = estimate.STUDY_OVERHEAD_SECONDS / 3600
    assert planned.hours == pytest.approx(start_up + sum(arm.hours for arm in planned.arms))
    twice = preview(variants="euler", controls="none", inits="gpt2,fan_in", tokens="200k", jobs=1)
    assert 2 < twice.hours / planned.hours < 4  # start-up stays the same, and each job takes all runs


def test_cell_of_two_arms_is_counted_once() -> None:
    planned = preview(variants="symmetric@fan_in", inits="fan_in,fan_in+symmetric=1", controls="none")
    assert [arm.runs for arm in planned.arms] == [21, 8]
    assert planned.runs == 21


def test_budgets_and_notes() -> None:
    settings = {"controls": "none", "inits": "gpt2", "jobs": 2, "verdict": False}
    planned = preview(variants="euler:hidden_dim=64", minutes=10, match="flops", **settings)
    standard, euler = planned.arms
    assert standard.tokens > euler.tokens > 0
    assert standard.flops == pytest.approx(euler.flops, rel=0.05)
    assert planned.hours == pytest.approx(10 / 60, rel=0.3)
    planned = preview(
        variants="standard{train.lr=1e-3},standard{data.tokenizer=bytes}", tune_lr=True, **settings
    )
    assert [arm.runs for arm in planned.arms] == [8, 5, 8]
    assert any("standard{train.lr=0.001}" in note for note in planned.notes)
    assert any("bits per byte" in note for note in planned.notes)


def test_command_prints_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--variants", TWELVE_ARMS, "--controls", "none", "--inits", "gpt2,fan_in", "--dry-run"]
    assert main.dispatch(["compare", *options]) == 0
    text = capsys.readouterr().out
    assert "symmetric" in text
    assert "213" in text  # 13 arms with 2 inits and 3 + 5 seeds, and the noise floor
    assert main.dispatch(["compare", *options, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert len(planned["arms"]) == 13
    assert planned["runs"] == 213
    assert not list(tmp_path.iterdir())


def test_bad_settings_are_refused_as_in_a_real_run(tmp_path: Path) -> None:
    with raises_code("too-few-seeds"):
        preview(seeds=1)
    with raises_code("bad-steps") as error:
        preview(variants="leapfrog:n=0")
    assert "'leapfrog:n=0'" in str(error.value)
    (tmp_path / "notes.txt").write_text("mine")
    with raises_code("folder-not-empty"):
        preview(out=tmp_path)


def test_corpus_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.write_text("".join(json.dumps({"text": f"höhe {i}"}) + "\n" for i in range(100)))
    options = ["--variants", "euler", "--controls", "none", "--inits", "gpt2", "--dry-run"]
    assert main.dispatch(["compare", "--data", str(notes), *options]) == 0
    assert "100 documents, 0.8 kB of text" in " ".join(capsys.readouterr().out.split())
    assert main.dispatch(["compare", "--data", str(notes), *options, "--json"]) == 0
    size = json.loads(capsys.readouterr().out)["corpus"]
    assert size == {"name": str(notes), "documents": 100, "n_bytes": 10 * 7 + 90 * 8, "read": "all"}
    for name, code in (("nowhere.txt", "corpus-not-found"), ("spechees", "unknown-corpus")):
        with raises_code(code):
            main.dispatch(["compare", "--data", name, *options])


def test_large_and_hub_corpora_are_not_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkflow.data.corpus_size.MAX_BYTES", 1000)
    size = measure_corpus("patterns:documents=400")
    assert size.read == "start"
    assert 1000 < size.n_bytes < 10_000
    assert "at least" in str(size)
    assert measure_corpus("wikitext-2").read == "nothing"


def test_adaptive_seeds_and_power_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--variants",
        "euler",
        "--controls",
        "none",
        "--seeds",
        "auto",
        "--max-seeds",
        "8",
        "--dry-run",
    ]
    assert main.dispatch(["compare", *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "arms that are decided get no more seeds" in text
    assert "With 8 seeds and 1 comparison, 80% power needs a difference of" in text
    with raises_code("not-a-study"):
        main.dispatch(["compare", *options, "--pilot", "nowhere"])


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"variants": "standard{train.batch_size=0}"}, "invalid-batch-size"),
        ({"variants": "standard{model.dim=100000000000}"}, "above-maximum"),
        ({"variants": "standard{model.n_layers=1000000}"}, "above-maximum"),
        ({"variants": "standard{train.lr=0}"}, "below-minimum"),
        ({"variants": "standard{train.final_eval_tokens=3}"}, "key-set-by-study"),
        (
            {"variants": "standard{attention.circuit=CAFO,attention.rope=false}@fan_in+tied_qk"},
            "init-needs-factorized",
        ),
        ({"max_seeds": 2}, "below-minimum"),
        ({"seeds": "1e3"}, "invalid-seeds"),
        ({"margin": float("nan")}, "not-finite"),
    ],
)
def test_studies_that_cannot_run_are_refused(settings: dict[str, Any], code: str) -> None:
    with raises_code(code) as error:
        preview(**settings)
    assert "\n" not in str(error.value)


def test_run_count_names_runs_and_hours() -> None:
    check_run_count(MAX_RUNS, ComparisonConfig(tokens=10**6))
    with raises_code("too-many-runs") as error:
        check_run_count(1_234_567, ComparisonConfig(tokens=10**6))
    assert "1,234,567 runs" in str(error.value)
    assert "hours" in str(error.value)
    with raises_code("too-many-runs"):
        check_run_count(MAX_RUNS + 1, ComparisonConfig(minutes=5))


def test_matmul_speed_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert estimate.matmul_flops_per_second("cpu", seconds=0.0) > 0


def test_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many models as train at a time, and without a trace in the state of generators."""
    monkeypatch.setattr(estimate, "_TIMED_SECONDS", 0.0)
    grid = build_grid(ComparisonConfig(tokens=1000, seq_len=8, batch_size=2, tokenizer="bytes"))
    (model, *_) = trained_models(grid)
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    assert estimate.training_utilization(model, 1e6, 1e9, 1, 2) > 0
    assert (random.getstate(), torch.get_num_threads()) == before[1:]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert estimate.training_utilization(model, 1e9, 1e9, 1, 2) == estimate.UTILIZATION  # steps of seconds


def test_vocab_size_of_tokenizers() -> None:
    assert vocab_size("bytes", "tiny") == 257
    assert vocab_size("bpe:512", "tiny") == 512
    assert vocab_size("hf:gpt2", "60m") == 50_257
