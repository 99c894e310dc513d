"""Read datasets of the Hugging Face hub, or a local copy of one, through `datasets`.

Every read of hub data goes through `load_splits`: corpora stream it (`iter_documents`), tasks download it
(`iter_rows`).
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qkflow.data import splits
from qkflow.data.readers import documents, tables
from qkflow.errors import InputError, unknown
from qkflow.files import expand_user

HUB_TIMEOUT = 4.0  # seconds to reach the hub
MAX_HUB_NAME = 96  # characters
MAX_ROWS_WITHOUT_TEXT = 1000  # rows to download in search of a text column


@dataclass(frozen=True)
class HubDatasetSpec:
    """`hf:owner/name[@revision][:config][:mb=N][#column]`; `owner/name` may be the folder of a local copy."""

    repo_id: str
    revision: str | None = None
    config: str | None = None
    column: str | None = None
    max_megabytes: int = 1000  # of training text to read; 0: no limit

    @property
    def local_dir(self) -> Path | None:
        """The folder of a local copy, or None for a dataset of the hub."""
        path = expand_user(self.repo_id)
        try:
            return path if path.is_dir() else None
        except (OSError, ValueError):  # not a name of this file system
            return None

    def cache_key(self) -> list[tuple[str, Any]]:
        """Return the fields under the names that cache keys have always used."""
        old_names = {"repo_id": "repository", "max_megabytes": "megabytes"}
        return [(old_names.get(name, name), value) for name, value in vars(self).items()]


def parse_spec(spec: str) -> HubDatasetSpec:
    """Parse a dataset's name without its `hf:`."""
    spec, _, column = spec.partition("#")
    repo_id, *options = spec.split(":")
    repo_id, _, revision = repo_id.partition("@")
    config, megabytes = None, HubDatasetSpec.max_megabytes
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            config = option
        elif key != "mb":
            raise unknown("option of a hub dataset", key, ["mb"])
        elif not re.fullmatch("[0-9]{1,9}", value):
            raise InputError(f"hf:{spec}: mb='{value}' is not an integer", code="not-a-number")
        else:
            megabytes = int(value)
    if not repo_id:
        raise InputError(
            "hf: needs the name of a dataset, as in hf:Salesforce/wikitext:wikitext-2-raw-v1",
            code="missing-dataset-name",
        )
    return HubDatasetSpec(repo_id, revision or None, config, column or None, megabytes)


def load_splits(spec: HubDatasetSpec, *, streaming: bool) -> dict[str, Iterable[dict[str, Any]]]:
    """Return the rows of each split of a dataset, by the split's own name.

    If `streaming`, rows come over the network while they are read. Otherwise the dataset is downloaded, or
    read from the cache of `datasets`, which works offline.
    """
    if not spec.local_dir:
        check_hub_name(spec.repo_id)
    if streaming and not spec.local_dir:
        check_hub_reachable(f"the dataset {spec.repo_id}", "hf:/path/to/copy, or the path of its files")
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            'hub datasets need `datasets`: pip install "qkflow[data]"', code="missing-dependency"
        ) from error
    datasets.disable_progress_bars()
    source = str(spec.local_dir or spec.repo_id)
    try:
        loaded = datasets.load_dataset(source, spec.config, revision=spec.revision, streaming=streaming)
    except Exception as error:  # `datasets` and its HTTP clients raise many types
        raise InputError(
            f"hf:{spec.repo_id} cannot be loaded: {_error_summary(error)}", code="hub-dataset-failed"
        ) from error
    return dict(loaded)


def iter_rows(spec: HubDatasetSpec, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one split. Raise `split-not-found` if the dataset does not have it."""
    available = load_splits(spec, streaming=False)
    if split not in available:
        raise InputError(
            f"hf:{spec.repo_id} has no split '{split}', only {', '.join(available)}", code="split-not-found"
        )
    yield from map(dict, available[split])


def iter_documents(spec: HubDatasetSpec) -> Iterator[tuple[str, str]]:
    """Yield (source split, text) of every document in the dataset's order, `max_megabytes` at most."""
    rows_by_split = load_splits(spec, streaming=True)
    split_of = {name: splits.find_split(re.findall("[a-z]+", name.lower())) for name in rows_by_split}
    source_splits = splits.map_source_splits(filter(None, split_of.values()))
    for name, rows in rows_by_split.items():
        source_split = source_splits.get(split_of[name] or "") if source_splits else splits.UNSPLIT
        if source_split is None:
            continue  # such as "unsupervised", beside splits for training and validation
        # The limit of a held-out split is a twentieth of that for training.
        held_out = source_split in ("validation", "test")
        budget = spec.max_megabytes * (50_000 if held_out else 1_000_000) or sys.maxsize
        for text in documents.join_wikitext_articles(_iter_texts(rows, spec)):
            yield source_split, text
            budget -= len(text)
            if budget <= 0:
                break


def _iter_texts(rows: Iterable[dict[str, Any]], spec: HubDatasetSpec) -> Iterator[str]:
    source = f"hf:{spec.repo_id}"
    try:
        yield from tables.row_texts(
            enumerate(rows, start=1), spec.column, source, max_rows=MAX_ROWS_WITHOUT_TEXT
        )
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: corrupt rows
        raise InputError(
            f"reading {source} failed: {_error_summary(error)}", code="hub-dataset-failed"
        ) from error


def _error_summary(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_hub_reachable(resource: str, alternative: str) -> None:
    """Raise at once if the hub cannot be reached; its own client would retry for half a minute."""
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    proxy = next(filter(None, map(os.environ.get, proxies)), None)
    address = proxy or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not _is_reachable(address):
        raise InputError(
            f"{resource} is on the hub, and {address} cannot be reached: pass a local copy, as {alternative}",
            code="hub-unreachable",
        )


def check_hub_name(name: str) -> None:
    """Raise InputError for a name that the hub would refuse."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", name, re.A) or (
        len(name) > MAX_HUB_NAME or "--" in name or ".." in name or name.endswith((".", "-", ".git"))
    ):
        raise InputError(
            f"'{name}' is not a name on the hub: write owner/name, of letters, digits, '-', '_' and '.', or "
            "the path of a folder that exists",
            code="invalid-hub-name",
        )


def _is_reachable(address: str) -> bool:
    """Return whether a host accepts a connection within HUB_TIMEOUT, the lookup of its name included."""
    connected = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError):
            url = urlsplit(address if "//" in address else f"//{address}")
            port = url.port or (80 if url.scheme == "http" else 443)
            socket.create_connection((url.hostname or "", port), timeout=HUB_TIMEOUT).close()
            connected.set()

    thread = threading.Thread(target=connect, daemon=True)  # a lookup cannot be interrupted
    thread.start()
    thread.join(HUB_TIMEOUT)
    return connected.is_set()
