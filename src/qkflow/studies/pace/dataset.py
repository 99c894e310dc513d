"""A task's examples as token ids, for all runs of a study: made once, kept in one file of its folder."""

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
from qkflow.data.tokenizer import bpe_vocab_size, train_bpe
from qkflow.errors import InputError
from qkflow.files import write_atomic
from qkflow.studies.pace.recipes import Recipe

UNK_TOKEN_ID = 1  # 0 pads
TEST_FRACTION = 0.1  # share of a set that comes without a test split
_SPLIT_SEED = 20_260_808
EncodeFn = Callable[[str], tuple[list[int], list[Span]]]


@dataclass(frozen=True)
class EncodedExample:
    """A text as ids; its class, or the ids of its answer; per annotator which tokens they marked."""

    name: str
    ids: list[int]
    label: int = -1
    answer_ids: list[int] = field(default_factory=list)
    rationales: list[list[bool]] = field(default_factory=list)
    reference_answers: list[str] = field(default_factory=list)  # the answers that count as right

    @property
    def has_rationale(self) -> bool:
        return any(any(marks) for marks in self.rationales)


@dataclass(frozen=True)
class TaskData:
    """What every run of a study reads."""

    classes: list[str]  # none where texts are answered
    vocab_size: int
    eos_token_id: int  # the token that ends an answer
    train: list[EncodedExample]
    test: list[EncodedExample]
    token_texts: list[str]  # the text of every token, to write answers with
    n_annotators: int  # of a text, the most there are
    issue_counts: dict[str, int]

    @property
    def mean_length(self) -> int:
        return max(
            1, round(sum(len(each.ids) + len(each.answer_ids) for each in self.train) / len(self.train))
        )

    def majority_accuracy(self) -> float | None:
        """How often always guessing the commonest class is right on the test texts."""
        if not self.classes:
            return None
        ((guess, _),) = Counter(item.label for item in self.train).most_common(1)
        return sum(item.label == guess for item in self.test) / len(self.test)

    def dump(self) -> bytes:
        plain = {
            **self.__dict__,
            "train": [_to_row(x) for x in self.train],
            "test": [_to_row(x) for x in self.test],
        }
        return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()


def _to_row(example: EncodedExample) -> list[Any]:
    marks = [[place for place, marked in enumerate(each) if marked] for each in example.rationales]
    return [example.name, example.ids, example.label, example.answer_ids, marks, example.reference_answers]


def _from_row(row: list[Any]) -> EncodedExample:
    name, ids, label, answer, marks, truth = row
    masks = [[place in set(each) for place in range(len(ids))] for each in marks]
    return EncodedExample(name, ids, label, answer, masks, truth)


def save_task_data(data: TaskData, folder: Path) -> str:
    """Write the data if it is not there; the name of its file, which tells its content."""
    content = data.dump()
    name = f"data-{hashlib.sha256(content).hexdigest()[:12]}.json"
    if not (folder / name).is_file():
        write_atomic(folder / name, content)
    return name


def load_task_data(path: Path) -> TaskData:
    values = json.loads(path.read_text("utf-8"))
    for name in ("train", "test"):
        values[name] = [_from_row(row) for row in values[name]]
    return TaskData(**values)


@dataclass(frozen=True)
class DataLimits:
    """Which texts, and how many of them."""

    as_published: bool = False
    max_train_examples: int | None = None  # most training texts
    max_test_examples: int = 1000  # most test texts
    window: int = 200  # of SQuAD: characters of context either side of an answer

    @classmethod
    def from_config(cls, config: Any) -> DataLimits:
        return cls(config.as_published, config.examples, config.test, config.window)


def prepare_task_data(task: str, source: str, recipe: Recipe, limits: DataLimits) -> TaskData:
    """Read a task, hold texts out where it has no test split, and encode it."""
    training, testing, notes = _load_train_test(task, source, limits)
    kept, held = (
        _drop_unlabelled(each, notes, where) for each, where in ((training, "training"), (testing, "test"))
    )
    repeated = {each.text for each in kept}
    fresh = [each for each in held if each.text not in repeated]
    notes["test texts dropped: also in training"] += len(held) - len(fresh)
    if not fresh:
        raise InputError(f"no text of {source} is left to test on: give more examples")
    encode, vocabulary, end, pieces = _build_tokenizer(recipe.tokenizer, kept)
    classes = [] if recipe.generates_answer else sorted({str(each.label) for each in kept})
    if not recipe.generates_answer and len(classes) < 2:
        raise InputError(f"{source} has one class only ({', '.join(classes)}): there is nothing to learn")
    encoder = _ExampleEncoder(encode, classes, end, recipe, notes)
    items = {name: encoder.encode_all(part) for name, part in (("train", kept), ("test", fresh))}
    notes["test texts without a rationale"] += sum(not item.has_rationale for item in items["test"])
    annotators = max((int(each.metadata.get("annotators", 1)) for each in fresh), default=1)
    return TaskData(
        classes,
        vocabulary,
        end,
        items["train"],
        items["test"],
        pieces,
        annotators,
        dict(sorted(notes.items())),
    )


