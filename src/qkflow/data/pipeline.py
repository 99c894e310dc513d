"""From a corpus to its prepared set: found in the cache, or read, divided, tokenised and put there."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qkflow.data import corpora, splits, token_set
from qkflow.data import tokenizer as tokenizers
from qkflow.data.cache import Cache, note
from qkflow.data.readers.files import Meter
from qkflow.data.splits import Document
from qkflow.data.token_set import DamagedError, SetWriter, TokenSet
from qkflow.data.tokenizer import Tokenizer
from qkflow.errors import InputError

BATCH = 1 << 21  # bytes of text tokenised at a time
TO_TRAIN_ON = 1 << 26  # bytes of text that a tokenizer is trained on, at most
RECENT = 2.0  # seconds: a file this young may change again without a visible change of its time

Item = TypeVar("Item")
Result = TypeVar("Result")


def prepare(
    corpus: str, tokenizer: str = "bpe:2048", *, cache: Path | None = None, show_progress: bool = True
) -> TokenSet:
    """The tokens of a corpus, from the cache if they are there.

    `corpus` is a built-in name (`speeches`), a corpus of the papers (`wikitext-103`), a path (file, folder or
    glob, `#column` at its end) or `hf:owner/name:config`; `tokenizer` is `bytes`, `bpe:SIZE`, a path or
    `hf:NAME`. The cache is `cache`, $QKFLOW_CACHE or the user's cache folder.
    """
    return Preparation(corpus, tokenizer, Cache(cache), show_progress).run()


def verify(
    corpus: str, tokenizer: str = "bpe:2048", *, cache: Path | None = None, show_progress: bool = True
) -> tuple[TokenSet, list[str]]:
    """The prepared set after a check of every byte, and what was found damaged (and has been made anew)."""
    preparation = Preparation(corpus, tokenizer, Cache(cache), show_progress, thorough=True)
    return preparation.run(), preparation.damage


@dataclass
class Preparation:
    """One corpus, one tokenizer, on the way into one cache."""

    name: str
    spec: str
    cache: Cache
    show_progress: bool
    thorough: bool = False  # check all of what is in the cache, not a sample
    damage: list[str] = field(default_factory=list)

    def run(self) -> TokenSet:
        started = time.time()
        source = corpora.resolve(self.name)
        stamp = digest([source.stamp(), tokenizers.stamp(self.spec)])
        found = self._open(self.cache.indexed(stamp))
        if found is None:
            found = self._find_or_make(source, stamp)
            if started - source.newest() > RECENT:
                self.cache.index(stamp, found.folder.name)
        found.name, found.facts = self.name, source.facts
        if left_out := source.facts.get("left_out"):
            note(f"{len(left_out):,} file{'s' * (len(left_out) > 1)} left out: {corpora.few(left_out)}")
        return found

    def _find_or_make(self, source: corpora.Corpus, stamp: str) -> TokenSet:
        """The set with this content, under whatever name it was made; made now if there is none."""
        loaded = None if tokenizers.size_to_train(self.spec) else tokenizers.load(self.spec)
        with self._stage(f"reading {self.name}", source.size) as meter:
            content = source.content(meter)
        key = digest([token_set.FORMAT, content, loaded.state() if loaded else self.spec])
        folder = self.cache.set_folder(key)
        found = self._open(folder)
        if found is not None:
            return found
        with self.cache.lock(key):
            found = self._open(folder)  # made by another process while this one waited
            if found is None:
                with self.cache.staged(key) as staging:
                    self._make(source, loaded, staging)
                    if digest([source.stamp(), tokenizers.stamp(self.spec)]) != stamp:
                        raise InputError(f"{self.name} changed while it was being read: run again")
                found = token_set.open_set(folder)
        return found

    def _open(self, folder: Path | None) -> TokenSet | None:
        """The set in a folder, or None where there is none that can be trusted."""
        if folder is None:
            return None
        try:
            return token_set.open_set(folder, thorough=self.thorough)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedError as damaged:
            if str(damaged) not in self.damage:
                self.damage.append(str(damaged))
                note(f"{damaged}; preparing {self.name} anew")
            return None

    def _make(self, source: corpora.Corpus, tokenizer: Tokenizer | None, staging: Path) -> None:
        """Write the set into `staging`."""
        spool = staging / "spool"
        if source.streamed:
            with self._stage(f"downloading {self.name}", source.size) as meter:
                source = corpora.spooled(source, spool, meter)
        facts: dict[str, Any] = {"name": self.name, "licence": source.licence, **source.facts}
        if tokenizer is None:
            tokenizer, facts["tokenizer_trained_on_bytes"] = self._train(source)
        with (
            self._stage(f"tokenising {self.name}", source.size) as meter,
            SetWriter(staging, tokenizer) as writer,
        ):
            tokenise(source, tokenizer, writer, meter)
            for split in ("train", "validation"):
                if not writer.counts[split]["documents"]:
                    raise InputError(f"{source.called} holds no text to put into the {split} split")
            shutil.rmtree(spool, ignore_errors=True)
            writer.finish(facts, self.spec)

    def _train(self, source: corpora.Corpus) -> tuple[Tokenizer, int]:
        """Train BPE on the train split, or, of a large one, on documents spread evenly over it."""
        size = tokenizers.size_to_train(self.spec)
        assert size is not None
        every = max(1, -(-source.size // TO_TRAIN_ON))
        fed = 0

        def texts(meter: Meter) -> Iterator[str]:
            nonlocal fed
            documents = splits.divide(source.parts(meter), source.called)
            for document in islice((d for d in documents if d.split == "train"), None, None, every):
                fed += document.size
                yield document.text
                if fed > 2 * TO_TRAIN_ON:  # the source was compressed, and larger than it looked
                    return

        with self._stage(f"training {self.spec}", source.size) as meter:
            return tokenizers.train_bpe(texts(meter), size), fed

    @contextmanager
    def _stage(self, what: str, size: int) -> Iterator[Meter]:
        """A meter that moves a progress bar, in megabytes."""
        if not self.show_progress or not sys.stderr.isatty():
            yield Meter()
            return
        from qkflow.console import progress

        with progress() as bar:
            task = bar.add_task(f"{what} (MB)", total=size / 1e6 or None)
            yield BarMeter(lambda done: bar.update(task, completed=done / 1e6))


class BarMeter(Meter):
    def __init__(self, show: Callable[[int], None]) -> None:
        super().__init__()
        self._show = show

    def advance(self, count: int) -> None:
        super().advance(count)
        self._show(self.done)


def digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:32]


def tokenise(source: corpora.Corpus, tokenizer: Tokenizer, writer: SetWriter, meter: Meter) -> None:
    """Read, divide, encode and write every document; reading, encoding and writing overlap."""
    documents = splits.divide(source.parts(meter), source.called)
    for encoded in in_order(partial(encode, tokenizer), batches(documents)):
        for split, tokens, size in encoded:
            writer.add(split, tokens, size)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups of about BATCH bytes."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += document.size
        if size >= BATCH:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode(tokenizer: Tokenizer, batch: list[Document]) -> list[tuple[str, np.ndarray, int]]:
    """(split, tokens, bytes of text) of the documents of each split."""
    groups = [(split, [d for d in batch if d.split == split]) for split in splits.SPLITS]
    return [
        (split, tokenizer.encode_documents([d.text for d in group]), sum(d.size for d in group))
        for split, group in groups
        if group
    ]


def in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results of `function` in the order of `items`, two at work while the next item is being read.

    Threads suffice: the tokenizer works outside Python, on all cores; the second one fills the gaps in which
    the first turns tokens into arrays.
    """
    with ThreadPoolExecutor(2) as pool:
        running: deque[Future[Result]] = deque()
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > 2:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
