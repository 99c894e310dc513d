"""Data sets of the Hugging Face hub, or a local copy of one, streamed through `datasets`."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qkflow.data import splits
from qkflow.data.readers import documents as cutting
from qkflow.data.readers import tables
from qkflow.errors import InputError, unknown

LOOKED_AT = 1000  # rows without text that are downloaded in search of it, at most


@dataclass(frozen=True)
class HubName:
    """`hf:owner/name[@revision][:config][:mb=N][#column]`; for `owner/name`, a folder laid out alike."""

    repository: str
    revision: str | None = None
    config: str | None = None
    column: str | None = None
    megabytes: int = 1000  # of text to read; 0 for all there is

    @property
    def folder(self) -> Path | None:
        path = Path(self.repository).expanduser()
        return path if path.is_dir() else None


def parse(name: str) -> HubName:
    """Read a name without its `hf:`."""
    name, _, column = name.partition("#")
    repository, *options = name.split(":")
    repository, _, revision = repository.partition("@")
    config, megabytes = None, HubName.megabytes
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            config = option
        elif key == "mb" and value.isdigit():
            megabytes = int(value)
        elif key == "mb":
            raise InputError(f"hf:{name}: mb='{value}' is not a whole number of megabytes")
        else:
            raise unknown("option of a hub data set", key, ["mb"])
    if not repository:
        raise InputError("hf: needs the name of a data set, as in hf:Salesforce/wikitext:wikitext-2-raw-v1")
    return HubName(repository, revision or None, config, column or None, megabytes)


def documents(name: HubName) -> Iterator[tuple[str, str]]:
    """(part, text) of every document, in the data set's own order, up to the megabytes asked for."""
    sets = load(name)
    own = {split: splits.split_in(re.findall("[a-z]+", split.lower())) for split in sets}
    parts = splits.parts_of(filter(None, own.values()))
    for split, rows in sets.items():
        part = parts.get(own[split] or "") if parts else splits.UNDIVIDED
        if part is None:
            continue  # "unsupervised" and the like, beside splits for training and validation
        # Held-out text is bounded too, at a twentieth of the rest.
        budget = name.megabytes * (50_000 if part in ("validation", "test") else 1_000_000) or sys.maxsize
        for text in cutting.articles(_texts(rows, name)):
            yield part, text
            budget -= len(text)
            if budget <= 0:
                break


def _texts(rows: Iterable[dict[str, Any]], name: HubName) -> Iterator[str]:
    where = f"hf:{name.repository}"
    try:
        yield from tables.row_texts(enumerate(rows, start=1), name.column, where, within=LOOKED_AT)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # the second: rows that are damaged
        raise InputError(f"reading {where} failed: {_reason(error)}") from error


def load(name: HubName) -> dict[str, Iterable[dict[str, Any]]]:
    """The data set's splits as streams of rows."""
    if not name.folder:
        require_network(f"the data set {name.repository}", "hf:/path/to/copy, or the path of its files")
    try:
        import datasets
    except ImportError as error:
        raise InputError('hub data sets need `datasets`: pip install "qkflow[data]"') from error
    datasets.disable_progress_bars()
    where = str(name.folder) if name.folder else name.repository
    try:
        loaded = datasets.load_dataset(where, name.config, revision=name.revision, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"hf:{name.repository} cannot be loaded: {_reason(error)}") from error
    return dict(loaded)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_network(what: str, instead: str) -> None:
    """Say at once that the hub cannot be reached: its own client would retry for half a minute."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=10).close()
    except OSError as error:
        raise InputError(
            f"{what} is on the hub, and {host.hostname} cannot be reached: pass a local copy, as {instead}"
        ) from error
