"""Assign documents to splits: by the dataset's own splits, or by a stable hash of the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from qkflow.errors import InputError, unknown

SPLITS = ("train", "validation", "test")

# The source split of a document that has none of SPLITS yet. The strings are part of cache keys.
UNSPLIT = "undivided"
UNSPLIT_TRAIN = "undivided train"  # the dataset has a test split but no validation split

# (split, upper end of its range of hashes in [0, 1)); the remaining range is "train"
HASH_THRESHOLDS = {
    UNSPLIT: (("validation", 0.05), ("test", 0.10)),
    UNSPLIT_TRAIN: (("validation", 0.05),),
}
LOOKAHEAD_DOCUMENTS = 40  # distinct documents to buffer before one of them is forced into validation

_SPLIT_ALIASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# "train", "train_1", "train-00000-of-00002", "test-00000-of-00001-a09b74b3ef9c3b56"
_SPLIT_NAME_PATTERN = re.compile("([a-z]+)(?:[-_ ]?[0-9]+)?(?:-of-[0-9]+(?:-[0-9a-f]+)?)?")


def normalize_split(split: str) -> str:
    """Return a split's full name: `valid`, `val` and `dev` are `validation`."""
    if split not in _SPLIT_ALIASES:
        raise unknown("split", split, SPLITS)
    return _SPLIT_ALIASES[split]


def find_split(words: Iterable[str]) -> str | None:
    """Return the split of the first word that names one, or None."""
    return next((_SPLIT_ALIASES[word] for word in words if word in _SPLIT_ALIASES), None)


def split_from_path(path: str) -> str | None:
    """Return the split that a folder or file of this path is named after, or None.

    A file counts without its suffixes and its number: `train.md`, `data/train/a.txt`, `ptb.valid.txt` and
    `test-00000-of-00002.parquet` match, `train-a-model.md` does not.
    """
    names = map(_SPLIT_NAME_PATTERN.fullmatch, re.split(r"[/\\.]", path.lower()))
    return find_split(name[1] for name in names if name)


def map_source_splits(own_splits: Iterable[str]) -> dict[str, str]:
    """Map a dataset's own splits to source splits. Return {} if they do not separate train from the rest."""
    available = set(own_splits)
    if "train" not in available or len(available) == 1:
        return {}
    if "validation" not in available:
        return {"train": UNSPLIT_TRAIN, "test": "test"}
    return {split: split for split in available}


class Document(NamedTuple):
    split: str
    text: str
    n_bytes: int  # of the text in UTF-8


def assign_splits(documents: Iterable[tuple[str, str]], corpus_name: str) -> Iterator[Document]:
    """Give every (source split, text) its split, in order.

    A document without a split gets one by a hash of its text: 5% validation, 5% test. Equal texts are
    therefore in the same split, and adding documents moves no other document. A small corpus could miss a
    split by chance: if none of the first LOOKAHEAD_DOCUMENTS distinct documents is in validation (or in
    train), the one with the lowest (highest) hash is moved there.
    """
    distinct: dict[float, tuple[float, Document]] = {}  # hash -> (hash, document), of the first documents
    buffered: list[tuple[float, Document]] = []  # the same in order, with duplicates
    forced: dict[float, str] | None = None  # hash -> split, of the documents that were moved
    for source_split, text in documents:
        text, data = _encode_utf8(text)
        if source_split in SPLITS:
            yield Document(source_split, text, len(data))
            continue
        text_hash = int.from_bytes(blake2b(data, digest_size=8).digest(), "little") / 2**64
        split = next((split for split, end in HASH_THRESHOLDS[source_split] if text_hash < end), "train")
        document = Document(split, text, len(data))
        if forced is not None:
            yield document._replace(split=forced.get(text_hash, split))
            continue
        buffered.append(distinct.setdefault(text_hash, (text_hash, document)))
        if len(distinct) == LOOKAHEAD_DOCUMENTS:
            forced = _forced_splits(buffered)
            yield from _apply_forced_splits(buffered, forced)
            buffered.clear()
    if len(distinct) == 1:
        raise InputError(
            f"{corpus_name} holds a single document, which leaves none for validation: add documents, or "
            "split a plain text with #lines or #paragraphs",
            code="single-document",
        )
    if buffered:
        yield from _apply_forced_splits(buffered, _forced_splits(buffered))


def _apply_forced_splits(
    buffered: list[tuple[float, Document]], forced: dict[float, str]
) -> Iterator[Document]:
    return (
        document._replace(split=forced.get(text_hash, document.split)) for text_hash, document in buffered
    )


def _forced_splits(buffered: list[tuple[float, Document]]) -> dict[float, str]:
    hashes = {text_hash for text_hash, _ in buffered}
    present = {document.split for _, document in buffered}
    candidates = {"validation": min(hashes), "train": max(hashes)}
    return {text_hash: split for split, text_hash in candidates.items() if split not in present}


def _encode_utf8(text: str) -> tuple[str, bytes]:
    try:
        return text, text.encode()
    except UnicodeEncodeError:  # a lone surrogate, from a JSON escape
        data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        return data.decode(), data
