"""The study of pace: its data, its model, its knob, its statistics, and the command from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qkflow.cli import main
from qkflow.errors import InputError
from qkflow.measures.circuits import CircuitTracker
from qkflow.measures.faithfulness import measure_faithfulness, measure_faithfulness_reference
from qkflow.roles import parameter_roles
from qkflow.studies.pace import PaceStudyConfig, dataset
from qkflow.studies.pace.analysis import analyse
from qkflow.studies.pace.config import plan_runs
from qkflow.studies.pace.optimizers import SGD, build_optimizer, optimizer_step
from qkflow.studies.pace.recipes import PUBLISHED_RECIPES, RECIPES, get_recipe
from qkflow.studies.pace.run import Text, heatmap, iter_batches, train_and_measure
from qkflow.studies.pace.squad_f1 import squad_f1
from qkflow.studies.pace.task_model import TaskModel, build_task_model, pad_batch
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.training.optimizer import parameter_groups

TRAIN = {
    "ratio": "1", "steps": 10, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0, "others": 1.0,
    "embed": False, "freeze": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def agreement() -> dataset.TaskData:
    return dataset.prepare_task_data(
        "agreement", "generate", get_recipe("agreement", False), dataset.DataLimits(False, 200, 60)
    )


def squad_file(folder: Path) -> Path:
    """Questions on paragraphs whose answer stands between marks of its own."""
    paragraphs = []
    for number in range(40):
        answer = f"answer {number % 7}"
        context = f"{'some words before . ' * 3}the truth is {answer} , and {'more words after . ' * 3}"
        place = {"text": answer, "answer_start": context.index(answer)}
        asked = {"id": str(number), "question": f"what is truth {number} ?", "answers": [place]}
        paragraphs.append({"context": context, "qas": [asked]})
    path = folder / "dev-v1.1.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return path


def small(data: dataset.TaskData, task: str = "agreement", seed: int = 0) -> TaskModel:
    return build_task_model(get_recipe(task, False, dim=16, hidden_dim=32, head_dim=4), data, seed)


# the data


def test_rationales_become_tokens_and_test_texts_are_new(agreement: dataset.TaskData) -> None:
    assert agreement.classes == ["PL", "SG"]
    seen = {tuple(item.ids) for item in agreement.train if dataset.UNK_TOKEN_ID not in item.ids}
    assert not any(tuple(item.ids) in seen for item in agreement.test)
    assert all(sum(item.rationales[0]) == 1 for item in agreement.train), "the subject is one word"


def test_data_is_kept_and_read_back(agreement: dataset.TaskData, tmp_path: Path) -> None:
    name = dataset.save_task_data(agreement, tmp_path)
    assert dataset.load_task_data(tmp_path / name) == agreement
    assert dataset.save_task_data(agreement, tmp_path) == name


def test_squad_has_answers_whose_tokens_are_marked(tmp_path: Path) -> None:
    data = dataset.prepare_task_data(
        "squad", str(squad_file(tmp_path)), get_recipe("squad", False), dataset.DataLimits()
    )
    item = data.test[0]
    marked = [token for token, mark in zip(item.ids, item.rationales[0], strict=True) if mark]
    assert item.reference_answers[0] in "".join(data.token_texts[token] for token in marked)
    assert item.answer_ids[-1] == data.eos_token_id
    assert (
        "".join(data.token_texts[token] for token in item.answer_ids[:-1]).strip()
        == item.reference_answers[0]
    )
    assert len(data.train) + len(data.test) == 40


def test_unlabelled_texts_are_counted_and_cannot_be_all(tmp_path: Path) -> None:
    folder = tmp_path / "SST-2"
    folder.mkdir()
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "a good film\t1\na bad film\t0\n" * 5)
    (folder / "dev.tsv").write_text("sentence\nnobody said\n")
    with pytest.raises(InputError, match="no test text has a label"):
        dataset.prepare_task_data("sst-2", str(tmp_path), get_recipe("sst-2", False), dataset.DataLimits())


def hatexplain(folder: Path, rows: list[dict[str, Any]], more: list[dict[str, Any]] | None = None) -> str:
    for name, content in (("train", rows), ("val", more or rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(folder)


def test_rationales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows = [{"text": "two words", "label": "normal", "rationale_token_spans": [[1, 3]]}]
    with pytest.raises(InputError, match="does not fit its 2 tokens"):
        dataset.prepare_task_data(
            "hatexplain", hatexplain(tmp_path, rows), get_recipe("hatexplain", False), dataset.DataLimits()
        )


def test_empty_rationales_are_counted(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("normal", "offensive")[n % 2]} for n in range(8)]
    more = [{"text": "other text", "label": "normal", "rationale_token_spans": []},
            {"text": "another text", "label": "offensive", "rationale_token_spans": [[0, 1]]}]  # fmt: skip
    source = hatexplain(tmp_path, rows, more)
    data = dataset.prepare_task_data(
        "hatexplain", source, get_recipe("hatexplain", False), dataset.DataLimits()
    )
    assert data.issue_counts["test texts without a rationale"] == 1


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    source = hatexplain(tmp_path, [{"text": f"a b {n}", "label": "normal"} for n in range(4)],
                        [{"text": "new", "label": "normal"}])  # fmt: skip
    with pytest.raises(InputError, match="one class only"):
        dataset.prepare_task_data("hatexplain", source, get_recipe("hatexplain", False), dataset.DataLimits())


# the model


def test_padding_changes_nothing(agreement: dataset.TaskData) -> None:
    reader = small(agreement)
    short, *_, long = sorted(agreement.test, key=lambda item: len(item.ids))
    alone = reader.probabilities(*pad_batch([short.ids]))
    together, layers = reader.probabilities_and_attentions(*pad_batch([short.ids, long.ids]))
    torch.testing.assert_close(alone[0], together[0])
    assert layers[0][0, :, : len(short.ids), len(short.ids) :].abs().max() == 0


def test_an_encoder_sees_both_ways_and_a_writer_does_not(agreement: dataset.TaskData, tmp_path: Path) -> None:
    _, layers = small(agreement).probabilities_and_attentions(*pad_batch([agreement.test[0].ids]))
    assert layers[0].triu(1).abs().max() > 0
    data = dataset.prepare_task_data(
        "squad", str(squad_file(tmp_path)), get_recipe("squad", False), dataset.DataLimits()
    )
    _, layers = small(data, "squad").probabilities_and_attentions(*pad_batch([data.test[0].ids]))
    assert layers[0].triu(1).abs().max() == 0


def test_batched_measures_are_those_one_by_one(agreement: dataset.TaskData) -> None:
    reader = small(agreement)
    some = [Text(item.name, item.ids, item.rationales) for item in agreement.test[:8]]
    for source in ("attention", "rollout", "gradient"):
        fast, slow = (
            measure_faithfulness(reader, some, source),
            measure_faithfulness_reference(reader, some, source),
        )
        assert fast.mass == pytest.approx(slow.mass, rel=1e-3, abs=1e-5)
        assert fast.comprehensiveness[5.0] == pytest.approx(slow.comprehensiveness[5.0], abs=1e-5)


def test_answers_are_written_as_their_loss_says(tmp_path: Path) -> None:
    data = dataset.prepare_task_data(
        "squad", str(squad_file(tmp_path)), get_recipe("squad", False), dataset.DataLimits()
    )
    reader, few = small(data, "squad"), data.train[:2]
    optimizer = build_optimizer(reader, {**TRAIN, "steps": 150})
    for step in range(150):
        optimizer_step(optimizer, reader.loss(few), 2e-2, step, 150, 1.0)
    assert float(reader.loss(few).detach()) < 0.1
    assert reader.generate_answers(few, data.eos_token_id) == [item.answer_ids[:-1] for item in few]


def test_f1_counts_words_as_squad_does() -> None:
    assert squad_f1("The  Denver Broncos!", ["denver broncos"]) == 1
    assert squad_f1("Denver", ["the Denver Broncos", "Carolina"]) == pytest.approx(2 / 3)
    assert squad_f1("", ["something"]) == 0


# the knob


def rates(reader: TaskModel, **train: Any) -> dict[str, float]:
    """Learning rate by role in the middle of training."""
    optimizer = build_optimizer(reader, {**TRAIN, **train})
    for group in optimizer.param_groups:
        group.set_lr(1.0, 0.5)
    return {group.role: group.lr for group in optimizer.param_groups}


def test_a_single_knob_turns_the_query_key_rate_alone(agreement: dataset.TaskData) -> None:
    same, faster = rates(small(agreement)), rates(small(agreement), ratio="30")
    assert set(same.values()) == {1.0}
    assert faster == {role: 30.0 if role in ("q", "k") else 1.0 for role in same}
    assert rates(small(agreement), ratio="increasing:41")["q"] == 21.0


def test_runs_of_a_single_knob_study_differ_in_the_ratio_alone(agreement: dataset.TaskData) -> None:
    settings = PaceStudyConfig("agreement", seeds=1)
    one, other, *_ = (
        run.config for run in plan_runs(settings, settings.resolve_recipe(), "data.json", agreement, 10)
    )
    assert one["train"].pop("ratio") != other["train"].pop("ratio")
    assert one == other


@pytest.mark.parametrize("task", PUBLISHED_RECIPES)
def test_as_published_changes_what_the_authors_changed(agreement: dataset.TaskData, task: str) -> None:
    settings = PaceStudyConfig(task, data="somewhere", as_published=True, seeds=1)
    same, faster = (
        run.config["train"] for run in plan_runs(settings, settings.resolve_recipe(), "x", agreement, 10)
    )
    assert (same["embed"], same["others"], same["freeze"]) == (False, 1.0, [])
    turned = rates(
        small(agreement), **{name: faster[name] for name in ("ratio", "others", "embed", "freeze")}
    )
    if task == "squad":
        assert turned["q"] == pytest.approx(2.0)  # 1e-3 against the baseline's 5e-4
        assert turned["v"] == turned["embed"] == pytest.approx(0.1)
    else:
        assert turned["embed"] == turned["k"] == float(faster["ratio"])
        assert turned["v"] == 1
        assert ("mlp" in turned) == (task == "agreement")


def test_seeds_pair(agreement: dataset.TaskData) -> None:
    one, other = small(agreement, seed=3), small(agreement, seed=3)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    orders = [[item.name for item in next(iter_batches(agreement.train, 8, seed))] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_momentum_is_that_of_torch(agreement: dataset.TaskData) -> None:
    ours, theirs = small(agreement), small(agreement)
    optimizer = SGD(parameter_groups(ours, 1e-2, 1e-3))
    decays = [p for p in theirs.parameters() if p.dim() >= 2]
    rest = [p for p in theirs.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}]
    expected = torch.optim.SGD(groups, lr=1e-2, momentum=0.99)
    for _ in range(3):
        for model, one in ((ours, optimizer), (theirs, expected)):
            one.zero_grad()
            model.loss(agreement.train[:8]).backward()
            one.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_faster_circuit_really_goes_further(agreement: dataset.TaskData) -> None:
    paces = []
    for ratio in ("1", "10"):
        reader = small(agreement)
        optimizer, watch = build_optimizer(reader, {**TRAIN, "ratio": ratio}), CircuitTracker(reader)
        for step, items in zip(range(10), iter_batches(agreement.train, 16, 0), strict=False):
            optimizer_step(optimizer, reader.loss(items), 1e-3, step, 10, 1.0)
        paces.append(watch.metrics(reader)["effective_pace"])
    assert paces[1] > 4 * paces[0]
    assert set(parameter_roles(small(agreement)).values()) >= {"q", "k", "v", "o", "head"}


# bad questions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratios": ("1", "0")}, "positive number"),
        ({"ratios": ("1", "-3")}, "positive number"),
        ({"ratios": ("fast",)}, "not a ratio"),
        ({"ratios": ("increasing:40:steps=100",), "steps": 10}, "never get there"),
        ({"seeds": 0}, "--seeds"),
        ({"steps": 5, "epochs": 2.0}, "not both"),
        ({"lr": -1.0}, "--lr"),
        ({"task": "hatexplain"}, "--data is needed"),
        ({"task": "hateexplain"}, "did you mean 'hatexplain'"),
        ({"task": "cola", "as_published": True, "data": "x"}, "published setting"),
        ({"data": "nowhere.tsv"}, "no agreement file"),
    ],
)
def test_bad_questions_are_refused_before_anything_is_written(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    from qkflow.studies.pace import run_pace_study

    with pytest.raises(InputError, match=said):
        run_pace_study(PaceStudyConfig(**{"task": "agreement", **options}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_is_a_failed_run(agreement: dataset.TaskData) -> None:
    reader = small(agreement)
    with pytest.raises(FloatingPointError, match="not a number at step 0"):
        optimizer_step(build_optimizer(reader, TRAIN), torch.tensor(torch.nan), 1e-3, 0, 10, 1.0)


# the answer


def fake_study(folder: Path, results: dict[str, list[dict[str, Any]]]) -> tuple[StudyDir, dict[str, Any]]:
    """A study's folder with results already in it."""
    place, runs = StudyDir(folder), []
    for ratio, by_seed in results.items():
        for seed, result in enumerate(by_seed):
            name = f"r{ratio}.s{seed}"
            (folder / "runs" / name).mkdir(parents=True)
            (folder / "runs" / name / "result.json").write_text(json.dumps(result))
            runs.append({"id": name, "cell": f"r={ratio}", "seed": seed})
    question = {"task": "agreement", "as_published": False, "seeds": 3, "confidence": 0.95}
    facts = {"notes": {}, "majority": 0.5, "steps": 1, "train": 1}
    return place, {"config": question, "command": "", "recipe": {}, "facts": facts, "runs": runs,
                   "arms": list(results)}  # fmt: skip


