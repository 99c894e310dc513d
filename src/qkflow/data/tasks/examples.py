"""The types that every task loader returns, and the readers they share.

Rationales are character spans, so that any tokenizer with offsets can map them to tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkflow.data.readers import hf_datasets, tables
from qkflow.data.readers.files import as_text, open_binary
from qkflow.errors import InputError
from qkflow.plain_data import MAX_LOG_BYTES, parse_json

Span = tuple[int, int]  # characters [start, end)


@dataclass(frozen=True)
class Example:
    """One text with its label and rationales.

    `rationales` has one tuple of character spans of `text` per annotator; it is empty if the dataset has no
    annotation. `metadata` depends on the task (attractors, verb, all answers, ...).
    """

    name: str  # id or file:line, for messages
    text: str
    label: str | None  # None in unlabeled test files
    text_pair: str | None = None  # the second text of a sentence-pair task
    rationales: tuple[tuple[Span, ...], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskDataset:
    """Examples of one split, and how many were dropped or repaired, by reason.

    `undivided`: the source does not divide its examples into splits, so every split is all of them.
    """

    examples: list[Example]
    issue_counts: Mapping[str, int] = field(default_factory=dict)
    undivided: bool = False

    @property
    def labels(self) -> list[str]:
        return sorted({example.label for example in self.examples if example.label is not None})


def word_spans(text: str) -> list[Span]:
    """Return the character spans of the whitespace-separated words."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def join_words(words: Sequence[str]) -> tuple[str, list[Span]]:
    """Join words with spaces. Return the text and the span of each word; a word may contain spaces."""
    spans, end = [], -1
    for word in words:
        start = end + 1
        end = start + len(word)
        spans.append((start, end))
    return " ".join(words), spans


def mask_to_spans(mask: Sequence[int], spans: Sequence[Span], name: str) -> tuple[Span, ...]:
    """Return the character spans of the words that a 0/1 mask marks, adjacent words joined."""
    if len(mask) != len(spans):
        raise InputError(
            f"{name}: a rationale has {len(mask)} marks, but the text has {len(spans)} tokens",
            code="rationale-mismatch",
        )
    runs: list[Span] = []
    previous = False
    for marked, (start, end) in zip(mask, spans, strict=True):
        if marked and previous:
            runs[-1] = (runs[-1][0], end)
        elif marked:
            runs.append((start, end))
        previous = bool(marked)
    return tuple(runs)


def token_mask(offsets: Iterable[Span], spans: Sequence[Span]) -> list[bool]:
    """Return which tokens, given by their character offsets, overlap any of the spans."""
    return [any(start < high and low < end for low, high in spans) for start, end in offsets]


def majority_mask(offsets: Sequence[Span], rationales: Sequence[Sequence[Span]]) -> list[bool]:
    """Return which tokens more than half of the annotators mark."""
    masks = [token_mask(offsets, spans) for spans in rationales]
    return (
        [2 * sum(votes) > len(masks) for votes in zip(*masks, strict=True)]
        if masks
        else [False] * len(offsets)
    )


def find_file(
    source: Path, names: Sequence[str], description: str, missing_code: str = "split-not-found"
) -> Path:
    """Return `source` if it is a file, else the first of `names` in that folder.

    Raise `missing_code` if the folder has none of them, and `path-not-found` if there is no such folder.
    """
    if source.is_file():
        return source
    if not source.exists():
        raise InputError(
            f"there is no {description} at {source}: give a file, a folder that holds one, or hf:NAME",
            code="path-not-found",
        )
    for name in names:
        if (source / name).is_file():
            return source / name
    raise InputError(f"{source} holds no {description}: expected {', '.join(names)}", code=missing_code)


def read_json(path: Path) -> Any:
    with open_binary(path) as stream:
        return parse_json(stream.read(MAX_LOG_BYTES).decode("utf-8-sig"), str(path))


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, object) of every line that is not blank."""
    with open_binary(path) as stream:
        for number, row in tables.jsonl_rows(stream, path):
            if not isinstance(row, dict):
                raise InputError(
                    f"{path} line {number} is a JSON string: one JSON object per line is expected",
                    code="json-not-object",
                )
            yield f"{path.name}:{number}", row


def read_tsv(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (file:line, cells) of every line that is not empty."""
    with open_binary(path) as stream:
        for number, cells in tables.delimited_rows(as_text(stream), "\t", tab_separated=True):
            yield f"{path.name}:{number}", cells


def hub_rows(
    source: str, default_repo_id: str, split: str, config: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, row) of a split on the hub; `source` is `hf` or `hf:owner/name[@revision][:config]`."""
    spec = hf_datasets.parse_spec(source.removeprefix("hf").removeprefix(":") or default_repo_id)
    if spec.column or spec.max_megabytes != hf_datasets.HubDatasetSpec.max_megabytes:
        raise InputError(
            f"{source}: a task is read whole; remove mb= and #column", code="unsupported-hub-option"
        )
    if spec.config is None:
        spec = replace(spec, config=config)
    for number, row in enumerate(hf_datasets.iter_rows(spec, split)):
        yield f"{spec.repo_id}:{split}:{number}", row


def is_hub_source(source: str | Path) -> bool:
    """Return whether a source is `hf` or `hf:...`."""
    return isinstance(source, str) and (source == "hf" or source.startswith("hf:"))
