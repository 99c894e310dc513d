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
from qkflow.data.tasks.examples import Example, Loaded, Span, from_hub, token_mask, word_spans
from qkflow.data.tokenizer import size_to_train, train_bpe
from qkflow.errors import InputError
from qkflow.files import write_atomic
from qkflow.studies.pace.recipes import Recipe

UNKNOWN = 1  # 0 pads
HELD_OUT = 0.1  # share of a set that comes without a test split
_SPLIT_SEED = 20_260_808
Encode = Callable[[str], tuple[list[int], list[Span]]]


@dataclass(frozen=True)
class Item:
    """A text as ids; its class, or the ids of its answer; per annotator which tokens they marked."""

    name: str
    ids: list[int]
    label: int = -1
    answer: list[int] = field(default_factory=list)
    rationales: list[list[bool]] = field(default_factory=list)
    truth: list[str] = field(default_factory=list)  # the answers that count as right

    @property
    def marked(self) -> bool:
        return any(any(marks) for marks in self.rationales)


@dataclass(frozen=True)
class TaskData:
    """What every run of a study reads."""

    classes: list[str]  # none where texts are answered
    vocabulary: int
    end: int  # the token that ends an answer
    train: list[Item]
    test: list[Item]
    pieces: list[str]  # the text of every token, to write answers with
    annotators: int  # of a text, the most there are
    notes: dict[str, int]

    @property
    def mean_length(self) -> int:
        return max(1, round(sum(len(each.ids) + len(each.answer) for each in self.train) / len(self.train)))

    def majority(self) -> float | None:
        """How often always guessing the commonest class is right on the test texts."""
        if not self.classes:
            return None
        ((guess, _),) = Counter(item.label for item in self.train).most_common(1)
        return sum(item.label == guess for item in self.test) / len(self.test)

    def dump(self) -> bytes:
        plain = {
            **self.__dict__,
            "train": [_row(x) for x in self.train],
            "test": [_row(x) for x in self.test],
        }
        return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()


def _row(item: Item) -> list[Any]:
    marks = [[place for place, marked in enumerate(each) if marked] for each in item.rationales]
    return [item.name, item.ids, item.label, item.answer, marks, item.truth]


def _item(row: list[Any]) -> Item:
    name, ids, label, answer, marks, truth = row
    masks = [[place in set(each) for place in range(len(ids))] for each in marks]
    return Item(name, ids, label, answer, masks, truth)


def save(data: TaskData, folder: Path) -> str:
    """Write the data if it is not there; the name of its file, which tells its content."""
    content = data.dump()
    name = f"data-{hashlib.sha256(content).hexdigest()[:12]}.json"
    if not (folder / name).is_file():
        write_atomic(folder / name, content)
    return name


def load(path: Path) -> TaskData:
    values = json.loads(path.read_text("utf-8"))
    for name in ("train", "test"):
        values[name] = [_item(row) for row in values[name]]
    return TaskData(**values)


@dataclass(frozen=True)
class Wanted:
    """Which texts, and how many of them."""

    as_published: bool = False
    examples: int | None = None  # most training texts
    test: int = 1000  # most test texts
    window: int = 200  # of SQuAD: characters of context either side of an answer

    @classmethod
    def of(cls, settings: Any) -> Wanted:
        return cls(settings.as_published, settings.examples, settings.test, settings.window)


def prepare(task: str, source: str, recipe: Recipe, wanted: Wanted) -> TaskData:
    """Read a task, hold texts out where it has no test split, and encode it."""
    training, testing, notes = _split(task, source, wanted)
    kept, held = (
        _labelled(each, notes, where) for each, where in ((training, "training"), (testing, "test"))
    )
    repeated = {each.text for each in kept}
    fresh = [each for each in held if each.text not in repeated]
    notes["test texts dropped: also in training"] += len(held) - len(fresh)
    if not fresh:
        raise InputError(f"no text of {source} is left to test on: give more examples")
    encode, vocabulary, end, pieces = _tokenizer(recipe.tokenizer, kept)
    classes = [] if recipe.answers else sorted({str(each.label) for each in kept})
    if not recipe.answers and len(classes) < 2:
        raise InputError(f"{source} has one class only ({', '.join(classes)}): there is nothing to learn")
    encoder = _Encoder(encode, classes, end, recipe, notes)
    items = {name: encoder.all(part) for name, part in (("train", kept), ("test", fresh))}
    notes["test texts without a rationale"] += sum(not item.marked for item in items["test"])
    annotators = max((int(each.facts.get("annotators", 1)) for each in fresh), default=1)
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


