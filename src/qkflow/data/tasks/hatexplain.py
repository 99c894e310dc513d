"""HateXplain (Mathew et al. 2021): posts labeled hatespeech, offensive or normal, with rationales.

Two layouts: the authors' `dataset.json` with three annotators per post, a 0/1 mask over its tokens from each
who labeled it not normal, and splits in `post_id_divisions.json`; and JSONL with `text`, `label` and
optionally `rationale_token_spans` over the whitespace words. Research data: the posts are offensive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkflow.data.splits import normalize_split
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
_DIVISION_KEYS = {"train": "train", "validation": "val", "test": "test"}


def load(source: str | Path, split: str = "train") -> TaskDataset:
    """Load a split from `dataset.json` (the file or its folder), from JSONL, or from the hub.

    The label is the majority's. Posts without a majority are dropped and counted. A post has one rationale
    per annotator who gave one; posts without any are counted. Without `post_id_divisions.json` the result is
    all posts, and `undivided`.
    """
    split = normalize_split(split)
    issue_counts: Counter[str] = Counter()
    undivided = False
    if is_hub_source(source):
        posts = _hub_posts(hub_rows(str(source), "Hate-speech-CNERG/hatexplain", split))
        examples = list(_examples_from_posts(posts, issue_counts))
    else:
        path = find_file(Path(source), ("dataset.json", *_JSONL_FILES[split]), f"HateXplain {split} file")
        if ".jsonl" in path.suffixes:
            examples = list(_examples_from_jsonl(path))
        else:
            undivided = not _divisions_file(path).is_file()
            examples = list(_examples_from_posts(_file_posts(path, split), issue_counts))
    if undivided:
        issue_counts["no post_id_divisions.json: every split is all posts"] += 1
    issue_counts["posts without a rationale"] += sum(not any(example.rationales) for example in examples)
    return TaskDataset(examples, issue_counts, undivided)


Post = tuple[str, Sequence[str], Sequence[str], Sequence[Sequence[int]]]  # id, tokens, labels, masks


def _divisions_file(path: Path) -> Path:
    return path.with_name("post_id_divisions.json")


def _file_posts(path: Path, split: str) -> Iterator[Post]:
    posts = read_json(path)
    divisions = _divisions_file(path)
    names = read_json(divisions).get(_DIVISION_KEYS[split]) if divisions.is_file() else posts
    if names is None:
        raise InputError(f"{divisions} has no '{_DIVISION_KEYS[split]}' split", code="split-not-found")
    for name in names:
        if name not in posts:
            raise InputError(
                f"{divisions.name} lists post {name}, which is not in {path.name}", code="unknown-post"
            )
        post = posts[name]
        try:
            labels = [annotator["label"] for annotator in post["annotators"]]
            yield name, post["post_tokens"], labels, post["rationales"]
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{path.name}: post {name} has not the layout of HateXplain: {error!r}",
                code="unknown-hatexplain-layout",
            ) from None


def _hub_posts(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Post]:
    for name, row in rows:
        labels = [LABELS[number] for number in row["annotators"]["label"]]
        yield str(row.get("id", name)), row["post_tokens"], labels, row["rationales"]


def _examples_from_posts(posts: Iterable[Post], issue_counts: Counter[str]) -> Iterator[Example]:
    for name, tokens, labels, masks in posts:
        if not labels or any(label not in LABELS for label in labels):
            raise InputError(
                f"post {name}: labels must be of {', '.join(LABELS)}, not {list(labels)}",
                code="invalid-label",
            )
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
            raise InputError(f"{where} has no text", code="no-text")
        if label not in LABELS:
            raise InputError(
                f"{where}: the label must be one of {', '.join(LABELS)}, not {label!r}", code="invalid-label"
            )
        name = str(row.get("post_id", where))
        ranges = row.get("rationale_token_spans")
        rationales = () if ranges is None else (_word_ranges_to_spans(text, ranges, name),)
        yield Example(name, text, label, rationales=rationales, metadata={"annotators": 1})


def _word_ranges_to_spans(text: str, ranges: Sequence[Sequence[int]], name: str) -> tuple[Span, ...]:
    """Convert ranges [first, last) of words to character spans."""
    words = word_spans(text)
    spans = []
    for word_range in ranges:
        first, last = word_range if len(word_range) == 2 else (0, -1)
        if not 0 <= first < last <= len(words):
            raise InputError(
                f"post {name}: rationale {list(word_range)} is not a range of its {len(words)} tokens",
                code="rationale-mismatch",
            )
        spans.append((words[first][0], words[last - 1][1]))
    return tuple(spans)