def fake_result(mass: float, performance: float, seed: int) -> dict[str, Any]:
    wobble = 0.01 * seed
    deleted = {"comprehensiveness": {"5": mass}, "sufficiency": {"5": 0.1},
               "aopc_comprehensiveness": mass, "aopc_sufficiency": 0.1}  # fmt: skip
    chance = {**deleted, "aopc_comprehensiveness": 0.05 + wobble}
    return {
        "status": "finished", "performance": performance + 3 * wobble * (-1) ** seed, "mass": mass + wobble,
        "confidence": None, "qk_scale": 1.0, "ov_scale": 1.0, "loss": 1.0, "heatmap": None, "seconds": 1.0,
        "faithfulness": {**dict.fromkeys(("attention", "rollout", "gradient"), deleted), "random": chance},
        "environment": {},
    }  # fmt: skip


def test_verdicts_follow_the_paired_differences(tmp_path: Path) -> None:
    results = {
        ratio: [fake_result(mass + 0.001 * seed**2 * (ratio == "10"), 0.9, seed) for seed in range(3)]
        for ratio, mass in (("1", 0.2), ("10", 0.6))
    }
    summary = analyse(*fake_study(tmp_path, results))
    base, faster = summary["rows"]
    assert "difference" not in base["measures"]["mass"]
    assert faster["measures"]["mass"]["verdict"] == "raises"
    assert faster["measures"]["mass"]["difference"]["mean"] == pytest.approx(0.4, abs=0.01)
    assert faster["measures"]["performance"]["verdict"] == "no evidence"
    assert "confidence" not in faster["measures"], "nothing is said of what was not measured"
    assert any("raises attention on the rationale by 0.40" in sentence for sentence in faster["sentences"])
    assert summary["explains"][1]["attention_random"]["mean"] == pytest.approx(0.54, abs=0.01)


