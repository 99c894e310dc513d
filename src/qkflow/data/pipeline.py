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
from qkflow.data.cache import TokenSetCache, log_to_stderr
from qkflow.data.readers.files import ReadProgress
from qkflow.data.splits import Document
from qkflow.data.token_set import CorruptedTokenSetError, TokenSet, TokenSetWriter
from qkflow.data.tokenizer import Tokenizer
from qkflow.errors import InputError

BATCH_BYTES = 1 << 21  # bytes of text tokenised at a time
MAX_TOKENIZER_TRAIN_BYTES = 1 << 26  # bytes of text that a tokenizer is trained on, at most
MTIME_GRACE_SECONDS = 2.0  # seconds: a file this young may change again without a visible change of its time

Item = TypeVar("Item")
Result = TypeVar("Result")


def prepare(
    corpus: str, tokenizer: str = "bpe:2048", *, cache_dir: Path | None = None, show_progress: bool = True
) -> TokenSet:
    """The tokens of a corpus, from the cache if they are there.

    `corpus` is a built-in name (`speeches`), a corpus of the papers (`wikitext-103`), a path (file, folder or
    glob, `#column` at its end) or `hf:owner/name:config`; `tokenizer` is `bytes`, `bpe:SIZE`, a path or
    `hf:NAME`. The cache is `cache`, $QKFLOW_CACHE or the user's cache folder.
    """
    return TokenSetBuilder(corpus, tokenizer, TokenSetCache(cache_dir), show_progress).run()


def verify(
    corpus: str, tokenizer: str = "bpe:2048", *, cache_dir: Path | None = None, show_progress: bool = True
) -> tuple[TokenSet, list[str]]:
    """The prepared set after a check of every byte, and what was found damaged (and has been made anew)."""
    preparation = TokenSetBuilder(corpus, tokenizer, TokenSetCache(cache_dir), show_progress, full_check=True)
    return preparation.run(), preparation.corrupted


