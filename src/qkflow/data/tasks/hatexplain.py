"""HateXplain (Mathew et al. 2021): posts labelled hatespeech, offensive or normal, with the words that
decided it.

Two layouts: the authors' `dataset.json`, three annotators a post with a 0/1 mask over its tokens from those
who saw an offence, split by `post_id_divisions.json`; and JSONL with `text`, `label` and, where known,
`rationale_token_spans` over the whitespace words. Research data: the posts are offensive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkflow.data.tasks.examples import (
    Example,
    Span,
    TaskDataset,
    find_file,
    hub_rows,
    is_hub_source,
    join_words,
    mask_to_spans,
    read_json,
    read_jsonl,
    word_spans,
)
from qkflow.errors import InputError

LABELS = ("hatespeech", "normal", "offensive")  # in the order of the hub's label ids
_JSONL_FILES = {
    "train": ("train.jsonl",),
    "validation": ("val.jsonl", "validation.jsonl", "dev.jsonl"),
    "test": ("test.jsonl",),
}
_DIVISIONS_FILE = "post_id_divisions.json"
_DIVISION_KEYS = {"train": "train", "validation": "val", "test": "test"}


def load(source: str | Path, split: str = "train") -> TaskDataset:
    """Posts from `dataset.json` (a file, or its folder), from JSONL, or from the hub.

    The label is the majority's; posts on which three annotators gave three labels are dropped and counted. A
    post's rationales are one per annotator who gave one; posts without any are counted.
    """
    if split not in _JSONL_FILES:
        raise InputError(f"HateXplain has no '{split}' split: use {', '.join(_JSONL_FILES)}")
    notes: Counter[str] = Counter()
    undivided = False
    if is_hub_source(source):
        rows = _hub_posts(hub_rows(str(source), "Hate-speech-CNERG/hatexplain", split))
        found = _examples_from_posts(rows, notes)
    else:
        path = find_file(Path(source), ("dataset.json", *_JSONL_FILES[split]), "HateXplain file")
        undivided = path.suffix != ".jsonl" and not path.with_name(_DIVISIONS_FILE).is_file()
        found = (
            _examples_from_jsonl(path)
            if path.suffix == ".jsonl"
            else _examples_from_posts(_file_posts(path, split, notes), notes)
        )
    examples = list(found)
    notes["posts without a rationale"] += sum(not any(each.rationales) for each in examples)
    return TaskDataset(examples, notes, undivided)


Post = tuple[str, Sequence[str], Sequence[str], Sequence[Sequence[int]]]  # id, tokens, labels, masks


def _file_posts(path: Path, split: str, issue_counts: Counter[str]) -> Iterator[Post]:
    posts = read_json(path)
    divisions = path.with_name(_DIVISIONS_FILE)
    wanted: Iterable[str] = posts
    if divisions.is_file():
        wanted = read_json(divisions)[_DIVISION_KEYS[split]]
    else:
        issue_counts["no post_id_divisions.json: every post taken, whatever the split"] += 1
    for name in wanted:
        if name not in posts:
            raise InputError(f"{divisions.name} lists post {name}, which {path.name} does not hold")
        post = posts[name]
        try:
            labels = [annotator["label"] for annotator in post["annotators"]]
            yield name, post["post_tokens"], labels, post["rationales"]
        except (KeyError, TypeError) as error:
            raise InputError(f"{path.name}: post {name} is not laid out as HateXplain's: {error!r}") from None


def _hub_posts(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Post]:
    for name, row in rows:
        labels = [LABELS[number] for number in row["annotators"]["label"]]
        yield str(row.get("id", name)), row["post_tokens"], labels, row["rationales"]


def _examples_from_posts(posts: Iterable[Post], issue_counts: Counter[str]) -> Iterator[Example]:
    for name, tokens, labels, masks in posts:
        if not labels or any(label not in LABELS for label in labels):
            raise InputError(f"post {name} needs labels out of {', '.join(LABELS)}, not {list(labels)}")
        ((label, votes),) = Counter(labels).most_common(1)
        if 2 * votes <= len(labels):
            issue_counts["undecided posts dropped"] += 1
            continue
        text, spans = join_words(tokens)
        rationales = tuple(mask_to_spans(mask, spans, f"post {name}") for mask in masks)
        yield Example(name, text, label, rationales=rationales, metadata={"annotators": len(labels)})


def _examples_from_jsonl(path: Path) -> Iterator[Example]:
    for where, row in read_jsonl(path):
        text, label = row.get("text"), row.get("label")
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where} has no text")
        if label not in LABELS:
            raise InputError(f"{where} needs a label out of {', '.join(LABELS)}, not {label!r}")
        name = str(row.get("post_id", where))
        marked = row.get("rationale_token_spans")
        rationales = () if marked is None else (_word_ranges_to_spans(text, marked, name),)
        yield Example(name, text, label, rationales=rationales, metadata={"annotators": 1})


def _word_ranges_to_spans(text: str, ranges: Sequence[Sequence[int]], name: str) -> tuple[Span, ...]:
    """Ranges [first, last) of words as character spans."""
    words = word_spans(text)
    spans = []
    for marked in ranges:
        first, last = marked if len(marked) == 2 else (0, -1)
        if not 0 <= first < last <= len(words):
            raise InputError(f"post {name}: rationale {list(marked)} does not fit its {len(words)} tokens")
        spans.append((words[first][0], words[last - 1][1]))
    return tuple(spans)
