"""Text to tokens and back: bytes, byte-level BPE trained here, or a tokenizer from a file or the hub."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.data.bpe_cache import BPECache, can_split_at_spaces, split_at_spaces
from qkflow.errors import InputError, unknown
from qkflow.system import process_cpu_count

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

END_OF_TEXT = "<|endoftext|>"
# Names under which tokenizers keep a token that ends a text, the likeliest first.
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
# Up to here one core with a memory for words outruns `tokenizers` on all cores; beyond, it does not.
_BPE_CACHE_MAX_CORES = 4
_PIECE_CHARS = 1 << 16  # characters a core gets at a time when a long document is spread over many


class Tokenizer(ABC):
    """Text to tokens and back, and the token that separates documents."""

    vocab_size: int
    eos_token_id: int
    bos_token_id: int | None = None  # before every text, for a model that learned to expect it there

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integers that hold every token."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Tokens of a text; what looks like a special token in it is text like any other."""

    def encode_with_bos(self, text: str) -> list[int]:
        """Tokens of a text as a document begins in training: here, right after the end of another."""
        first = self.eos_token_id if self.bos_token_id is None else self.bos_token_id
        return [first, *self.encode(text)]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, leaving special tokens out."""

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Tokens of many documents, each followed by the end-of-document token, on the whole machine."""

    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for (special ones for none), to turn loss into bits per byte."""

    @abstractmethod
    def to_str(self) -> str:
        """Everything there is to it, as text; `from_state` makes it again."""


class ByteTokenizer(Tokenizer):
    """Each UTF-8 byte a token, 256 the end of a document."""

    vocab_size = 257
    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        # 0xFF never occurs in UTF-8
        data = b"".join(text.encode() + b"\xff" for text in texts)
        tokens = np.frombuffer(data, np.uint8).astype(self.dtype)
        tokens[tokens == 0xFF] = self.eos_token_id
        return tokens

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], np.int32)

    def to_str(self) -> str:
        return json.dumps({"type": "bytes"})


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self, backend_tokenizer: RustTokenizer, eos_token: str | None = None, bos_token_id: int | None = None
    ) -> None:
        from tokenizers import AddedToken

        vocabulary = backend_tokenizer.get_vocab()
        eos_token = eos_token or next((name for name in _EOS_CANDIDATES if name in vocabulary), END_OF_TEXT)
        backend_tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
        backend_tokenizer.no_truncation()
        backend_tokenizer.no_padding()
        backend_tokenizer.encode_special_tokens = (
            True  # a text that spells out "<|endoftext|>" does not end there
        )
        self.backend_tokenizer = backend_tokenizer
        self.vocab_size = max(backend_tokenizer.get_vocab().values()) + 1
        self.eos_token_id = backend_tokenizer.get_vocab()[eos_token]
        self.bos_token_id = bos_token_id

    def encode(self, text: str) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.backend_tokenizer.decode(list(tokens), skip_special_tokens=True)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        tokens = self._bpe_cache.encode(texts) if self._bpe_cache else None
        if tokens is None:
            tokens = self._encode_with_backend(texts)
        if np.count_nonzero(tokens == self.eos_token_id) != len(texts):
            name = self.backend_tokenizer.id_to_token(self.eos_token_id)
            raise InputError(
                f"this tokenizer gives '{name}' inside texts too: it cannot mark where documents end"
            )
        return tokens

    def _encode_with_backend(self, texts: Sequence[str]) -> np.ndarray:
        # Cores share a batch by its pieces: long documents are cut, where that changes nothing.
        pieces = [
            split_at_spaces(text, _PIECE_CHARS) if self._can_split_at_spaces else [text] for text in texts
        ]
        encodings = iter(
            self.backend_tokenizer.encode_batch_fast([*chain(*pieces)], add_special_tokens=False)
        )
        end = np.array([self.eos_token_id], self.dtype)
        arrays: list[np.ndarray] = []
        for document in pieces:
            arrays += [np.array(encoding.ids, self.dtype) for encoding in islice(encodings, len(document))]
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

    def token_bytes(self) -> np.ndarray:
        state = json.loads(self.backend_tokenizer.to_str())
        special = {token["id"] for token in state["added_tokens"] if token["special"]}
        byte_level = '"ByteLevel"' in json.dumps(state["pre_tokenizer"])
        sizes = np.zeros(self.vocab_size, np.int32)
        for name, token in self.backend_tokenizer.get_vocab().items():
            if token not in special:  # in byte-level vocabularies each character of a name is one byte
                sizes[token] = len(name if byte_level else self.backend_tokenizer.decode([token]).encode())
        return sizes

    def to_str(self) -> str:
        return self.backend_tokenizer.to_str()


def tokenizer_from_str(serialized: str, eos_token_id: int, bos_token_id: int | None = None) -> Tokenizer:
    """The tokenizer whose `state` and end-of-document token these are."""
    if json.loads(serialized).get("type") == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as RustTokenizer

    rust = RustTokenizer.from_str(serialized)
    return HuggingFaceTokenizer(rust, rust.id_to_token(eos_token_id), bos_token_id)


def train_bpe(texts: Iterator[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Byte-level BPE as GPT-2's: any text can be encoded, and decodes to itself."""
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
    """The vocabulary that `bpe:SIZE` asks for; None for a tokenizer that already exists."""
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not size.isdigit() or not 257 <= int(size) <= 1_000_000:
        raise InputError(
            f"tokenizer '{spec}': bpe needs a vocabulary between 257 and 1000000, as in bpe:2048"
        )
    return int(size)