@dataclass
class TokenSetBuilder:
    """One corpus, one tokenizer, on the way into one cache."""

    corpus_name: str
    tokenizer_spec: str
    cache: TokenSetCache
    show_progress: bool
    full_check: bool = False  # check all of what is in the cache, not a sample
    corrupted: list[str] = field(default_factory=list)

    def run(self) -> TokenSet:
        started = time.time()
        source = corpora.resolve(self.corpus_name)
        stamp = json_digest([source.stamp(), tokenizers.stamp(self.tokenizer_spec)])
        found = self._open(self.cache.lookup(stamp))
        if found is None:
            found = self._find_or_build(source, stamp)
            if started - source.last_modified() > MTIME_GRACE_SECONDS:
                self.cache.add_to_index(stamp, found.folder.name)
        found.name, found.metadata = self.corpus_name, source.metadata
        if left_out := source.metadata.get("left_out"):
            log_to_stderr(
                f"{len(left_out):,} file{'s' * (len(left_out) > 1)} left out: {corpora.join_limited(left_out)}"
            )
        return found

    def _find_or_build(self, corpus: corpora.Corpus, stamp: str) -> TokenSet:
        """The set with this content, under whatever name it was made; made now if there is none."""
        loaded = (
            None
            if tokenizers.bpe_vocab_size(self.tokenizer_spec)
            else tokenizers.load_tokenizer(self.tokenizer_spec)
        )
        with self._progress_bar(f"reading {self.corpus_name}", corpus.n_bytes) as meter:
            content = corpus.content_fingerprint(meter)
        key = json_digest(
            [token_set.FORMAT_VERSION, content, loaded.to_str() if loaded else self.tokenizer_spec]
        )
        folder = self.cache.token_set_dir(key)
        found = self._open(folder)
        if found is not None:
            return found
        with self.cache.lock(key):
            found = self._open(folder)  # made by another process while this one waited
            if found is None:
                with self.cache.staging_dir(key) as staging:
                    self._build(corpus, loaded, staging)
                    if json_digest([corpus.stamp(), tokenizers.stamp(self.tokenizer_spec)]) != stamp:
                        raise InputError(f"{self.corpus_name} changed while it was being read: run again")
                found = token_set.open_token_set(folder)
        return found

    def _open(self, folder: Path | None) -> TokenSet | None:
        """The set in a folder, or None where there is none that can be trusted."""
        if folder is None:
            return None
        try:
            return token_set.open_token_set(folder, full_check=self.full_check)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CorruptedTokenSetError as damaged:
            if str(damaged) not in self.corrupted:
                self.corrupted.append(str(damaged))
                log_to_stderr(f"{damaged}; preparing {self.corpus_name} anew")
            return None

    def _build(self, corpus: corpora.Corpus, tokenizer: Tokenizer | None, staging: Path) -> None:
        """Write the set into `staging`."""
        spool = staging / "spool"
        if corpus.streaming:
            with self._progress_bar(f"downloading {self.corpus_name}", corpus.n_bytes) as meter:
                corpus = corpora.spool_to_disk(corpus, spool, meter)
        facts: dict[str, Any] = {"name": self.corpus_name, "licence": corpus.license, **corpus.metadata}
        if tokenizer is None:
            tokenizer, facts["tokenizer_trained_on_bytes"] = self._train_tokenizer(corpus)
        with (
            self._progress_bar(f"tokenising {self.corpus_name}", corpus.n_bytes) as meter,
            TokenSetWriter(staging, tokenizer) as writer,
        ):
            tokenize_corpus(corpus, tokenizer, writer, meter)
            for split in ("train", "validation"):
                if not writer.counts[split]["documents"]:
                    raise InputError(f"{corpus.display_name} holds no text to put into the {split} split")
            shutil.rmtree(spool, ignore_errors=True)
            writer.finalize(facts, self.tokenizer_spec)

    def _train_tokenizer(self, corpus: corpora.Corpus) -> tuple[Tokenizer, int]:
        """Train BPE on the train split, or, of a large one, on documents spread evenly over it."""
        size = tokenizers.bpe_vocab_size(self.tokenizer_spec)
        assert size is not None
        every = max(1, -(-corpus.n_bytes // MAX_TOKENIZER_TRAIN_BYTES))
        fed = 0

        def texts(meter: ReadProgress) -> Iterator[str]:
            nonlocal fed
            documents = splits.assign_splits(corpus.iter_documents(meter), corpus.display_name)
            for document in islice((d for d in documents if d.split == "train"), None, None, every):
                fed += document.n_bytes
                yield document.text
                if (
                    fed > 2 * MAX_TOKENIZER_TRAIN_BYTES
                ):  # the source was compressed, and larger than it looked
                    return

        with self._progress_bar(f"training {self.tokenizer_spec}", corpus.n_bytes) as meter:
            return tokenizers.train_bpe(texts(meter), size), fed

    @contextmanager
    def _progress_bar(self, description: str, total_bytes: int) -> Iterator[ReadProgress]:
        """A meter that moves a progress bar, in megabytes."""
        if not self.show_progress or not sys.stderr.isatty():
            yield ReadProgress()
            return
        from qkflow.console import progress_bar

        with progress_bar() as bar:
            task = bar.add_task(f"{description} (MB)", total=total_bytes / 1e6 or None)
            yield ReadProgressBar(lambda done: bar.update(task, completed=done / 1e6))


class ReadProgressBar(ReadProgress):
    def __init__(self, update_bar: Callable[[int], None]) -> None:
        super().__init__()
        self._update_bar = update_bar

    def advance(self, count: int) -> None:
        super().advance(count)
        self._update_bar(self.bytes_read)


def json_digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:32]


def tokenize_corpus(
    corpus: corpora.Corpus, tokenizer: Tokenizer, writer: TokenSetWriter, progress: ReadProgress
) -> None:
    """Read, divide, encode and write every document; reading, encoding and writing overlap."""
    documents = splits.assign_splits(corpus.iter_documents(progress), corpus.display_name)
    for encoded in ordered_map(partial(encode_batch, tokenizer), batch_documents(documents)):
        for split, tokens, size in encoded:
            writer.add(split, tokens, size)


def batch_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups of about BATCH bytes."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += document.n_bytes
        if size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_batch(tokenizer: Tokenizer, batch: list[Document]) -> list[tuple[str, np.ndarray, int]]:
    """(split, tokens, bytes of text) of the documents of each split."""
    groups = [(split, [d for d in batch if d.split == split]) for split in splits.SPLITS]
    return [
        (split, tokenizer.encode_documents([d.text for d in group]), sum(d.n_bytes for d in group))
        for split, group in groups
        if group
    ]


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
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
