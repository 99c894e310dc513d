"""Text to tokens and back: bytes, byte-level BPE trained here, or a tokenizer from a file or the hub."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.data.bpe_cache import WordMemory, can_cut_at_spaces, cut_at_spaces
from qkflow.errors import InputError, unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

END = "<|endoftext|>"
# Names under which tokenizers keep a token that ends a text, the likeliest first.
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]", "<sep>")
# Up to here one core with a memory for words outruns `tokenizers` on all cores; beyond, it does not.
_FEW_CORES = 4
_PIECE = 1 << 16  # characters a core gets at a time when a long document is spread over many


class Tokenizer(ABC):
    """Text to tokens and back, and the token that separates documents."""

    vocab_size: int
    end_of_document: int
    start_of_document: int | None = None  # before every text, for a model that learned to expect it there

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integers that hold every token."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Tokens of a text; what looks like a special token in it is text like any other."""

    def encode_start(self, text: str) -> list[int]:
        """Tokens of a text as a document begins in training: here, right after the end of another."""
        first = self.end_of_document if self.start_of_document is None else self.start_of_document
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
    def state(self) -> str:
        """Everything there is to it, as text; `from_state` makes it again."""


class ByteTokenizer(Tokenizer):
    """Each UTF-8 byte a token, 256 the end of a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        # 0xFF never occurs in UTF-8
        data = b"".join(text.encode() + b"\xff" for text in texts)
        tokens = np.frombuffer(data, np.uint8).astype(self.dtype)
        tokens[tokens == 0xFF] = self.end_of_document
        return tokens

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], np.int32)

    def state(self) -> str:
        return json.dumps({"type": "bytes"})


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, rust: RustTokenizer, end: str | None = None, start: int | None = None) -> None:
        from tokenizers import AddedToken

        vocabulary = rust.get_vocab()
        end = end or next((name for name in _ENDS if name in vocabulary), END)
        rust.add_special_tokens([AddedToken(end, special=True, normalized=False)])
        rust.no_truncation()
        rust.no_padding()
        rust.encode_special_tokens = True  # a text that spells out "<|endoftext|>" does not end there
        self.rust = rust
        self.vocab_size = max(rust.get_vocab().values()) + 1
        self.end_of_document = rust.get_vocab()[end]
        self.start_of_document = start

    def encode(self, text: str) -> list[int]:
        return self.rust.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.rust.decode(list(tokens), skip_special_tokens=True)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        tokens = self._memory.encode(texts) if self._memory else None
        if tokens is None:
            tokens = self._encode_by_library(texts)
        if np.count_nonzero(tokens == self.end_of_document) != len(texts):
            name = self.rust.id_to_token(self.end_of_document)
            raise InputError(
                f"this tokenizer gives '{name}' inside texts too: it cannot mark where documents end"
            )
        return tokens

    def _encode_by_library(self, texts: Sequence[str]) -> np.ndarray:
        # Cores share a batch by its pieces: long documents are cut, where that changes nothing.
        pieces = [cut_at_spaces(text, _PIECE) if self._cuttable else [text] for text in texts]
        encodings = iter(self.rust.encode_batch_fast([*chain(*pieces)], add_special_tokens=False))
        end = np.array([self.end_of_document], self.dtype)
        arrays: list[np.ndarray] = []
        for document in pieces:
            arrays += [np.array(encoding.ids, self.dtype) for encoding in islice(encodings, len(document))]
            arrays.append(end)
        return np.concatenate(arrays)

    @cached_property
    def _cuttable(self) -> bool:
        return can_cut_at_spaces(self.rust)

    @cached_property
    def _memory(self) -> WordMemory | None:
        if self._cuttable and cores() <= _FEW_CORES:
            return WordMemory(self.rust, self.end_of_document, self.dtype)
        return None

    def token_bytes(self) -> np.ndarray:
        state = json.loads(self.rust.to_str())
        special = {token["id"] for token in state["added_tokens"] if token["special"]}
        byte_level = '"ByteLevel"' in json.dumps(state["pre_tokenizer"])
        sizes = np.zeros(self.vocab_size, np.int32)
        for name, token in self.rust.get_vocab().items():
            if token not in special:  # in byte-level vocabularies each character of a name is one byte
                sizes[token] = len(name if byte_level else self.rust.decode([token]).encode())
        return sizes

    def state(self) -> str:
        return self.rust.to_str()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def restore(state: str, end_of_document: int, start_of_document: int | None = None) -> Tokenizer:
    """The tokenizer whose `state` and end-of-document token these are."""
    if json.loads(state).get("type") == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as RustTokenizer

    rust = RustTokenizer.from_str(state)
    return SubwordTokenizer(rust, rust.id_to_token(end_of_document), start_of_document)


def train_bpe(texts: Iterator[str], size: int) -> SubwordTokenizer:
    """Byte-level BPE as GPT-2's: any text can be encoded, and decodes to itself."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(texts, trainer)
    return SubwordTokenizer(rust, END)


def size_to_train(spec: str) -> int | None:
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
    if spec == "bytes" or size_to_train(spec) or spec.startswith("hf:"):
        return spec
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(spec)]


def load(spec: str) -> Tokenizer:
    """A tokenizer that needs no training: `bytes`, a file or folder, or `hf:NAME`."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("hf:"):
        return SubwordTokenizer(_from_hub(spec[3:]))
    files = _files(spec)
    try:
        if len(files) == 1:
            return SubwordTokenizer(RustTokenizer.from_file(str(files[0])), _declared_end(files[0].parent))
        vocabulary, merges = map(str, files)
        rust = RustTokenizer(models.BPE.from_file(vocabulary, merges))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{spec} cannot be read as a tokenizer: {error}") from error
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return SubwordTokenizer(rust)


def _files(spec: str) -> list[Path]:
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


def _declared_end(folder: Path) -> str | None:
    """The end token that a `tokenizer_config.json` beside the tokenizer names."""
    file = folder / "tokenizer_config.json"
    end = json.loads(file.read_text("utf-8")).get("eos_token") if file.is_file() else None
    return end["content"] if isinstance(end, dict) else end


def _from_hub(name: str) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    from qkflow.data.readers.hf_datasets import require_network

    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise InputError('hub tokenizers need huggingface_hub: pip install "qkflow[data]"') from error
    cached = try_to_load_from_cache(name, "tokenizer.json")
    if isinstance(cached, str):
        return RustTokenizer.from_file(cached)
    require_network(f"the tokenizer {name}", "the path of its tokenizer.json")
    try:
        return RustTokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"hf:{name} cannot be loaded as a tokenizer: {str(error).splitlines()[0]}"
        ) from error
