"""Token sets: a prepared corpus as memory-mapped files with a manifest of checksums.

manifest.json         corpus, tokenizer, counts, size and checksums of every other file, and its own checksum
tokenizer.json        the serialized tokenizer
token_bytes.bin       int32: UTF-8 bytes of each token
train.tokens.bin      uint16 or uint32: token ids, an end-of-document token after each document
train.documents.bin   int64: offset of each document, and the end of the last
validation.*, test.*  the same
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qkflow import files
from qkflow.data import splits
from qkflow.data.tokenizer import Tokenizer, tokenizer_from_str
from qkflow.data.windows import EvalWindows
from qkflow.errors import InputError
from qkflow.plain_data import has_layout, load_json, read_json, read_text

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_BLOCK_BYTES = 4096
_N_SAMPLED_BLOCKS = 32


_EOS_KEY, _CHECKSUM_KEY = "end_of_document", "seal"  # as format 1 of the manifest spells them
_SPLIT_LAYOUT = {"documents": int, "tokens": int, "bytes": int}
_MANIFEST_LAYOUT = {
    "corpus": {"name": str},
    "fingerprint": str,
    "tokenizer": {"spec": str, "vocab_size": int, _EOS_KEY: int},
    "dtype": str,
    "splits": dict.fromkeys(splits.SPLITS, _SPLIT_LAYOUT),
    "counted_bytes": dict.fromkeys(splits.SPLITS, int),
    "files": {str: {"bytes": int, "sha256": str, "sample": str}},
}


class CorruptedTokenSetError(Exception):
    """The files do not match the manifest. The message names the file."""


class TokenSet:
    """A prepared corpus: memory-mapped tokens of each split, and their tokenizer."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self._manifest = folder, manifest
        # The caller replaces these: equal text may have been prepared under another name.
        self.name: str = manifest["corpus"]["name"]
        self.metadata: dict[str, Any] = {}
        self.fingerprint: str = manifest["fingerprint"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eos_token_id: int = manifest["tokenizer"][_EOS_KEY]

    def __repr__(self) -> str:
        return f"TokenSet({self.name!r}, {self._manifest['tokenizer']['spec']!r}, {self.fingerprint})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        try:
            return tokenizer_from_str(read_text(path), self.eos_token_id)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise InputError(
                f"{path} is damaged ({error}): `qkflow data verify` prepares the corpus again",
                code="corrupt-token-set",
            ) from None

    def tokens(self, split: str) -> np.ndarray:
        """Return all token ids of a split, (n_tokens,) read-only; empty if the corpus lacks the split."""
        return self._memmap(f"{splits.normalize_split(split)}.tokens.bin", self._manifest["dtype"])

    def document_offsets(self, split: str) -> np.ndarray:
        """Return where each document of `tokens(split)` begins and the last one ends, (n_documents + 1,)."""
        return self._memmap(f"{splits.normalize_split(split)}.documents.bin", "<i8")

    def n_bytes(self, split: str) -> int:
        """Return the UTF-8 bytes of a split: bits per byte = loss / ln 2 * tokens / bytes."""
        return int(self._manifest["splits"][splits.normalize_split(split)]["bytes"])

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each token, (vocab_size,)."""
        return self._memmap("token_bytes.bin", "<i4")

    def eval_windows(
        self, split: str | Sequence[str], seq_len: int, batch_size: int, max_tokens: int | None = None
    ) -> EvalWindows:
        """Return evaluation windows of a split, or of several splits in sequence.

        `n_target_bytes` is exact for byte-level tokenizers, and for all tokenizers without `max_tokens`.
        Others drop some text (case, spaces), assumed to be evenly distributed over the split.
        """
        names = [splits.normalize_split(name) for name in ([split] if isinstance(split, str) else split)]
        arrays = [self.tokens(name) for name in names]
        tokens = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        windows = EvalWindows(tokens, seq_len, batch_size, max_tokens, token_bytes=self.token_bytes)
        token_bytes = sum(self._manifest["counted_bytes"][name] for name in names)
        if windows.n_target_bytes is not None and token_bytes:
            text_bytes = sum(self.n_bytes(name) for name in names)
            windows.n_target_bytes = round(windows.n_target_bytes * text_bytes / token_bytes)
        return windows

    def describe(self) -> dict[str, Any]:
        """Return what a result records about its data, as JSON."""
        tokenizer = dict(self._manifest["tokenizer"])
        tokenizer["eos_token_id"] = tokenizer.pop(_EOS_KEY)
        return {
            "corpus": self._manifest["corpus"] | self.metadata,
            "tokenizer": tokenizer,
            "splits": {split: dict(counts) for split, counts in self._manifest["splits"].items()},
            "fingerprint": self.fingerprint,
            "name": self.name,
            "folder": str(self.folder),
        }

    def _memmap(self, name: str, dtype: str) -> np.ndarray:
        path = self.folder / name
        if path.stat().st_size == 0:  # an empty file cannot be memory-mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r").view(np.ndarray)


def open_token_set(folder: Path, *, full_check: bool = False) -> TokenSet:
    """Open a token set. Check the size and sampled blocks of every file, or all bytes if `full_check`.

    Raise FileNotFoundError if there is none, and CorruptedTokenSetError if a check fails.
    """
    try:
        manifest = read_json(folder / MANIFEST_NAME)
        checksum = manifest.pop(_CHECKSUM_KEY)
    except (ValueError, KeyError, AttributeError) as error:
        raise CorruptedTokenSetError(f"{folder / MANIFEST_NAME} is corrupt") from error
    if checksum != _manifest_checksum(manifest) or manifest["format"] != FORMAT_VERSION:
        raise CorruptedTokenSetError(f"{folder / MANIFEST_NAME} is corrupt")
    if not has_layout(manifest, _MANIFEST_LAYOUT) or not _sizes_agree(manifest):
        raise CorruptedTokenSetError(f"{folder / MANIFEST_NAME} is corrupt")
    for name, entry in manifest["files"].items():
        path = folder / files.check_file_name(f"{folder / MANIFEST_NAME}: the file", name)
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CorruptedTokenSetError(f"{path} is missing or has the wrong size")
        if _sampled_checksum(path) != entry["sample"] or (full_check and _checksum(path) != entry["sha256"]):
            raise CorruptedTokenSetError(f"{path} is corrupt: its checksum does not match the manifest")
    return TokenSet(folder, manifest)


def _sizes_agree(manifest: dict[str, Any]) -> bool:
    """Return whether the files of a manifest have the sizes that its counts say."""
    tokenizer, sizes = manifest["tokenizer"], {k: v["bytes"] for k, v in manifest["files"].items()}
    width = {"<u2": 2, "<u4": 4}.get(manifest["dtype"], 0)
    expected = {"token_bytes.bin": 4 * tokenizer["vocab_size"]}
    for split, count in manifest["splits"].items():
        expected[f"{split}.tokens.bin"] = width * count["tokens"]
        expected[f"{split}.documents.bin"] = 8 * (count["documents"] + 1)
    is_complete = "tokenizer.json" in sizes and all(sizes.get(k) == v for k, v in expected.items())
    return bool(width) and tokenizer[_EOS_KEY] < tokenizer["vocab_size"] and is_complete


class TokenSetWriter:
    """Writer of a token set. No process may read the folder before `finalize` has returned."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._files: dict[str, BinaryIO] = {}
        self._token_bytes = tokenizer.token_bytes()
        self._counted_bytes = dict.fromkeys(splits.SPLITS, 0)  # sum of the tokens' bytes
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
        """Append documents, each ending with the end-of-document token, of `n_bytes` bytes of text."""
        count = self.counts[split]
        ends = np.flatnonzero(tokens == self._tokenizer.eos_token_id) + 1 + count["tokens"]
        self._open_file(f"{split}.tokens.bin").write(tokens.astype(self._tokenizer.dtype, copy=False).data)
        self._open_file(f"{split}.documents.bin").write(ends.astype("<i8").data)
        count["documents"] += len(ends)
        count["tokens"] += len(tokens)
        count["bytes"] += n_bytes
        self._counted_bytes[split] += int(self._token_bytes[tokens].sum())

    def finalize(self, corpus_metadata: dict[str, Any], tokenizer_spec: str) -> None:
        """Write the remaining files, the manifest last."""
        self._open_file("token_bytes.bin").write(self._token_bytes.astype("<i4").tobytes())
        self._open_file("tokenizer.json").write(self._tokenizer.to_str().encode())
        for file in self._files.values():
            file.flush()
        entries = {name: _manifest_entry(self._folder / name) for name in sorted(self._files)}
        content = json.dumps([(name, entry["sha256"]) for name, entry in entries.items()])
        manifest = {
            "format": FORMAT_VERSION,
            "corpus": corpus_metadata,
            "tokenizer": {
                "spec": tokenizer_spec,
                "vocab_size": self._tokenizer.vocab_size,
                _EOS_KEY: self._tokenizer.eos_token_id,
            },
            "dtype": self._tokenizer.dtype.str,
            "splits": self.counts,
            "counted_bytes": self._counted_bytes,
            "files": entries,
            "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        }
        manifest = load_json(json.dumps(manifest))  # as it is read: a name that is not UTF-8 changes
        files.write_json(
            self._folder / MANIFEST_NAME, manifest | {_CHECKSUM_KEY: _manifest_checksum(manifest)}
        )


def _manifest_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _checksum(path), "sample": _sampled_checksum(path)}


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled_checksum(path: Path) -> str:
    """Return the checksum of blocks spread over the file, with the first and the last: fast for any size."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        last = max(0, path.stat().st_size - _BLOCK_BYTES)
        for offset in sorted({last * step // (_N_SAMPLED_BLOCKS - 1) for step in range(_N_SAMPLED_BLOCKS)}):
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
