"""The size of a corpus, read without tokenizing it or writing anything."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.data import corpora
from qkflow.data.readers.files import ReadProgress
from qkflow.data.splits import assign_splits
from qkflow.errors import InputError

MAX_BYTES = 64_000_000  # more would make a dry run wait; the rest is not read


@dataclass(frozen=True)
class CorpusSize:
    """Documents and UTF-8 bytes of text, and how much of the corpus was read.

    read   "all"; "start": the first MAX_BYTES; "nothing": it would be downloaded
    """

    name: str
    documents: int
    n_bytes: int
    read: str

    def __str__(self) -> str:
        if self.read == "nothing":
            return f"{self.name}: a hub dataset, not read before the runs"
        amount = f"{self.n_bytes / 1e6:.1f} MB" if self.n_bytes >= 1e6 else f"{self.n_bytes / 1e3:.1f} kB"
        size = f"{self.documents:,} documents, {amount} of text"
        return f"{self.name}: {'at least ' if self.read == 'start' else ''}{size}"


def measure_corpus(name: str) -> CorpusSize:
    """Return the size of a corpus. Raise InputError if it cannot be read or split, as `prepare` does."""
    corpus = corpora.resolve(name)
    if corpus.streaming:
        return CorpusSize(name, 0, 0, "nothing")
    documents = n_bytes = 0
    for document in assign_splits(corpus.iter_documents(ReadProgress()), corpus.display_name):
        documents += 1
        n_bytes += document.n_bytes
        if n_bytes > MAX_BYTES:
            return CorpusSize(name, documents, n_bytes, "start")
    if not documents:
        raise InputError(f"{corpus.display_name} holds no text", code="no-text")
    return CorpusSize(name, documents, n_bytes, "all")
