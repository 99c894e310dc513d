"""Which split a document belongs to: the data set's own, or a stable hash of its text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from qkflow.errors import InputError, unknown

SPLITS = ("train", "validation", "test")

# What a source says of its documents besides naming a split: these are still to be divided.
UNSPLIT = "undivided"
UNSPLIT_TRAIN = "undivided train"  # the set has a test split of its own, but none for validation

# split -> upper end of its share of the hashes
HASH_THRESHOLDS = {
    UNSPLIT: (("validation", 0.05), ("test", 0.10)),
    UNSPLIT_TRAIN: (("validation", 0.05),),
}
LOOKAHEAD_DOCUMENTS = 40  # different documents looked at before one of them is sent to validation by force

_SPLIT_ALIASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_SPLIT_NAME_PATTERN = re.compile(
    "([a-z]+)(?:[-_ ]?[0-9]+)?(?:-of-[0-9]+(?:-[0-9a-f]+)?)?"
)  # the last: as the hub numbers


def normalize_split(split: str) -> str:
    """A split's full name: `valid`, `val` and `dev` mean `validation`."""
    if split not in _SPLIT_ALIASES:
        raise unknown("split", split, SPLITS)
    return _SPLIT_ALIASES[split]


def find_split(words: Iterable[str]) -> str | None:
    """The split that one of these words names, if any does."""
    return next((_SPLIT_ALIASES[word] for word in words if word in _SPLIT_ALIASES), None)


def split_from_path(path: str) -> str | None:
    """The split that a folder, or a file but for its endings and its number, is called by in this path.

    So are `train.md`, `data/train/a.txt`, `ptb.valid.txt` and `test-00000-of-00002.parquet`, but not
    `train-a-model.md`.
    """
    names = map(_SPLIT_NAME_PATTERN.fullmatch, re.split(r"[/\\.]", path.lower()))
    return find_split(name[1] for name in names if name)


def map_source_splits(own_splits: Iterable[str]) -> dict[str, str]:
    """What a data set's own splits are used for; empty where they do not tell training from the rest."""
    found = set(own_splits)
    if "train" not in found or len(found) == 1:
        return {}
    if "validation" not in found:
        return {"train": UNSPLIT_TRAIN, "test": "test"}
    return {split: split for split in found}


class Document(NamedTuple):
    split: str
    text: str
    n_bytes: int  # in UTF-8 bytes


def assign_splits(documents: Iterable[tuple[str, str]], corpus_name: str) -> Iterator[Document]:
    """Give every (part, text) its split, in order.

    A document without a split of its own gets one by a hash of its text alone: 5% validation, 5% test.
    Equal texts therefore never stand on both sides, and adding documents moves none of the others. A small
    set might miss a split by chance: if none of the first forty different documents is for validation (or
    for training), the one with the lowest (highest) hash is.
    """
    first: dict[float, tuple[float, Document]] = {}  # the first undivided documents that differ
    held: list[tuple[float, Document]] = []  # the same in order, each as often as it came
    forced: dict[float, str] | None = None  # which of them were sent elsewhere than their hash says
    for part, text in documents:
        text, data = _encode_utf8(text)
        if part in SPLITS:
            yield Document(part, text, len(data))
            continue
        place = int.from_bytes(blake2b(data, digest_size=8).digest(), "little") / 2**64
        split = next((split for split, end in HASH_THRESHOLDS[part] if place < end), "train")
        document = Document(split, text, len(data))
        if forced is not None:
            yield document._replace(split=forced.get(place, split))
            continue
        held.append(first.setdefault(place, (place, document)))
        if len(first) == LOOKAHEAD_DOCUMENTS:
            forced = _forced_splits(held)
            yield from _apply_forced_splits(held, forced)
            held.clear()
    if len(first) == 1:
        raise InputError(
            f"{corpus_name} holds a single document: too little to keep some of it for validation"
        )
    if held:
        yield from _apply_forced_splits(held, _forced_splits(held))


def _apply_forced_splits(
    buffered: list[tuple[float, Document]], forced: dict[float, str]
) -> Iterator[Document]:
    return (document._replace(split=forced.get(place, document.split)) for place, document in buffered)


def _forced_splits(buffered: list[tuple[float, Document]]) -> dict[float, str]:
    places = {place for place, _ in buffered}
    found = {document.split for _, document in buffered}
    ends = {"validation": min(places), "train": max(places)}
    return {place: split for split, place in ends.items() if split not in found}


def _encode_utf8(text: str) -> tuple[str, bytes]:
    try:
        return text, text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as a JSON escape can make it
        data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        return data.decode(), data
