"""Encoded examples of a task: built once per study, saved in one file that all of its runs read."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkflow.data import tasks
from qkflow.data.tasks.examples import Example, Span, TaskDataset, is_hub_source, token_mask, word_spans
from qkflow.data.tokenizer import HuggingFaceTokenizer, bpe_vocab_size, train_bpe
from qkflow.errors import InputError
from qkflow.files import check_file_name, write_atomic
from qkflow.plain_data import MAX_LOG_BYTES, parse_json, read_bytes
from qkflow.studies.pace.config import GENERATED_SOURCE
from qkflow.studies.pace.recipes import Recipe
from qkflow.training.pretrained import load_model_tokenizer

UNK_TOKEN_ID = 1  # of word tokenizers; 0 is padding
TEST_FRACTION = 0.1  # held out of a source without a test split
DEFAULT_GENERATED_EXAMPLES = 10_000
_SPLIT_SEED = 20_260_808


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of one example, with its class or answer, and one token mask per annotator."""

    name: str
    ids: list[int]
    label: int = -1
    answer_ids: list[int] = field(default_factory=list)
    rationales: list[list[bool]] = field(default_factory=list)
    reference_answers: list[str] = field(default_factory=list)

    @property
    def has_rationale(self) -> bool:
        return any(any(mask) for mask in self.rationales)


@dataclass(frozen=True)
class TaskData:
    """Encoded training and test examples of a study."""

    classes: list[str]  # empty if answers are generated
    vocab_size: int
    eos_token_id: int
    train: list[EncodedExample]
    test: list[EncodedExample]
    token_texts: list[str]  # text of every token, to decode answers
    n_annotators: int  # maximum per example
    issue_counts: dict[str, int]

    @property
    def mean_length(self) -> int:
        """Return the mean tokens per training example, answer included."""
        tokens = sum(len(example.ids) + len(example.answer_ids) for example in self.train)
        return max(1, round(tokens / len(self.train)))

    def majority_accuracy(self) -> float | None:
        """Return the test accuracy of always predicting the most frequent training class."""
        if not self.classes:
            return None
        ((majority, _),) = Counter(example.label for example in self.train).most_common(1)
        return sum(example.label == majority for example in self.test) / len(self.test)

    def dump(self) -> bytes:
        plain = {
            **self.__dict__,
            "train": [_to_row(example) for example in self.train],
            "test": [_to_row(example) for example in self.test],
        }
        return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()


def _to_row(example: EncodedExample) -> list[Any]:
    marked = [[i for i, is_marked in enumerate(mask) if is_marked] for mask in example.rationales]
    return [
        example.name,
        example.ids,
        example.label,
        example.answer_ids,
        marked,
        example.reference_answers,
    ]


def _from_row(row: list[Any]) -> EncodedExample:
    name, ids, label, answer_ids, marked, reference_answers = row
    masks = [[i in positions for i in range(len(ids))] for positions in map(set, marked)]
    return EncodedExample(name, ids, label, answer_ids, masks, reference_answers)


def _data_file_name(content: bytes) -> str:
    return f"data-{hashlib.sha256(content).hexdigest()[:12]}.json"


def save_task_data(data: TaskData, folder: Path) -> str:
    """Write the data unless it exists. Return the file name, which contains a hash of the content."""
    content = data.dump()
    name = _data_file_name(content)
    path = folder / name
    if not path.is_file() or _data_file_name(read_bytes(path, MAX_LOG_BYTES)) != name:  # missing or damaged
        write_atomic(path, content)
    return name


def load_task_data(folder: Path, name: str) -> TaskData:
    """Read what `save_task_data` wrote. Raise InputError if the file does not have the hash of its name."""
    path = folder / check_file_name("data.file", name)
    content = read_bytes(path, MAX_LOG_BYTES)
    if _data_file_name(content) != name:
        raise InputError(
            f"{path} is damaged: the command that began the study writes it again", code="corrupt-task-data"
        )
    values = parse_json(content, str(path))
    for name in ("train", "test"):
        values[name] = [_from_row(row) for row in values[name]]
    return TaskData(**values)


@dataclass(frozen=True)
class DataLimits:
    """Selection of the examples of a task."""

    as_published: bool = False
    max_train_examples: int | None = None
    max_test_examples: int = 1000
    window: int = 200  # SQuAD: characters of context on either side of an answer


