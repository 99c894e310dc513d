"""Prepare a corpus: open its token set in the cache, or read, split and tokenize the text into one."""

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
from qkflow.errors import InputError, join_limited

BATCH_BYTES = 1 << 21  # bytes of text per call of the tokenizer
MAX_TOKENIZER_TRAIN_BYTES = 1 << 26
MTIME_GRACE_SECONDS = 2.0  # a newer file may change again within the resolution of its time stamp

Item = TypeVar("Item")
Result = TypeVar("Result")


def prepare(
    corpus: str, tokenizer: str = "bpe:2048", *, cache_dir: Path | None = None, show_progress: bool = True
) -> TokenSet:
    """Return the token set of a corpus, from the cache if it is there.

    `corpus` is a known name (`speeches`, `wikitext-103`), a path (file, folder or glob, with `#column` at its
    end) or `hf:owner/name:config`. `tokenizer` is `bytes`, `bpe:SIZE`, a path or `hf:NAME`. `cache_dir`
    defaults to $QKFLOW_CACHE or the user's cache folder.
    """
    return TokenSetBuilder(corpus, tokenizer, TokenSetCache(cache_dir), show_progress).run()


def verify(
    corpus: str, tokenizer: str = "bpe:2048", *, cache_dir: Path | None = None, show_progress: bool = True
) -> tuple[TokenSet, list[str]]:
    """Check every byte of a token set. Return it, rebuilt if it was corrupt, and what was corrupt."""
    builder = TokenSetBuilder(corpus, tokenizer, TokenSetCache(cache_dir), show_progress, full_check=True)
    return builder.run(), builder.corrupted


