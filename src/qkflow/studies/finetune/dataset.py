"""The examples of a task: loaded and checked first, and encoded with the tokenizer of the models."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from qkflow.data import tasks
from qkflow.data.tasks.examples import Example
from qkflow.data.tasks.glue import GLUE_TASKS
from qkflow.data.tokenizer import Tokenizer
from qkflow.errors import InputError
from qkflow.studies.finetune.config import FinetuneTask
from qkflow.studies.pace.dataset import EncodedExample, TaskData

_SUBSET_SEED = 20_260_808


@dataclass(frozen=True)
class TaskExamples:
    """Labeled training and validation examples of a task."""

    task: FinetuneTask
    train: list[Example]
    validation: list[Example]


def load_task(task: FinetuneTask, source: str, max_train_examples: int | None = None) -> TaskExamples:
    """Load a task from a folder or the hub. `max_train_examples` takes the same random subset for all runs.

    Raise InputError if a file is missing or damaged, or has nothing to train or to evaluate on.
    """
    splits = {}
    for split in ("train", "validation"):
        examples = tasks.load(task.key, source, split=split).examples
        splits[split] = [example for example in examples if example.label is not None]
        if not splits[split]:
            raise InputError(
                f"the {split} split of {task} in {source} has no labeled example: get the original files",
                code="no-labels",
            )
    train = splits["train"]
    if max_train_examples is not None:
        train = random.Random(_SUBSET_SEED).sample(train, min(max_train_examples, len(train)))
    if len({example.label for example in train}) < 2:
        raise InputError(
            f"the training examples of {task} in {source} have a single class: a classifier needs two",
            code="single-class",
        )
    return TaskExamples(task, train, splits["validation"])


def encode_task(examples: TaskExamples, tokenizer: Tokenizer, max_length: int) -> TaskData:
    """Encode the examples of a task for models with this tokenizer, trained on windows of `max_length`."""
    classes = list(GLUE_TASKS[examples.task.key].label_names)
    issue_counts: Counter[str] = Counter()

    def encode_all(split: Sequence[Example]) -> list[EncodedExample]:
        encoded = []
        for example in split:
            ids, is_truncated = encode_example(example, tokenizer, max_length)
            issue_counts["examples truncated"] += is_truncated
            encoded.append(EncodedExample(example.name, ids, classes.index(str(example.label))))
        return encoded

    return TaskData(
        classes=classes,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        train=encode_all(examples.train),
        test=encode_all(examples.validation),
        token_texts=[],
        n_annotators=0,
        issue_counts=dict(issue_counts),
    )


def encode_example(example: Example, tokenizer: Tokenizer, max_length: int) -> tuple[list[int], bool]:
    """Return the token ids of an example, and whether it was truncated.

    Every text is followed by the end-of-text token, which also separates the texts of a pair; the last one is
    where the class is predicted. As a document in pretraining, the first text follows this token too. The
    longest text loses its last tokens until all fit, as with `truncation="longest_first"` in transformers.
    """
    end = tokenizer.eos_token_id
    texts = [tokenizer.encode_with_bos(example.text)]
    if example.text_pair is not None:
        texts.append(tokenizer.encode(example.text_pair))
    excess = sum(map(len, texts)) + len(texts) - max_length
    for _ in range(excess):
        max(texts, key=len).pop()
    return [token for text in texts for token in (*text, end)], excess > 0