def prepare_task_data(
    task: str, source: str, recipe: Recipe, limits: DataLimits, pretrained: str | None = None
) -> TaskData:
    """Load a task, hold out test examples if it has no test split, and encode it.

    The tokenizer is that of the model folder `pretrained`, or as the recipe says.
    """
    train, test, issue_counts = _load_train_test(task, source, limits)
    train = _drop_unlabeled(train, issue_counts, "training")
    test = _drop_unlabeled(test, issue_counts, "test")
    train_texts = {example.text for example in train}
    unseen = [example for example in test if example.text not in train_texts]
    issue_counts["test examples dropped: also in training"] += len(test) - len(unseen)
    if not unseen:
        raise InputError(
            f"{source} leaves no test example that is not in training: give more examples",
            code="no-test-examples",
        )
    classes = [] if recipe.generates_answer else sorted({str(example.label) for example in train})
    if not recipe.generates_answer and len(classes) < 2:
        raise InputError(
            f"{source} has a single class ({', '.join(classes)}): a classifier needs at least two",
            code="single-class",
        )
    tokenizer = (
        _build_tokenizer(recipe.tokenizer, train) if pretrained is None else _pretrained_tokenizer(pretrained)
    )
    encoder = _ExampleEncoder(tokenizer, classes, recipe, issue_counts)
    encoded_train, encoded_test = encoder.encode_all(train), encoder.encode_all(unseen)
    issue_counts["test examples without a rationale"] += sum(not each.has_rationale for each in encoded_test)
    return TaskData(
        classes=classes,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        train=encoded_train,
        test=encoded_test,
        token_texts=tokenizer.token_texts,
        n_annotators=max(int(example.metadata.get("annotators", 1)) for example in unseen),
        issue_counts=dict(sorted(issue_counts.items())),
    )


def _load_train_test(
    task: str, source: str, limits: DataLimits
) -> tuple[list[Example], list[Example], Counter[str]]:
    """Return training and test examples, and the issue counts of their loaders."""
    if task == "agreement":
        n_train = limits.max_train_examples or DEFAULT_GENERATED_EXAMPLES
        limit = n_train + limits.max_test_examples if source == GENERATED_SOURCE else None
        splits = [tasks.load(task, source, as_published=limits.as_published, limit=limit)]
    elif task == "squad":
        splits = _load_splits(
            task, source, window=limits.window, shift_window=not limits.as_published, relocate=True
        )
    else:
        splits = _load_splits(task, source)
    issue_counts: Counter[str] = Counter()
    for split in splits:
        issue_counts.update(split.issue_counts)
    if len(splits) == 2:
        train, test = splits[0].examples, splits[1].examples
        random.Random(_SPLIT_SEED).shuffle(test)
    else:
        train, test = _hold_out(splits[0].examples, task == "squad", limits.max_test_examples)
    random.Random(_SPLIT_SEED).shuffle(train)
    return train[: limits.max_train_examples], test[: limits.max_test_examples], issue_counts


def _load_splits(task: str, source: str, **options: Any) -> list[TaskDataset]:
    """Load the training and validation splits; a single dataset if the source has only one."""
    if is_hub_source(source) or Path(source).is_dir():
        splits = []
        for split in ("train", "validation"):
            try:
                splits.append(tasks.load(task, source, split=split, **options))
            except InputError as error:
                if error.code != "split-not-found":
                    raise
        if splits:
            return splits[:1] if any(split.undivided for split in splits) else splits
    return [tasks.load(task, source, **options)]


def _hold_out(
    examples: Sequence[Example], keep_order: bool, max_test_examples: int
) -> tuple[list[Example], list[Example]]:
    """Split off test examples. `keep_order` takes the last ones, so that few articles are in both splits."""
    examples = list(examples)
    n_test = round(TEST_FRACTION * len(examples))
    if not keep_order:
        random.Random(_SPLIT_SEED).shuffle(examples)
        n_test = max(1, min(max_test_examples, n_test))
    n_train = len(examples) - n_test
    test = examples[n_train:]
    random.Random(_SPLIT_SEED).shuffle(test)
    return examples[:n_train], test