def _split(task: str, source: str, wanted: Wanted) -> tuple[list[Example], list[Example], Counter[str]]:
    """Training and test examples, and what their loaders had to say."""
    notes: Counter[str] = Counter()
    if task == "agreement":
        limit = (wanted.examples or 10_000) + wanted.test if source == "generate" else None
        loaded = [tasks.load(task, source, as_published=wanted.as_published, limit=limit)]
    elif task == "squad":
        loaded = _both(task, source, window=wanted.window, shifted=not wanted.as_published, relocate=True)
    else:
        loaded = _both(task, source)
    for part in loaded:
        notes.update(part.notes)
    if len(loaded) == 2:
        training, testing = loaded[0].examples, loaded[1].examples
        random.Random(_SPLIT_SEED).shuffle(testing)
    else:
        training, testing = _hold_out(loaded[0].examples, keep_order=task == "squad", most=wanted.test)
    random.Random(_SPLIT_SEED).shuffle(training)
    return training[: wanted.examples], testing[: wanted.test], notes


def _both(task: str, source: str, **options: Any) -> list[Loaded]:
    """The training and validation splits; of a single file, or where one is missing, all there is."""
    if from_hub(source) or Path(source).is_dir():
        found = []
        for split in ("train", "validation"):
            try:
                found.append(tasks.load(task, source, split=split, **options))
            except InputError as error:
                if not str(error).startswith("no "):  # only a missing file is no reason to give up
                    raise
        undivided = any("every post taken" in note for part in found for note in part.notes)
        if found:
            return found[:1] if undivided else found
    return [tasks.load(task, source, **options)]


def _hold_out(examples: list[Example], keep_order: bool, most: int) -> tuple[list[Example], list[Example]]:
    """A share for testing; in order, where neighbours tell of each other (questions on one article)."""
    examples = list(examples)
    if not keep_order:
        random.Random(_SPLIT_SEED).shuffle(examples)
    cut = (
        max(1, min(most, round(HELD_OUT * len(examples))))
        if not keep_order
        else round(HELD_OUT * len(examples))
    )
    testing = examples[len(examples) - cut :]
    random.Random(_SPLIT_SEED).shuffle(testing)
    return examples[: len(examples) - cut], testing


def _labelled(examples: Sequence[Example], notes: Counter[str], where: str) -> list[Example]:
    kept = [each for each in examples if each.label is not None]
    notes[f"unlabelled {where} texts dropped"] += len(examples) - len(kept)
    if not kept:
        raise InputError(f"no {where} text has a label: a study needs labels to learn from and to test on")
    return kept


@dataclass
class _Encoder:
    encode: Encode
    classes: list[str]
    end: int
    recipe: Recipe
    notes: Counter[str]

    def all(self, examples: Sequence[Example]) -> list[Item]:
        found = [item for each in examples if (item := self.one(each)) is not None]
        if not found:
            raise InputError(f"every text is longer than {self.recipe.longest} tokens")
        return found

    def one(self, example: Example) -> Item | None:
        text = example.text if example.pair is None else f"{example.text} </s> {example.pair}"
        ids, offsets = self.encode(text)
        masks = [token_mask(offsets, spans) for spans in example.rationales]
        if self.recipe.answers:
            answer = [*self.encode(f" {example.label}")[0], self.end]
            if len(ids) + len(answer) > self.recipe.longest:  # cut short, it would not ask for an answer
                self.notes["texts dropped: longer than the model reads"] += 1
                return None
            truth = [str(each) for each in example.facts.get("answers", [example.label])]
            return Item(example.name, ids, answer=answer, rationales=masks, truth=truth)
        if str(example.label) not in self.classes:
            self.notes["test texts dropped: of a class not in training"] += 1
            return None
        longest = self.recipe.longest
        self.notes["texts cut short"] += len(ids) > longest
        label = self.classes.index(str(example.label))
        return Item(example.name, ids[:longest], label, rationales=[mask[:longest] for mask in masks])


def _tokenizer(spec: str, training: Sequence[Example]) -> tuple[Encode, int, int, list[str]]:
    """How to encode, the vocabulary's size, the token that ends an answer, the text of every token."""
    size = size_to_train(spec)
    if size is not None:
        bpe = train_bpe((each.text for each in training), size)

        def encode_bpe(text: str) -> tuple[list[int], list[Span]]:
            found = bpe.rust.encode(text, add_special_tokens=False)
            return found.ids, found.offsets

        pieces = [bpe.decode([token]) for token in range(bpe.vocab_size)]
        return encode_bpe, bpe.vocab_size, bpe.end_of_document, pieces
    counts = Counter(word for each in training for word in _words(each))
    known = [word for word, count in sorted(counts.items()) if count > 1]
    places = {word: place for place, word in enumerate(known, start=UNKNOWN + 1)}

    def encode_words(text: str) -> tuple[list[int], list[Span]]:
        spans = word_spans(text)
        return [places.get(text[start:end].lower(), UNKNOWN) for start, end in spans], spans

    return encode_words, len(known) + UNKNOWN + 1, 0, []


def _words(example: Example) -> list[str]:
    return f"{example.text} {example.pair or ''}".lower().split()