def test_two_seeds_give_no_verdict(tmp_path: Path) -> None:
    results = {ratio: [fake_result(0.2, 0.9, seed) for seed in range(2)] for ratio in ("1", "3")}
    summary = analyse(*fake_study(tmp_path, results))
    assert summary["rows"][1]["measures"]["mass"]["verdict"] == "no verdict"


def test_heatmap_shares_sum_to_all_texts_with_a_rationale() -> None:
    import numpy as np

    shares = np.array(heatmap(np.array([0.1, 0.5, 1.0, np.nan]), np.array([0.9, 0.1, 1.0, 0.5])))
    assert shares.sum() == pytest.approx(100)
    assert shares[4, 4] == shares[0, 4] == shares[2, 0] == pytest.approx(100 / 3)


# end to end


def test_the_command_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    asked = ["pace", "study", "agreement", "--examples", "64", "--test", "30", "--steps", "4", "--seeds", "1",
             "--measured", "5", "--dim", "16", "--out", str(out), "--json"]  # fmt: skip
    assert main.dispatch([*asked, "--ratios", "1"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["runs"] == {"planned": 1, "finished": 1, "failures": []}
    (finished,) = (out / "runs").iterdir()
    before = (finished / "result.json").stat().st_mtime_ns
    assert main.dispatch([*asked, "--ratios", "1,10"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (finished / "result.json").stat().st_mtime_ns == before, "a finished run is not repeated"
    assert [row["ratio"] for row in second["rows"]] == ["1", "10"]
    measures = second["rows"][1]["measures"]
    assert {"performance", "mass", "confidence", "comprehensiveness", "qk_scale"} <= measures.keys()
    assert second["published"]["performance"] == [0.9243, 0.9341]
    page = (out / "report.html").read_text()
    assert "http://" not in page.split("<script>")[0]
    assert 'id="heatmap-0"' in page
    assert json.loads((out / "summary.json").read_text())["headline"] == second["headline"]
    assert main.dispatch(["report", str(out)]) == 0
    assert "published, faster" in capsys.readouterr().out
    with pytest.raises(InputError, match="holds a study with steps 4, not 5"):
        main.dispatch([*asked[:8], "5", *asked[9:]])


def test_a_run_alone_squad_as_published(tmp_path: Path) -> None:
    settings = PaceStudyConfig("squad", str(squad_file(tmp_path)), as_published=True, seeds=1, dim=24, n_layers=1,
                        measured=3)  # fmt: skip
    chosen = settings.resolve_recipe()
    data = dataset.prepare_task_data(
        "squad", settings.source, chosen, dataset.DataLimits.from_config(settings)
    )
    file = dataset.save_task_data(data, tmp_path)
    for run in plan_runs(settings, chosen, file, data, 3):
        folder = tmp_path / "runs" / run.id
        folder.mkdir(parents=True)
        result = train_and_measure(folder, json.loads(json.dumps(run.config)))
        assert result["status"] == "finished"
        assert 0 <= result["mass"] <= 1
        assert result["faithfulness"]["gradient"]["texts"] == 3
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6


def test_every_task_has_a_recipe() -> None:
    assert set(PUBLISHED_RECIPES) <= set(RECIPES)
    assert all("1" in chosen.ratios for chosen in (*RECIPES.values(), *PUBLISHED_RECIPES.values()))