def _drop_unlabeled(examples: Sequence[Example], issue_counts: Counter[str], split: str) -> list[Example]:
    labeled = [example for example in examples if example.label is not None]
    issue_counts[f"unlabeled {split} examples dropped"] += len(examples) - len(labeled)
    if not labeled:
        raise InputError(
            f"no {split} example has a label: a study needs labels for training and test", code="no-labels"
        )
    return labeled


@dataclass(frozen=True)
class _Tokenizer:
    encode: Callable[[str], tuple[list[int], list[Span]]]  # text → token ids, character offsets
    vocab_size: int
    eos_token_id: int = 0
    token_texts: list[str] = field(default_factory=list)


def _build_tokenizer(spec: str, train: Sequence[Example]) -> _Tokenizer:
    """Train a BPE tokenizer (`bpe:SIZE`), or collect the words that occur more than once (`words`)."""
    size = bpe_vocab_size(spec)
    if size is not None:
        return _with_offsets(train_bpe((example.text for example in train), size))
    counts = Counter(
        word for example in train for word in f"{example.text} {example.text_pair or ''}".lower().split()
    )
    words = [word for word, count in sorted(counts.items()) if count > 1]
    word_ids = {word: token for token, word in enumerate(words, start=UNK_TOKEN_ID + 1)}

    def encode_words(text: str) -> tuple[list[int], list[Span]]:
        spans = word_spans(text)
        return [word_ids.get(text[start:end].lower(), UNK_TOKEN_ID) for start, end in spans], spans

    return _Tokenizer(encode_words, len(words) + UNK_TOKEN_ID + 1)


def _pretrained_tokenizer(folder: str) -> _Tokenizer:
    tokenizer = load_model_tokenizer(folder)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise InputError(
            f"--pretrained {folder} has a tokenizer of bytes, without the offsets that rationales need: "
            "train a model with --tokenizer bpe:SIZE",
            code="tokenizer-without-offsets",
        )
    return _with_offsets(tokenizer)


def _with_offsets(bpe: HuggingFaceTokenizer) -> _Tokenizer:
    def encode(text: str) -> tuple[list[int], list[Span]]:
        encoding = bpe.backend_tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    token_texts = [bpe.decode([token]) for token in range(bpe.vocab_size)]
    return _Tokenizer(encode, bpe.vocab_size, bpe.eos_token_id, token_texts)


@dataclass
class _ExampleEncoder:
    tokenizer: _Tokenizer
    classes: list[str]
    recipe: Recipe
    issue_counts: Counter[str]

    def encode_all(self, examples: Sequence[Example]) -> list[EncodedExample]:
        encode = self._encode_answer if self.recipe.generates_answer else self._encode_class
        encoded = [result for example in examples if (result := encode(example)) is not None]
        if not encoded:
            raise InputError(
                f"every example is longer than the {self.recipe.max_length} tokens of the recipe",
                code="examples-too-long",
            )
        return encoded

    def _encode_text(self, example: Example) -> tuple[list[int], list[list[bool]]]:
        text = example.text if example.text_pair is None else f"{example.text} </s> {example.text_pair}"
        ids, offsets = self.tokenizer.encode(text)
        return ids, [token_mask(offsets, spans) for spans in example.rationales]

    def _encode_answer(self, example: Example) -> EncodedExample | None:
        """Encode text and answer. A text that is too long is dropped: truncated, it would lose its prompt."""
        ids, masks = self._encode_text(example)
        answer_ids = [*self.tokenizer.encode(f" {example.label}")[0], self.tokenizer.eos_token_id]
        if len(ids) + len(answer_ids) > self.recipe.max_length:
            self.issue_counts["examples dropped: longer than the model reads"] += 1
            return None
        references = [str(answer) for answer in example.metadata.get("answers", [example.label])]
        return EncodedExample(
            example.name, ids, answer_ids=answer_ids, rationales=masks, reference_answers=references
        )

    def _encode_class(self, example: Example) -> EncodedExample | None:
        if str(example.label) not in self.classes:
            self.issue_counts["test examples dropped: of a class not in training"] += 1
            return None
        ids, masks = self._encode_text(example)
        max_length = self.recipe.max_length
        self.issue_counts["examples truncated"] += len(ids) > max_length
        label = self.classes.index(str(example.label))
        return EncodedExample(
            example.name, ids[:max_length], label, rationales=[mask[:max_length] for mask in masks]
        )
