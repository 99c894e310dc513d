"""Four GLUE tasks (Wang et al. 2019) from their original TSV files or the hub: SST-2, CoLA, MRPC, RTE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from qkflow.data.splits import normalize_split
from qkflow.data.tasks.examples import Example, TaskDataset, find_file, hub_rows, is_hub_source, read_tsv
from qkflow.errors import InputError, unknown


@dataclass(frozen=True)
class GlueTask:
    """Files and columns of a task."""

    folder: str
    config: str  # on the hub
    text_columns: tuple[str, ...]
    label_column: str
    label_names: tuple[str, ...]  # in the order of the hub's label ids
    files: Mapping[str, tuple[str, ...]]
    columns: tuple[str, ...] = ()  # of files that have no header


_DEFAULT_FILES = {"train": ("train.tsv",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
_MRPC_FILES = {
    "train": ("msr-para-train.tsv", "train.tsv", "msr_paraphrase_train.txt"),
    "validation": ("msr-para-val.tsv", "dev.tsv"),
    "test": ("msr-para-test.tsv", "test.tsv", "msr_paraphrase_test.txt"),
}
GLUE_TASKS = {
    "sst-2": GlueTask("SST-2", "sst2", ("sentence",), "label", ("0", "1"), _DEFAULT_FILES),
    "cola": GlueTask(
        "CoLA",
        "cola",
        ("sentence",),
        "label",
        ("0", "1"),
        _DEFAULT_FILES,
        ("source", "label", "star", "sentence"),
    ),
    "mrpc": GlueTask("MRPC", "mrpc", ("#1 String", "#2 String"), "Quality", ("0", "1"), _MRPC_FILES),
    "rte": GlueTask(
        "RTE", "rte", ("sentence1", "sentence2"), "label", ("entailment", "not_entailment"), _DEFAULT_FILES
    ),
}


def load(task: str, source: str | Path, split: str = "train") -> TaskDataset:
    """Load a split of a task from a TSV file, the task's folder, the folder above it, or the hub.

    Lines with too few columns are skipped and counted. Test files have no labels.
    """
    if task not in GLUE_TASKS:
        raise unknown("GLUE task", task, GLUE_TASKS)
    split, layout = normalize_split(split), GLUE_TASKS[task]
    if is_hub_source(source):
        rows = hub_rows(str(source), "nyu-mll/glue", split, layout.config)
        return TaskDataset([_hub_example(layout, name, row) for name, row in rows])
    folder = Path(source)
    if (folder / layout.folder).is_dir():
        folder = folder / layout.folder
    path = find_file(folder, layout.files[split], f"{layout.folder} {split} file")
    issue_counts: Counter[str] = Counter()
    return TaskDataset(list(_file_examples(layout, path, issue_counts)), issue_counts)


def _file_examples(task: GlueTask, path: Path, issue_counts: Counter[str]) -> Iterator[Example]:
    lines = read_tsv(path)
    where, first = next(lines, ("", []))
    header = [cell.strip() for cell in first]
    if all(name in header for name in task.text_columns):
        columns: Iterable[str] = header
    elif task.columns and len(first) == len(task.columns):
        columns = task.columns
        lines = chain([(where, first)], lines)
    else:
        raise InputError(
            f"{path} is not a {task.folder} file: its first line lacks {', '.join(task.text_columns)}",
            code="unknown-glue-layout",
        )
    index = {name: position for position, name in enumerate(columns)}
    for where, cells in lines:
        if len(cells) < len(index):
            issue_counts["lines skipped: too few columns"] += 1
            continue
        texts = [cells[index[name]].strip() for name in task.text_columns]
        label = cells[index[task.label_column]].strip() if task.label_column in index else None
        if label is not None and label not in task.label_names:
            raise InputError(
                f"{where}: the label must be one of {', '.join(task.label_names)}, not '{label}'",
                code="invalid-label",
            )
        yield Example(where, texts[0], label, text_pair=texts[1] if len(texts) > 1 else None)


def _hub_example(task: GlueTask, name: str, row: dict[str, Any]) -> Example:
    pair = len(task.text_columns) > 1
    number = int(row["label"])
    label = task.label_names[number] if number >= 0 else None
    text = row["sentence1"] if pair else row["sentence"]
    return Example(name, text, label, text_pair=row["sentence2"] if pair else None)