def _load_train_test(
    task: str, source: str, limits: DataLimits
) -> tuple[list[Example], list[Example], Counter[str]]:
    """Training and test examples, and what their loaders had to say."""
    notes: Counter[str] = Counter()
    if task == "agreement":
        limit = (
            (limits.max_train_examples or 10_000) + limits.max_test_examples if source == "generate" else None
        )
        loaded = [tasks.load(task, source, as_published=limits.as_published, limit=limit)]
    elif task == "squad":
        loaded = _load_splits(
            task, source, window=limits.window, shift_window=not limits.as_published, relocate=True
        )
    else:
        loaded = _load_splits(task, source)
    for part in loaded:
        notes.update(part.issue_counts)
    if len(loaded) == 2:
        training, testing = loaded[0].examples, loaded[1].examples
        random.Random(_SPLIT_SEED).shuffle(testing)
    else:
        training, testing = _hold_out(
            loaded[0].examples, keep_order=task == "squad", max_test_examples=limits.max_test_examples
        )
    random.Random(_SPLIT_SEED).shuffle(training)
    return training[: limits.max_train_examples], testing[: limits.max_test_examples], notes


def _load_splits(task: str, source: str, **options: Any) -> list[TaskDataset]:
    """The training and validation splits; of a single file, or where one is missing, all there is."""
    if is_hub_source(source) or Path(source).is_dir():
        found = []
        for split in ("train", "validation"):
            try:
                found.append(tasks.load(task, source, split=split, **options))
            except InputError as error:
                if error.code != "split-not-found":
                    raise
        if found:
            return found[:1] if any(part.undivided for part in found) else found
    return [tasks.load(task, source, **options)]


def _hold_out(
    examples: list[Example], keep_order: bool, max_test_examples: int
) -> tuple[list[Example], list[Example]]:
    """A share for testing; in order, where neighbours tell of each other (questions on one article)."""
    examples = list(examples)
    if not keep_order:
        random.Random(_SPLIT_SEED).shuffle(examples)
    cut = (
        max(1, min(max_test_examples, round(TEST_FRACTION * len(examples))))
        if not keep_order
        else round(TEST_FRACTION * len(examples))
    )
    testing = examples[len(examples) - cut :]
    random.Random(_SPLIT_SEED).shuffle(testing)
    return examples[: len(examples) - cut], testing


def _drop_unlabelled(examples: Sequence[Example], issue_counts: Counter[str], split: str) -> list[Example]:
    kept = [each for each in examples if each.label is not None]
    issue_counts[f"unlabelled {split} texts dropped"] += len(examples) - len(kept)
    if not kept:
        raise InputError(f"no {split} text has a label: a study needs labels to learn from and to test on")
    return kept


@dataclass
class _ExampleEncoder:
    encode: EncodeFn
    classes: list[str]
    eos_token_id: int
    recipe: Recipe
    issue_counts: Counter[str]

    def encode_all(self, examples: Sequence[Example]) -> list[EncodedExample]:
        found = [item for each in examples if (item := self.encode_example(each)) is not None]
        if not found:
            raise InputError(f"every text is longer than {self.recipe.max_length} tokens")
        return found

    def encode_example(self, example: Example) -> EncodedExample | None:
        text = example.text if example.text_pair is None else f"{example.text} </s> {example.text_pair}"
        ids, offsets = self.encode(text)
        masks = [token_mask(offsets, spans) for spans in example.rationales]
        if self.recipe.generates_answer:
            answer = [*self.encode(f" {example.label}")[0], self.eos_token_id]
            if len(ids) + len(answer) > self.recipe.max_length:  # cut short, it would not ask for an answer
                self.issue_counts["texts dropped: longer than the model reads"] += 1
                return None
            truth = [str(each) for each in example.metadata.get("answers", [example.label])]
            return EncodedExample(
                example.name, ids, answer_ids=answer, rationales=masks, reference_answers=truth
            )
        if str(example.label) not in self.classes:
            self.issue_counts["test texts dropped: of a class not in training"] += 1
            return None
        longest = self.recipe.max_length
        self.issue_counts["texts cut short"] += len(ids) > longest
        label = self.classes.index(str(example.label))
        return EncodedExample(
            example.name, ids[:longest], label, rationales=[mask[:longest] for mask in masks]
        )


def _build_tokenizer(spec: str, training: Sequence[Example]) -> tuple[EncodeFn, int, int, list[str]]:
    """How to encode, the vocabulary's size, the token that ends an answer, the text of every token."""
    size = bpe_vocab_size(spec)
    if size is not None:
        bpe = train_bpe((each.text for each in training), size)

        def encode_bpe(text: str) -> tuple[list[int], list[Span]]:
            found = bpe.backend_tokenizer.encode(text, add_special_tokens=False)
            return found.ids, found.offsets

        pieces = [bpe.decode([token]) for token in range(bpe.vocab_size)]
        return encode_bpe, bpe.vocab_size, bpe.eos_token_id, pieces
    counts = Counter(word for each in training for word in _split_words(each))
    known = [word for word, count in sorted(counts.items()) if count > 1]
    places = {word: place for place, word in enumerate(known, start=UNK_TOKEN_ID + 1)}

    def encode_words(text: str) -> tuple[list[int], list[Span]]:
        spans = word_spans(text)
        return [places.get(text[start:end].lower(), UNK_TOKEN_ID) for start, end in spans], spans

    return encode_words, len(known) + UNK_TOKEN_ID + 1, 0, []


def _split_words(example: Example) -> list[str]:
    return f"{example.text} {example.text_pair or ''}".lower().split()