def stamp(spec: str) -> Any:
    """Something quick to get that changes whenever the tokenizer behind `spec` may have."""
    if spec == "bytes" or bpe_vocab_size(spec) or spec.startswith("hf:"):
        return spec
    return [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in _tokenizer_files(spec)
    ]


def load_tokenizer(spec: str) -> Tokenizer:
    """A tokenizer that needs no training: `bytes`, a file or folder, or `hf:NAME`."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("hf:"):
        return HuggingFaceTokenizer(_load_from_hub(spec[3:]))
    files = _tokenizer_files(spec)
    try:
        if len(files) == 1:
            return HuggingFaceTokenizer(
                RustTokenizer.from_file(str(files[0])), _configured_eos_token(files[0].parent)
            )
        vocabulary, merges = map(str, files)
        rust = RustTokenizer(models.BPE.from_file(vocabulary, merges))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{spec} cannot be read as a tokenizer: {error}") from error
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(rust)


def _tokenizer_files(spec: str) -> list[Path]:
    """The file `tokenizer.json`, or GPT-2's two: vocabulary and merges."""
    path = Path(spec).expanduser()
    pairs = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
    folder = path.parent if path.name in chain(*pairs) else path
    if folder.is_dir():
        for names in (("tokenizer.json",), *pairs):
            files = [folder / name for name in names]
            if all(file.is_file() for file in files):
                return files
        raise InputError(f"{folder} holds neither tokenizer.json nor encoder.json with vocab.bpe")
    if path.is_file():
        return [path]
    if path.suffix or len(path.parts) > 1:
        raise InputError(f"there is no tokenizer at {spec}")
    raise unknown("tokenizer", spec, ["bytes", "bpe:2048", "hf:gpt2", "path/to/tokenizer.json"])


def _configured_eos_token(folder: Path) -> str | None:
    """The end token that a `tokenizer_config.json` beside the tokenizer names."""
    file = folder / "tokenizer_config.json"
    end = json.loads(file.read_text("utf-8")).get("eos_token") if file.is_file() else None
    return end["content"] if isinstance(end, dict) else end


def _load_from_hub(repo_id: str) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    from qkflow.data.readers.hf_datasets import check_hub_reachable

    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise InputError('hub tokenizers need huggingface_hub: pip install "qkflow[data]"') from error
    cached = try_to_load_from_cache(repo_id, "tokenizer.json")
    if isinstance(cached, str):
        return RustTokenizer.from_file(cached)
    check_hub_reachable(f"the tokenizer {repo_id}", "the path of its tokenizer.json")
    try:
        return RustTokenizer.from_pretrained(repo_id)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"hf:{repo_id} cannot be loaded as a tokenizer: {str(error).splitlines()[0]}"
        ) from error
