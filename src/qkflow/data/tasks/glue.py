"""Four GLUE tasks (Wang et al. 2019) from their original TSV files or the hub: SST-2, CoLA, MRPC, RTE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.data.tasks.examples import Example, Loaded, find_file, from_hub, hub_rows, read_tsv
from qkflow.errors import InputError, unknown

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """Where a task keeps its texts and label, and in which files."""

    folder: str
    config: str  # name of the set on the hub
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]  # in the order of the hub's label ids
    files: Mapping[str, tuple[str, ...]]
    columns: tuple[str, ...] = ()  # of files that have no header


_PLAIN = {"train": ("train.tsv",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
_PARAPHRASE = {
    "train": ("msr-para-train.tsv", "train.tsv", "msr_paraphrase_train.txt"),
    "validation": ("msr-para-val.tsv", "dev.tsv"),
    "test": ("msr-para-test.tsv", "test.tsv", "msr_paraphrase_test.txt"),
}
TASKS = {
    "sst-2": Task("SST-2", "sst2", ("sentence",), "label", ("0", "1"), _PLAIN),
    "cola": Task(
        "CoLA", "cola", ("sentence",), "label", ("0", "1"), _PLAIN, ("source", "label", "star", "sentence")
    ),
    "mrpc": Task("MRPC", "mrpc", ("#1 String", "#2 String"), "Quality", ("0", "1"), _PARAPHRASE),
    "rte": Task("RTE", "rte", ("sentence1", "sentence2"), "label", ("entailment", "not_entailment"), _PLAIN),
}


def load(task: str, source: str | Path, split: str = "train") -> Loaded:
    """One task and split, from a TSV, from the task's folder, from the folder above it, or from the hub.

    Lines with too few columns are skipped and counted; test files have no labels.
    """
    if task not in TASKS:
        raise unknown("GLUE task", task, TASKS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    layout = TASKS[task]
    if from_hub(source):
        rows = hub_rows(str(source), "nyu-mll/glue", split, layout.config)
        return Loaded([_hub_example(layout, name, row) for name, row in rows])
    folder = Path(source)
    if (folder / layout.folder).is_dir():
        folder = folder / layout.folder
    path = find_file(folder, layout.files[split], f"{layout.folder} {split} file")
    notes: Counter[str] = Counter()
    return Loaded(list(_file_examples(layout, path, notes)), notes)


def _file_examples(layout: Task, path: Path, notes: Counter[str]) -> Iterator[Example]:
    lines = read_tsv(path)
    where, first = next(lines, ("", []))
    header = [cell.strip() for cell in first]
    if all(name in header for name in layout.texts):
        columns: Iterable[str] = header
    elif layout.columns and len(first) == len(layout.columns):
        columns = layout.columns
        lines = _again((where, first), lines)
    else:
        raise InputError(
            f"{path} is not a {layout.folder} file: no column {', '.join(layout.texts)} in its first line"
        )
    places = {name: index for index, name in enumerate(columns)}
    for where, cells in lines:
        if len(cells) < len(places):
            notes["lines skipped: too few columns"] += 1
            continue
        texts = [cells[places[name]].strip() for name in layout.texts]
        label = cells[places[layout.label]].strip() if layout.label in places else None
        if label is not None and label not in layout.labels:
            raise InputError(f"{where} needs a label out of {', '.join(layout.labels)}, not '{label}'")
        yield Example(where, texts[0], label, pair=texts[1] if len(texts) > 1 else None)


def _again(
    first: tuple[str, list[str]], rest: Iterator[tuple[str, list[str]]]
) -> Iterator[tuple[str, list[str]]]:
    yield first
    yield from rest


def _hub_example(layout: Task, name: str, row: dict[str, Any]) -> Example:
    pair = len(layout.texts) > 1
    number = int(row["label"])
    label = layout.labels[number] if number >= 0 else None
    text = row["sentence1"] if pair else row["sentence"]
    return Example(name, text, label, pair=row["sentence2"] if pair else None)
