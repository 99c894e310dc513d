"""Prepared corpora on disk: a folder of token files, mapped into memory, and a manifest with checksums.

manifest.json         what it is, counts, the size and checksums of every other file, its own seal
tokenizer.json        the tokenizer's state
token_bytes.bin       int32: UTF-8 bytes of each token
train.tokens.bin      uint16 or uint32: the documents' tokens, each document followed by its end token
train.documents.bin   int64: where each document begins, and the end of the last
validation.*, test.*  the same
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qkflow import files
from qkflow.data import splits
from qkflow.data.tokenizer import Tokenizer, tokenizer_from_str
from qkflow.data.windows import EvalWindows

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_BLOCK_BYTES = 4096
_N_SAMPLED_BLOCKS = 32


class CorruptedTokenSetError(Exception):
    """A prepared set that is not what its manifest says; the message names the file."""


class TokenSet:
    """A prepared corpus: tokens of each split, mapped from disk, and the tokenizer that made them."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self._manifest = folder, manifest
        # What the corpus is called and known for may differ from when equal text was first prepared.
        self.name: str = manifest["corpus"]["name"]
        self.metadata: dict[str, Any] = {}
        self.fingerprint: str = manifest["fingerprint"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eos_token_id: int = manifest["tokenizer"]["end_of_document"]

    def __repr__(self) -> str:
        return f"TokenSet({self.name!r}, {self._manifest['tokenizer']['spec']!r}, {self.fingerprint})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_str((self.folder / "tokenizer.json").read_text("utf-8"), self.eos_token_id)

    def tokens(self, split: str) -> np.ndarray:
        """All tokens of a split in one read-only array; empty where the corpus has no such split."""
        return self._memmap(f"{splits.normalize_split(split)}.tokens.bin", self._manifest["dtype"])

    def document_offsets(self, split: str) -> np.ndarray:
        """Where each document of `tokens(split)` begins, then where the last one ends."""
        return self._memmap(f"{splits.normalize_split(split)}.documents.bin", "<i8")

    def n_bytes(self, split: str) -> int:
        """UTF-8 bytes of a split's documents: bits per byte = loss / ln 2 * tokens / bytes."""
        return int(self._manifest["splits"][splits.normalize_split(split)]["bytes"])

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for."""
        return self._memmap("token_bytes.bin", "<i4")

    def eval_windows(
        self, split: str | Sequence[str], seq_len: int, batch_size: int, max_tokens: int | None = None
    ) -> EvalWindows:
        """Windows of a split, or of several as one text, to evaluate on, knowing the bytes they cover.

        The count is exact for byte-level tokenizers, and for all if the whole split is covered; other
        tokenizers lose some text (case, spaces), which a part of a split is taken to lose at the mean rate.
        """
        parts = [split] if isinstance(split, str) else split
        tokens = [self.tokens(part) for part in parts]
        text = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
        windows = EvalWindows(text, seq_len, batch_size, max_tokens, token_bytes=self.token_bytes)
        counted = sum(self._manifest["counted_bytes"][splits.normalize_split(part)] for part in parts)
        if windows.n_target_bytes is not None and counted:
            whole = sum(self.n_bytes(part) for part in parts)
            windows.n_target_bytes = round(windows.n_target_bytes * whole / counted)
        return windows

    def describe(self) -> dict[str, Any]:
        """What a result should say about the data it was measured on."""
        described = {"corpus": self._manifest["corpus"] | self.metadata}
        described |= {key: self._manifest[key] for key in ("tokenizer", "splits", "fingerprint")}
        return described | {"name": self.name, "folder": str(self.folder)}

    def _memmap(self, name: str, dtype: str) -> np.ndarray:
        path = self.folder / name
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r").view(np.ndarray)


def open_token_set(folder: Path, *, full_check: bool = False) -> TokenSet:
    """Open a prepared set, checking the size and a sample of every file, or, if `thorough`, all of it.

    Raises FileNotFoundError where there is none and DamagedError where there is one that cannot be trusted.
    """
    text = (folder / MANIFEST_NAME).read_bytes()
    try:
        manifest = json.loads(text)
        seal = manifest.pop("seal")
    except (ValueError, KeyError, AttributeError) as error:
        raise CorruptedTokenSetError(f"{folder / MANIFEST_NAME} is damaged") from error
    if seal != _manifest_checksum(manifest) or manifest["format"] != FORMAT_VERSION:
        raise CorruptedTokenSetError(f"{folder / MANIFEST_NAME} is damaged")
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CorruptedTokenSetError(f"{path} is missing or of the wrong size")
        if _sampled_checksum(path) != entry["sample"] or (full_check and _checksum(path) != entry["sha256"]):
            raise CorruptedTokenSetError(
                f"{path} is damaged: its content does not have the recorded checksum"
            )
    return TokenSet(folder, manifest)


class TokenSetWriter:
    """Writes a set into `folder`, which must be of no interest to anybody until `finish` has returned."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._files: dict[str, BinaryIO] = {}
        self._token_bytes = tokenizer.token_bytes()
        self._counted_bytes = dict.fromkeys(
            splits.SPLITS, 0
        )  # the text's bytes, as far as its tokens keep them
        self.counts = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in splits.SPLITS}
        for split in splits.SPLITS:
            self._open_file(f"{split}.tokens.bin")
            self._open_file(f"{split}.documents.bin").write(np.zeros(1, "<i8").tobytes())

    def __enter__(self) -> TokenSetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def _open_file(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = open(self._folder / name, "wb")  # noqa: SIM115 - closed by __exit__
        return self._files[name]

    def add(self, split: str, tokens: np.ndarray, n_bytes: int) -> None:
        """Append documents, each ending with its end token, that were `size` bytes of text."""
        count = self.counts[split]
        ends = np.flatnonzero(tokens == self._tokenizer.eos_token_id) + 1 + count["tokens"]
        self._open_file(f"{split}.tokens.bin").write(tokens.astype(self._tokenizer.dtype, copy=False).data)
        self._open_file(f"{split}.documents.bin").write(ends.astype("<i8").data)
        count["documents"] += len(ends)
        count["tokens"] += len(tokens)
        count["bytes"] += n_bytes
        self._counted_bytes[split] += int(self._token_bytes[tokens].sum())

    def finalize(self, corpus_metadata: dict[str, Any], tokenizer_spec: str) -> None:
        """Write everything else, the manifest last, and make it durable."""
        self._open_file("token_bytes.bin").write(self._token_bytes.astype("<i4").tobytes())
        self._open_file("tokenizer.json").write(self._tokenizer.to_str().encode())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        entries = {name: _manifest_entry(self._folder / name) for name in sorted(self._files)}
        content = json.dumps([(name, entry["sha256"]) for name, entry in entries.items()])
        manifest = {
            "format": FORMAT_VERSION,
            "corpus": corpus_metadata,
            "tokenizer": {
                "spec": tokenizer_spec,
                "vocab_size": self._tokenizer.vocab_size,
                "end_of_document": self._tokenizer.eos_token_id,
            },
            "dtype": self._tokenizer.dtype.str,
            "splits": self.counts,
            "counted_bytes": self._counted_bytes,
            "files": entries,
            "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        }
        files.write_json(self._folder / MANIFEST_NAME, manifest | {"seal": _manifest_checksum(manifest)})


def _manifest_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _checksum(path), "sample": _sampled_checksum(path)}


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled_checksum(path: Path) -> str:
    """A checksum of blocks spread over the file, its first and last among them: quick for any size."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        last = max(0, path.stat().st_size - _BLOCK_BYTES)
        for place in sorted({last * step // (_N_SAMPLED_BLOCKS - 1) for step in range(_N_SAMPLED_BLOCKS)}):
            file.seek(place)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
