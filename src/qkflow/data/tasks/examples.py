"""What every task gives: examples with a label and the spans of text that decide it, and a count of oddities.

Spans are in characters, so that any tokenizer that knows its offsets can turn them into tokens.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkflow.errors import InputError

Span = tuple[int, int]  # characters [start, end)


@dataclass(frozen=True)
class Example:
    """One text to judge.

    `rationales` has one tuple of character spans of `text` per annotator; none at all where nobody was asked.
    `facts` are the task's own (attractors, verb, all answers, ...). `label` is None in unlabelled test files.
    """

    name: str  # where it comes from, for messages
    text: str
    label: str | None
    text_pair: str | None = None  # the second text of a two-text task
    rationales: tuple[tuple[Span, ...], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskDataset:
    """Examples, and how many were dropped, repaired or otherwise worth a word, by reason."""

    examples: list[Example]
    issue_counts: Mapping[str, int] = field(default_factory=dict)
    undivided: bool = False  # the source has no splits: these are all of its examples

    @property
    def labels(self) -> list[str]:
        return sorted({each.label for each in self.examples if each.label is not None})


def word_spans(text: str) -> list[Span]:
    """Character spans of the whitespace-separated words."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def join_words(words: Sequence[str]) -> tuple[str, list[Span]]:
    """One text from words, and the span of each word in it, spaces inside a word included."""
    spans, end = [], -1
    for word in words:
        start = end + 1
        end = start + len(word)
        spans.append((start, end))
    return " ".join(words), spans


def mask_to_spans(mask: Sequence[int], spans: Sequence[Span], name: str) -> tuple[Span, ...]:
    """The character spans that a 0/1 mask over words marks, neighbours joined."""
    if len(mask) != len(spans):
        raise InputError(
            f"{name}: a rationale marks {len(mask)} tokens, but the text has {len(spans)}; they must agree"
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
    """Which tokens, given by their character offsets, overlap any of the spans."""
    return [any(start < high and low < end for low, high in spans) for start, end in offsets]


def majority_mask(offsets: Sequence[Span], rationales: Sequence[Sequence[Span]]) -> list[bool]:
    """Which tokens more than half of the annotators mark."""
    masks = [token_mask(offsets, spans) for spans in rationales]
    return (
        [2 * sum(votes) > len(masks) for votes in zip(*masks, strict=True)]
        if masks
        else [False] * len(offsets)
    )


def find_file(source: Path, names: Sequence[str], description: str) -> Path:
    """`source` itself if it is a file, else the first of `names` in that folder."""
    if source.is_file():
        return source
    if not source.exists():
        raise InputError(
            f"no {description} at {source}: give a file, a folder that holds one, or hf:NAME",
            code="path-not-found",
        )
    for name in names:
        if (source / name).is_file():
            return source / name
    raise InputError(f"no {description} in {source}: looked for {', '.join(names)}", code="split-not-found")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every non-empty line."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path.name}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise InputError(f"{where} must be a JSON object, not {type(row).__name__}")
            yield where, row


def read_tsv(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(file:line, cells) of every non-empty line; quotes are plain characters, as these files mean them."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        for number, cells in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            if cells:
                yield f"{path.name}:{number}", cells


def hub_rows(
    source: str, default_repo_id: str, split: str, config: str | None = None
) -> Iterator[tuple[str, dict]]:
    """(name, row) of a split on the hub; `source` is `hf` or `hf:owner/name`."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            'reading from the hub needs the datasets package: pip install "qkflow[data]"'
        ) from None
    identifier = source.removeprefix("hf").removeprefix(":") or default_repo_id
    try:
        rows = load_dataset(identifier, config, split=split)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"cannot read {identifier} from the hub: {reason}") from error
    for number, row in enumerate(rows):
        yield f"{identifier}:{split}:{number}", dict(row)


def is_hub_source(source: str | Path) -> bool:
    return isinstance(source, str) and (source == "hf" or source.startswith("hf:"))
