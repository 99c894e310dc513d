"""The files that fuzzed commands read: small, valid, of every format, made once.

Paths in a case are relative to a copy of this folder, so that cases can be repeated anywhere.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import yaml

from in_process_engine import InProcessEngine
from made_study import FINAL, write_study
from qkflow.models.presets import PRESETS, Preset
from qkflow.studies.config import ComparisonConfig
from toy_task import write_squad
from words import WORDS

SHAPE = ("--set", "model.n_layers=1", "--set", "model.dim=16", "--set", "model.n_heads=2")
SMALL = ("--seq-len", "16", "--batch-size", "4", *SHAPE, "--set", "train.eval_tokens=64")
SMALL += ("--set", "train.evaluations=1", "--threads", "1")
ALWAYS_COPIED = ("text.jsonl",)  # the corpus of the runs


def build_world(folder: Path) -> Path:
    """Write the files; `folder` must not exist."""
    folder.mkdir(parents=True)
    with chdir(folder), _environment(folder), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        _write_corpora(folder)
        _write_runs(folder)
        _write_studies(folder)
        _write_transformers(folder)
        _write_small_files(folder)
        _write_tasks(folder)
        _write_finished(folder)
    return folder


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"QKFLOW_CACHE": str(folder / "cache")}):
        yield


def _write_corpora(folder: Path) -> None:
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=30)) + "." for _ in range(24)]
    rows = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts))
    (folder / "text.jsonl").write_text(rows)
    (folder / "text.txt").write_text("\n\n".join(texts))
    (folder / "table.csv").write_text("id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)))
    (folder / "text.txt.gz").write_bytes(gzip.compress("\n\n".join(texts).encode()))
    (folder / "texts").mkdir()
    for name in ("train", "test"):
        (folder / "texts" / f"{name}.txt").write_text("\n\n".join(texts))
    (folder / "loops").mkdir()
    (folder / "loops" / "text.txt").write_text("\n\n".join(texts))
    for name in ("first", "second"):  # 2^40 paths, if they are followed
        (folder / "loops" / name).symlink_to(".")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet")


def _write_runs(folder: Path) -> None:
    """Write a finished run of each kind of tokenizer, and one that was stopped after a checkpoint."""
    from qkflow.cli.commands import train
    from qkflow.cli.main import dispatch

    data = ("--data", "text.jsonl", *SMALL)
    assert dispatch(["train", "run", *data, "--tokenizer", "bytes", "--steps", "2"]) == 0
    bpe = ("--tokenizer", "bpe:300", "--coupling", "euler", "--optimizer", "adamw")
    assert dispatch(["train", "run-bpe", *data, *bpe, "--steps", "2"]) == 0
    on_step = train._ProgressCallback.on_step

    def stop(self, trainer, loss) -> None:  # type: ignore[no-untyped-def]
        on_step(self, trainer, loss)
        if trainer.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with mock.patch.object(train._ProgressCallback, "on_step", stop):
        assert dispatch(["train", "partial", *data, "--tokenizer", "bytes", "--steps", "2"]) == 75
    (folder / "run.yaml").write_bytes((folder / "run" / "config.yaml").read_bytes())
    shutil.copy(folder / "run-bpe" / "model" / "tokenizer.json", folder / "tokenizer.json")


def _write_studies(folder: Path) -> None:
    from qkflow.studies import save_record
    from qkflow.studies.pace import PaceStudyConfig, run_pace_study

    config = ComparisonConfig(
        data="text.jsonl", variants=("euler",), controls=(), tokens=4096, inits=("gpt2",), seeds=3
    )
    write_study(Path("study"), config, FINAL, points=2, layers=1)
    save_record("study", folder / "record.json")
    pace = PaceStudyConfig(
        "agreement", seeds=1, ratios=("1", "10"), steps=1, examples=32, test=12, n_layers=1, dim=16, n_heads=2
    )
    with in_process_workers():
        run_pace_study(pace, Path("pace"))


@contextmanager
def in_process_workers() -> Iterator[None]:
    """Let local engines run their workers in this process."""
    with (
        mock.patch("qkflow.studies.runner.LocalEngine", InProcessEngine),
        mock.patch("qkflow.studies.pace.study.LocalEngine", InProcessEngine),
        mock.patch("qkflow.studies.runner.execution.POLL_INTERVAL", 0.0),
        mock.patch.dict(PRESETS, tiny=Preset(1, 16, 2, "gelu", 257, "smaller than tiny")),
    ):
        yield


def _write_tasks(folder: Path) -> None:
    """Write every labeled dataset, and a task of the evaluation harness, in the original formats."""
    tasks = folder / "tasks"
    (tasks / "SST-2").mkdir(parents=True)
    for split, size in (("train", 12), ("dev", 6)):
        rows = [f"{WORDS[n]} {n} {split}\t{n % 2}" for n in range(size)]
        (tasks / "SST-2" / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    squad = write_squad(tasks)
    shutil.copy(squad, squad.with_name("train-v1.1.json"))
    annotator = {"label": "normal", "annotator_id": 1, "target": ["None"]}
    posts = {
        str(n): {
            "post_id": str(n),
            "post_tokens": [WORDS[n % 5], str(n), "x"],
            "annotators": [{**annotator, "label": ("normal", "hatespeech")[n % 2]}] * 3,
            "rationales": [[0, 1, 0]] * 3 if n % 2 else [],
        }
        for n in range(12)
    }
    names = list(posts)
    (tasks / "dataset.json").write_text(json.dumps(posts))
    divisions = {"train": names[:8], "val": names[8:10], "test": names[10:]}
    (tasks / "post_id_divisions.json").write_text(json.dumps(divisions))
    question = {"question": "To be", "choices": [" or", " not"], "answer": 1}
    (tasks / "questions.jsonl").write_text(json.dumps(question) + "\n")
    harness = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "tasks/questions.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tasks / "tiny_choice.yaml").write_text(yaml.safe_dump(harness))


def _write_finished(folder: Path) -> None:
    """Write a comparison with fine-tuned models that was really run; the same command resumes it."""
    from fuzz_grammar import FINISHED
    from qkflow.cli.main import dispatch

    with in_process_workers():
        assert dispatch(["compare", *FINISHED]) == 0


def _write_transformers(folder: Path) -> None:
    from families import tiny
    from qkflow import hf
    from qkflow.cli.main import dispatch

    dispatch(["export", "run-bpe", "exported"])
    dispatch(["export", "run", "exported-bytes"])
    llama = tiny("llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=300)
    llama.save_pretrained(folder / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "exported" / name, folder / "llama" / name)
    llama.save_pretrained(folder / "sharded", max_shard_size="20KB")
    shutil.copy(folder / "exported" / "tokenizer.json", folder / "sharded")
    hf.save_adapter(hf.attach(llama, "euler"), folder / "adapter")


def _write_small_files(folder: Path) -> None:
    from qkflow.papers.recipe import RECIPE_DIR

    shutil.copy(RECIPE_DIR / "coupling.yaml", folder / "recipe.yaml")
    shutil.copy(RECIPE_DIR / "synthetic-grid.yaml", folder / "grid.yaml")
    shutil.copy(
        Path(__file__).parents[2] / "docs" / "results" / "calibration.json", folder / "calibration.json"
    )
    import numpy as np

    rates = [[-1.0, 0.5, 0.2], [0.6, -1.0, 0.3], [0.4, 0.5, -0.5]]
    (folder / "rates.json").write_text(json.dumps(rates))
    (folder / "rates.csv").write_text("\n".join(",".join(map(str, row)) for row in rates))
    np.save(folder / "rates.npy", np.array(rates))
    shutil.copytree(Path(__file__).parents[2] / "docs" / "results", folder / "results")
    (folder / "ablation.json").write_text(json.dumps({"runs": []}))


def world_files(world: Path) -> dict[str, list[str]]:
    """Return the files of every item of the world, relative to it."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in world.rglob("*") if path.is_file()):
        relative = path.relative_to(world)
        found.setdefault(relative.parts[0], []).append(str(relative))
    return found
