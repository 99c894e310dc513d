"""Tokenizers: bytes, byte-level BPE trained on the corpus, or one from a file or the hub."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.data.bpe_cache import BPECache, bpe_cache_enabled, can_split_at_spaces, split_at_spaces
from qkflow.data.cache import file_stamps
from qkflow.errors import InputError, unknown
from qkflow.files import expand_user
from qkflow.plain_data import load_json, read_json, read_text
from qkflow.system import process_cpu_count

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

END_OF_TEXT = "<|endoftext|>"
# Usual names of an end-of-text token, the most specific first.
_EOS_CANDIDATES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
    "<sep>",
)
# The word cache uses one core. On more cores than this, `tokenizers` on all of them is faster.
_BPE_CACHE_MAX_CORES = 4
_PIECE_CHARS = 1 << 16  # long documents are split into pieces of this size, which are encoded in parallel
MAX_VOCAB_SIZE = 10**7  # a table of so many tokens still fits into memory


@contextmanager
def backend_errors(source: str = "the tokenizer") -> Iterator[None]:
    """Raise InputError for what the Rust library raises: a bare Exception, or a panic, a BaseException."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{source} fails ({reason}): give the tokenizer.json that the model was trained with",
            code="invalid-tokenizer-file",
        ) from None


class Tokenizer(ABC):
    """Interface of a tokenizer with an end-of-document token."""

    vocab_size: int
    eos_token_id: int
    bos_token_id: int | None = None  # None: a document begins after the end-of-document token

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds every token id."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. The name of a special token is encoded as ordinary text."""

    def encode_with_bos(self, text: str) -> list[int]:
        """Return the token ids of a text after the token that precedes a document in training."""
        first = self.eos_token_id if self.bos_token_id is None else self.bos_token_id
        return [first, *self.encode(text)]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Return the token ids of all documents, an end-of-document token after each. Use all cores."""

    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes of each token, (vocab_size,) int32; special tokens have 0."""

    @abstractmethod
    def to_str(self) -> str:
        """Serialize the tokenizer for `tokenizer_from_str`."""


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte; 256 is the end-of-document token."""

    vocab_size = 257
    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        # 0xFF does not occur in UTF-8.
        data = b"".join(text.encode() + b"\xff" for text in texts)
        tokens = np.frombuffer(data, np.uint8).astype(self.dtype)
        tokens[tokens == 0xFF] = self.eos_token_id
        return tokens

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], np.int32)

    def to_str(self) -> str:
        return json.dumps({"type": "bytes"})


class HuggingFaceTokenizer(Tokenizer):
    """Adapter of a tokenizer of the `tokenizers` library."""

    def __init__(
        self, backend_tokenizer: RustTokenizer, eos_token: str | None = None, bos_token_id: int | None = None
    ) -> None:
        from tokenizers import AddedToken

        vocab = backend_tokenizer.get_vocab()
        eos_token = eos_token or next((name for name in _EOS_CANDIDATES if name in vocab), END_OF_TEXT)
        backend_tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
        backend_tokenizer.no_truncation()
        backend_tokenizer.no_padding()
        backend_tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text does not end it
        self.backend_tokenizer = backend_tokenizer
        self.vocab_size = max(backend_tokenizer.get_vocab().values()) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise InputError(
                f"the tokenizer has the token id {self.vocab_size - 1:,}: at most {MAX_VOCAB_SIZE - 1:,}",
                code="invalid-tokenizer-file",
            )
        self.eos_token_id = backend_tokenizer.get_vocab()[eos_token]
        self.bos_token_id = bos_token_id

    @backend_errors()
    def encode(self, text: str) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=False).ids

    @backend_errors()
    def decode(self, tokens: Sequence[int]) -> str:
        return self.backend_tokenizer.decode(list(tokens), skip_special_tokens=True)

    @backend_errors()
    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        tokens = self._bpe_cache.encode(texts) if bpe_cache_enabled() and self._bpe_cache else None
        if tokens is None:
            tokens = self._encode_with_backend(texts)
        if np.count_nonzero(tokens == self.eos_token_id) != len(texts):
            name = self.backend_tokenizer.id_to_token(self.eos_token_id)
            raise InputError(
                f"the tokenizer encodes ordinary text to its end-of-document token '{name}': "
                "name another `eos_token` in its tokenizer_config.json",
                code="eos-token-in-text",
            )
        return tokens

    def _encode_with_backend(self, texts: Sequence[str]) -> np.ndarray:
        # `tokenizers` encodes the texts of a batch in parallel, so long documents are split first.
        pieces = [
            split_at_spaces(text, _PIECE_CHARS) if self._can_split_at_spaces else [text] for text in texts
        ]
        encodings = iter(
            self.backend_tokenizer.encode_batch_fast([*chain(*pieces)], add_special_tokens=False)
        )
        end = np.array([self.eos_token_id], self.dtype)
        arrays: list[np.ndarray] = []
        for document_pieces in pieces:
            n_pieces = len(document_pieces)
            arrays += [np.array(encoding.ids, self.dtype) for encoding in islice(encodings, n_pieces)]
            arrays.append(end)
        return np.concatenate(arrays)

    @cached_property
    def _can_split_at_spaces(self) -> bool:
        return can_split_at_spaces(self.backend_tokenizer)

    @cached_property
    def _bpe_cache(self) -> BPECache | None:
        if self._can_split_at_spaces and process_cpu_count() <= _BPE_CACHE_MAX_CORES:
            return BPECache(self.backend_tokenizer, self.eos_token_id, self.dtype)
        return None

    @backend_errors()
    def token_bytes(self) -> np.ndarray:
        state = json.loads(self.backend_tokenizer.to_str())
        special = {token["id"] for token in state["added_tokens"] if token["special"]}
        byte_level = '"ByteLevel"' in json.dumps(state["pre_tokenizer"])
        sizes = np.zeros(self.vocab_size, np.int32)
        for name, token in self.backend_tokenizer.get_vocab().items():
            if token not in special:  # in byte-level vocabularies each character of a token is one byte
                sizes[token] = len(name if byte_level else self.backend_tokenizer.decode([token]).encode())
        return sizes

    def to_str(self) -> str:
        return self.backend_tokenizer.to_str()


def tokenizer_from_str(serialized: str, eos_token_id: int, bos_token_id: int | None = None) -> Tokenizer:
    """Build a tokenizer from `Tokenizer.to_str` and its special tokens."""
    if load_json(serialized).get("type") == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as RustTokenizer

    with backend_errors():
        rust = RustTokenizer.from_str(serialized)
        return HuggingFaceTokenizer(rust, rust.id_to_token(eos_token_id), bos_token_id)


def train_bpe(texts: Iterator[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Train byte-level BPE with GPT-2's pre-tokenizer. Every text decodes to itself."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(rust, END_OF_TEXT)


def bpe_vocab_size(spec: str) -> int | None:
    """Return the size of `bpe:SIZE`; None for a tokenizer that needs no training."""
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not re.fullmatch("[0-9]{1,7}", size) or not 257 <= int(size) <= 1_000_000:
        raise InputError(
            f"tokenizer '{spec}': bpe needs a vocab_size between 257 and 1000000, as in bpe:2048",
            code="invalid-vocab-size",
        )
    return int(size)


def stamp(spec: str) -> Any:
    """Return a JSON value that is cheap to compute and changes when the tokenizer may have changed."""
    if spec == "bytes" or bpe_vocab_size(spec) or spec.startswith("hf:"):
        return spec
    return file_stamps(_tokenizer_files(spec))


def load_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer that needs no training: `bytes`, a file or folder, or `hf:NAME`."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("hf:"):
        return HuggingFaceTokenizer(_load_from_hub(spec[3:]))
    files = _tokenizer_files(spec)
    with backend_errors(spec):
        if len(files) == 1:
            rust = RustTokenizer.from_str(read_text(files[0]))
            return HuggingFaceTokenizer(rust, _configured_eos_token(files[0].parent))
        rust = RustTokenizer(models.BPE.from_file(*map(str, files)))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(rust)


def _tokenizer_files(spec: str) -> list[Path]:
    """Return the file `tokenizer.json`, or the two of GPT-2's layout: vocabulary and merges."""
    path = expand_user(spec)
    pairs = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
    folder = path.parent if path.name in chain(*pairs) else path
    if folder.is_dir():
        for names in (("tokenizer.json",), *pairs):
            files = [folder / name for name in names]
            if all(file.is_file() for file in files):
                return files
        raise InputError(
            f"{folder} holds neither tokenizer.json nor encoder.json with vocab.bpe",
            code="no-tokenizer-in-folder",
        )
    if path.is_file():
        return [path]
    if path.suffix or len(path.parts) > 1:
        raise InputError(f"there is no tokenizer at {spec}", code="tokenizer-not-found")
    raise unknown("tokenizer", spec, ["bytes", "bpe:2048", "hf:gpt2", "path/to/tokenizer.json"])


def _configured_eos_token(folder: Path) -> str | None:
    """Return the `eos_token` of a `tokenizer_config.json` beside the tokenizer, or None."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    eos_token = config.get("eos_token") if isinstance(config, dict) else None
    eos_token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    if not isinstance(eos_token, str | None):
        raise InputError(f"{path}: eos_token is {eos_token!r}, not text", code="invalid-tokenizer-file")
    return eos_token


def _load_from_hub(repo_id: str) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    from qkflow.data.readers.hf_datasets import check_hub_name, check_hub_reachable

    check_hub_name(repo_id)

    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise InputError(
            'hub tokenizers need huggingface_hub: pip install "qkflow[data]"', code="missing-dependency"
        ) from error
    cached = try_to_load_from_cache(repo_id, "tokenizer.json")
    if isinstance(cached, str):
        return RustTokenizer.from_file(cached)
    check_hub_reachable(f"the tokenizer {repo_id}", "the path of its tokenizer.json")
    try:
        return RustTokenizer.from_pretrained(repo_id)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"hf:{repo_id} cannot be loaded as a tokenizer: {str(error).splitlines()[0]}",
            code="hub-tokenizer-failed",
        ) from error