@dataclass
class TokenSetBuilder:
    """Build of the token set of one corpus and tokenizer in one cache."""

    corpus_name: str
    tokenizer_spec: str
    cache: TokenSetCache
    show_progress: bool
    full_check: bool = False  # check every byte of a cached set, not only sampled blocks
    corrupted: list[str] = field(default_factory=list)

    def run(self) -> TokenSet:
        started = time.time()
        source = corpora.resolve(self.corpus_name)
        stamp = json_digest([source.stamp(), tokenizers.stamp(self.tokenizer_spec)])
        tokens = self._open(self.cache.lookup(stamp))
        if tokens is None:
            tokens = self._find_or_build(source, stamp)
            if started - source.last_modified() > MTIME_GRACE_SECONDS:
                self.cache.add_to_index(stamp, tokens.folder.name)
        tokens.name = self.corpus_name
        tokens.metadata = {"license": source.license, **source.metadata}
        if left_out := source.metadata.get("left_out"):
            plural = "s" * (len(left_out) > 1)
            log_to_stderr(f"{len(left_out):,} file{plural} left out: {join_limited(left_out, 5)}")
        return tokens

    def _find_or_build(self, corpus: corpora.Corpus, stamp: str) -> TokenSet:
        """Return the token set of this content, whatever its name was; build it if there is none."""
        loaded = (
            None
            if tokenizers.bpe_vocab_size(self.tokenizer_spec)
            else tokenizers.load_tokenizer(self.tokenizer_spec)
        )
        with self._progress_bar(f"reading {self.corpus_name}", corpus.n_bytes) as progress:
            content = corpus.content_fingerprint(progress)
        key = json_digest(
            [token_set.FORMAT_VERSION, content, loaded.to_str() if loaded else self.tokenizer_spec]
        )
        folder = self.cache.token_set_dir(key)
        tokens = self._open(folder)
        if tokens is not None:
            return tokens
        with self.cache.lock(key):
            tokens = self._open(folder)  # built by another process in the meantime
            if tokens is None:
                with self.cache.staging_dir(key) as staging:
                    self._build(corpus, loaded, staging)
                    if json_digest([corpus.stamp(), tokenizers.stamp(self.tokenizer_spec)]) != stamp:
                        raise InputError(
                            f"{self.corpus_name} changed while it was read: run the command again",
                            code="corpus-changed",
                        )
                tokens = token_set.open_token_set(folder)
        return tokens

    def _open(self, folder: Path | None) -> TokenSet | None:
        """Open the token set of a folder. Return None if it is missing or corrupt."""
        if folder is None:
            return None
        try:
            return token_set.open_token_set(folder, full_check=self.full_check)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CorruptedTokenSetError as error:
            if str(error) not in self.corrupted:
                self.corrupted.append(str(error))
                log_to_stderr(f"{error}; preparing {self.corpus_name} again")
            return None

    def _build(self, corpus: corpora.Corpus, tokenizer: Tokenizer | None, staging: Path) -> None:
        """Write the token set into `staging`."""
        spool = staging / "spool"
        if corpus.streaming:
            with self._progress_bar(f"downloading {self.corpus_name}", corpus.n_bytes) as progress:
                corpus = corpora.spool_to_disk(corpus, spool, progress)
        metadata: dict[str, Any] = {"name": self.corpus_name, "license": corpus.license, **corpus.metadata}
        if tokenizer is None:
            tokenizer, metadata["tokenizer_trained_on_bytes"] = self._train_tokenizer(corpus)
        with (
            self._progress_bar(f"tokenizing {self.corpus_name}", corpus.n_bytes) as progress,
            TokenSetWriter(staging, tokenizer) as writer,
        ):
            tokenize_corpus(corpus, tokenizer, writer, progress)
            for split in ("train", "validation"):
                if not writer.counts[split]["documents"]:
                    raise InputError(
                        f"{corpus.display_name} holds no text for the {split} split", code="no-text"
                    )
            shutil.rmtree(spool, ignore_errors=True)
            writer.finalize(metadata, self.tokenizer_spec)

    def _train_tokenizer(self, corpus: corpora.Corpus) -> tuple[Tokenizer, int]:
        """Train BPE on the train split, or on every n-th document of a large one. Return also its bytes."""
        size = tokenizers.bpe_vocab_size(self.tokenizer_spec)
        assert size is not None
        stride = max(1, -(-corpus.n_bytes // MAX_TOKENIZER_TRAIN_BYTES))
        n_bytes = 0

        def texts(progress: ReadProgress) -> Iterator[str]:
            nonlocal n_bytes
            documents = splits.assign_splits(corpus.iter_documents(progress), corpus.display_name)
            for document in islice((d for d in documents if d.split == "train"), None, None, stride):
                n_bytes += document.n_bytes
                yield document.text
                if n_bytes > 2 * MAX_TOKENIZER_TRAIN_BYTES:  # a compressed source is larger than its files
                    return

        with self._progress_bar(f"training {self.tokenizer_spec}", corpus.n_bytes) as progress:
            return tokenizers.train_bpe(texts(progress), size), n_bytes

    @contextmanager
    def _progress_bar(self, description: str, total_bytes: int) -> Iterator[ReadProgress]:
        """Show a progress bar in megabytes, if stderr is a terminal."""
        if not self.show_progress or not sys.stderr.isatty():
            yield ReadProgress()
            return
        from qkflow.console import progress_bar

        with progress_bar() as bar:
            task = bar.add_task(f"{description} (MB)", total=total_bytes / 1e6 or None)
            yield ReadProgressBar(lambda done: bar.update(task, completed=done / 1e6))


class ReadProgressBar(ReadProgress):
    """Progress that calls `update_bar(bytes read)`."""

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
    """Read, split, encode and write every document. Reading, encoding and writing overlap."""
    documents = splits.assign_splits(corpus.iter_documents(progress), corpus.display_name)
    for encoded in ordered_map(partial(encode_batch, tokenizer), batch_documents(documents)):
        for split, tokens, n_bytes in encoded:
            writer.add(split, tokens, n_bytes)


def batch_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield batches of documents of about BATCH_BYTES bytes."""
    batch: list[Document] = []
    n_bytes = 0
    for document in documents:
        batch.append(document)
        n_bytes += document.n_bytes
        if n_bytes >= BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def encode_batch(tokenizer: Tokenizer, batch: list[Document]) -> list[tuple[str, np.ndarray, int]]:
    """Return (split, token ids, bytes of text) of the documents of each split."""
    groups = [(split, [d for d in batch if d.split == split]) for split in splits.SPLITS]
    return [
        (split, tokenizer.encode_documents([d.text for d in group]), sum(d.n_bytes for d in group))
        for split, group in groups
        if group
    ]


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Map in two threads while the next item is read; yield the results in order.

    Threads suffice: `tokenizers` releases the interpreter lock and uses all cores. The second thread encodes
    while the first converts token ids to arrays.
    """
    with ThreadPoolExecutor(2) as pool:
        running: deque[Future[Result]] = deque()
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > 2:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
