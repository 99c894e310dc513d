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

MAX_ROWS_WITHOUT_TEXT = 1000  # rows without text that are downloaded in search of it, at most


@dataclass(frozen=True)
class HubDatasetSpec:
    """`hf:owner/name[@revision][:config][:mb=N][#column]`; for `owner/name`, a folder laid out alike."""

    repo_id: str
    revision: str | None = None
    config: str | None = None
    column: str | None = None
    max_megabytes: int = 1000  # of text to read; 0 for all there is

    @property
    def local_dir(self) -> Path | None:
        path = Path(self.repo_id).expanduser()
        return path if path.is_dir() else None


def parse_spec(spec: str) -> HubDatasetSpec:
    """Read a name without its `hf:`."""
    spec, _, column = spec.partition("#")
    repository, *options = spec.split(":")
    repository, _, revision = repository.partition("@")
    config, megabytes = None, HubDatasetSpec.max_megabytes
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            config = option
        elif key == "mb" and value.isdigit():
            megabytes = int(value)
        elif key == "mb":
            raise InputError(f"hf:{spec}: mb='{value}' is not a whole number of megabytes")
        else:
            raise unknown("option of a hub data set", key, ["mb"])
    if not repository:
        raise InputError("hf: needs the name of a data set, as in hf:Salesforce/wikitext:wikitext-2-raw-v1")
    return HubDatasetSpec(repository, revision or None, config, column or None, megabytes)


def iter_documents(spec: HubDatasetSpec) -> Iterator[tuple[str, str]]:
    """(part, text) of every document, in the data set's own order, up to the megabytes asked for."""
    sets = load_streaming_splits(spec)
    own = {split: splits.find_split(re.findall("[a-z]+", split.lower())) for split in sets}
    parts = splits.map_source_splits(filter(None, own.values()))
    for split, rows in sets.items():
        part = parts.get(own[split] or "") if parts else splits.UNSPLIT
        if part is None:
            continue  # "unsupervised" and the like, beside splits for training and validation
        # Held-out text is bounded too, at a twentieth of the rest.
        budget = spec.max_megabytes * (50_000 if part in ("validation", "test") else 1_000_000) or sys.maxsize
        for text in cutting.join_wikitext_articles(_iter_texts(rows, spec)):
            yield part, text
            budget -= len(text)
            if budget <= 0:
                break


def _iter_texts(rows: Iterable[dict[str, Any]], spec: HubDatasetSpec) -> Iterator[str]:
    where = f"hf:{spec.repo_id}"
    try:
        yield from tables.row_texts(
            enumerate(rows, start=1), spec.column, where, max_rows=MAX_ROWS_WITHOUT_TEXT
        )
    except InputError:
        raise
    except (OSError, ValueError) as error:  # the second: rows that are damaged
        raise InputError(f"reading {where} failed: {_error_summary(error)}") from error


def load_streaming_splits(spec: HubDatasetSpec) -> dict[str, Iterable[dict[str, Any]]]:
    """The data set's splits as streams of rows."""
    if not spec.local_dir:
        check_hub_reachable(f"the data set {spec.repo_id}", "hf:/path/to/copy, or the path of its files")
    try:
        import datasets
    except ImportError as error:
        raise InputError('hub data sets need `datasets`: pip install "qkflow[data]"') from error
    datasets.disable_progress_bars()
    where = str(spec.local_dir) if spec.local_dir else spec.repo_id
    try:
        loaded = datasets.load_dataset(where, spec.config, revision=spec.revision, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"hf:{spec.repo_id} cannot be loaded: {_error_summary(error)}") from error
    return dict(loaded)


def _error_summary(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_hub_reachable(resource: str, alternative: str) -> None:
    """Say at once that the hub cannot be reached: its own client would retry for half a minute."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=10).close()
    except OSError as error:
        raise InputError(
            f"{resource} is on the hub, and {host.hostname} cannot be reached: pass a local copy, as {alternative}"
        ) from error
