"""SQuAD (Rajpurkar et al. 2016, 2018): questions answered by a span of a paragraph; v1.1 and v2.0 JSON files.

The text is a prompt "Q: … C: … A:", as in Vashisht & Ramaswamy (ICML 2026). The label is the answer, and the
rationale its span in the context.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qkflow.data.splits import normalize_split
from qkflow.data.tasks.examples import (
    Example,
    Span,
    TaskDataset,
    find_file,
    hub_rows,
    is_hub_source,
    read_json,
)
from qkflow.errors import InputError

_FILES = {
    "train": ("train-v1.1.json", "train-v2.0.json"),
    "validation": ("dev-v1.1.json", "dev-v2.0.json"),
}


def load(
    source: str | Path,
    split: str = "validation",
    window: int | None = None,
    relocate: bool = False,
    keep_impossible: bool = False,
    shift_window: bool = False,
) -> TaskDataset:
    """Load the questions of a SQuAD file, folder, or hub dataset (`hf`, `hf:rajpurkar/squad_v2`).

    An answer that is not at its `answer_start` is searched in the context, nearest first, and dropped if it
    does not occur; both are counted.

    window           cut the context to this many characters on either side of the answer (published: 200)
    shift_window     shift each window at random; otherwise the answer is always in the middle
    relocate         for files with unreliable offsets: move an answer that occurs several times to where it
                     overlaps most of the other annotators' answers
    keep_impossible  keep the unanswerable questions of v2.0, with an empty answer
    """
    split = normalize_split(split)
    if is_hub_source(source):
        rows = list(_hub_questions(hub_rows(str(source), "rajpurkar/squad", split)))
    elif split not in _FILES:
        raise InputError(
            f"SQuAD has no public {split} split: use train or validation", code="split-not-found"
        )
    else:
        rows = list(_file_questions(find_file(Path(source), _FILES[split], f"SQuAD {split} file")))
    issue_counts: Counter[str] = Counter()
    examples = [
        example
        for name, question, context, answers in rows
        if (
            example := _build_example(
                name,
                question,
                context,
                answers,
                (window, shift_window),
                relocate,
                keep_impossible,
                issue_counts,
            )
        )
    ]
    return TaskDataset(examples, issue_counts)


SquadRow = tuple[str, str, str, list[tuple[str, int]]]  # name, question, context, [(answer, start)]


def _file_questions(path: Path) -> Iterator[SquadRow]:
    try:
        for article in read_json(path)["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    answers = [] if qa.get("is_impossible") else qa["answers"]
                    starts = [(answer["text"], int(answer["answer_start"])) for answer in answers]
                    yield str(qa["id"]), qa["question"], paragraph["context"], starts
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} has not the layout of SQuAD (data, paragraphs, qas): {error!r}",
            code="unknown-squad-layout",
        ) from None


def _hub_questions(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[SquadRow]:
    for name, row in rows:
        starts = list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True))
        yield str(row.get("id", name)), row["question"], row["context"], starts


def _build_example(
    name: str,
    question: str,
    context: str,
    answers: list[tuple[str, int]],
    window: tuple[int | None, bool],
    relocate: bool,
    keep_impossible: bool,
    issue_counts: Counter[str],
) -> Example | None:
    if not answers:
        issue_counts["impossible questions " + ("kept" if keep_impossible else "dropped")] += 1
        return Example(name, _format_prompt(question, context)[0], "") if keep_impossible else None
    located = [_locate_answer(context, *answer, issue_counts) for answer in answers]
    spans = [span for span in located if span is not None]
    if not spans:
        issue_counts["questions dropped: no answer is in the context"] += 1
        return None
    if relocate:
        spans = [_relocate_answer(context, span, spans, issue_counts) for span in spans]
    start, end = spans[0]
    low, high = _context_bounds(name, context, (start, end), *window)
    text, offset = _format_prompt(question, context[low:high])
    shift = offset - low
    metadata = {"answers": list(dict.fromkeys(answer for answer, _ in answers)), "question": question}
    return Example(
        name, text, context[start:end], rationales=(((start + shift, end + shift),),), metadata=metadata
    )


def _context_bounds(name: str, context: str, answer: Span, window: int | None, shift_window: bool) -> Span:
    """Return the part of the context to keep: all, or `window` characters on either side of the answer."""
    if window is None:
        return 0, len(context)
    start, end = answer
    before = random.Random(name).randint(0, 2 * window) if shift_window else window
    low, high = start - before, end + 2 * window - before
    if shift_window:  # move the window inside the context: its size must not reveal the answer's position
        low, high = low - max(0, high - len(context)), high - min(0, low)
    return max(0, low), min(len(context), high)


def _format_prompt(question: str, context: str) -> tuple[str, int]:
    """Return the prompt and the offset of the context in it."""
    head = f"Q: {question} C: "
    return f"{head}{context} A:", len(head)


def _locate_answer(context: str, answer: str, start: int, issue_counts: Counter[str]) -> Span | None:
    if answer and context[start : start + len(answer)] == answer and start >= 0:
        return start, start + len(answer)
    occurrences = _occurrences(context, answer)
    if not occurrences:
        issue_counts["answers dropped: not in the context"] += 1
        return None
    issue_counts["answers found at another offset"] += 1
    return min(occurrences, key=lambda span: abs(span[0] - start))


def _relocate_answer(
    context: str, answer_span: Span, answer_spans: list[Span], issue_counts: Counter[str]
) -> Span:
    """Return the occurrence of an answer that overlaps most of the other answers; on a tie, `answer_span`."""
    others = [span for span in answer_spans if span != answer_span]  # equal spans are no evidence

    def n_overlaps(span: Span) -> int:
        return sum(span[0] < high and low < span[1] for low, high in others)

    best = max([answer_span, *_occurrences(context, context[slice(*answer_span)])], key=n_overlaps)
    if best != answer_span:
        issue_counts["answers moved to where annotators agree"] += 1
    return best


def _occurrences(context: str, answer: str) -> list[Span]:
    spans: list[Span] = []
    start = context.find(answer) if answer else -1
    while start >= 0:
        spans.append((start, start + len(answer)))
        start = context.find(answer, start + 1)
    return spans
