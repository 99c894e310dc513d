"""SQuAD (Rajpurkar et al. 2016, 2018): questions answered by a span of a paragraph; v1.1 and v2.0 JSON files.

As a text to continue, following Vashisht & Ramaswamy (ICML 2026): "Q: … C: … A:", the label being the answer
and its place in the context the rationale.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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
    """Questions of a SQuAD file, folder, or hub set (`hf`, `hf:rajpurkar/squad_v2`).

    An answer that does not stand at its `answer_start` is sought elsewhere in the context, nearest first; one
    that stands nowhere is dropped; both are counted. `relocate` is for files whose offsets are guesses: an
    answer that occurs several times moves to where it overlaps most of the other annotators' answers.
    `window` cuts the context to that many characters either side of the answer (200 in the published study),
    which puts the answer into its middle and gives its place away; `shifted` moves each window at random.
    `keep_impossible` keeps the unanswerable questions of v2.0, with an empty answer.
    """
    if is_hub_source(source):
        rows = list(_hub_questions(hub_rows(str(source), "rajpurkar/squad", split)))
    else:
        if split not in _FILES:
            raise InputError(f"SQuAD has no public '{split}' split: use train or validation")
        rows = list(_file_questions(find_file(Path(source), _FILES[split], "SQuAD file")))
    notes: Counter[str] = Counter()
    examples = [
        example
        for name, question, context, answers in rows
        if (
            example := _build_example(
                name, question, context, answers, (window, shift_window), relocate, keep_impossible, notes
            )
        )
    ]
    return TaskDataset(examples, notes)


SquadRow = tuple[str, str, str, list[tuple[str, int]]]  # name, question, context, [(answer, start)]


def _file_questions(path: Path) -> Iterator[SquadRow]:
    try:
        for article in read_json(path)["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = [] if asked.get("is_impossible") else asked["answers"]
                    places = [(answer["text"], int(answer["answer_start"])) for answer in answers]
                    yield str(asked["id"]), asked["question"], paragraph["context"], places
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not laid out as SQuAD (data › paragraphs › qas): {error!r}") from None


def _hub_questions(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[SquadRow]:
    for name, row in rows:
        places = list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True))
        yield str(row.get("id", name)), row["question"], row["context"], places


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
    places = [
        place for answer in answers if (place := _locate_answer(context, *answer, issue_counts)) is not None
    ]
    if not places:
        issue_counts["questions dropped: no answer stands in the context"] += 1
        return None
    if relocate:
        places = [_relocate_answer(context, place, places, issue_counts) for place in places]
    start, end = places[0]
    low, high = _context_bounds(name, context, (start, end), *window)
    text, offset = _format_prompt(question, context[low:high])
    shift = offset - low
    texts = list(dict.fromkeys(answer for answer, _ in answers))
    facts = {"answers": texts, "question": question}
    return Example(
        name, text, context[start:end], rationales=(((start + shift, end + shift),),), metadata=facts
    )


def _context_bounds(name: str, context: str, answer: Span, window: int | None, shift_window: bool) -> Span:
    """The part of a context that is shown: all, or `window` characters either side of the answer."""
    if window is None:
        return 0, len(context)
    start, end = answer
    before = random.Random(name).randint(0, 2 * window) if shift_window else window
    low, high = start - before, end + 2 * window - before
    if shift_window:  # as much text as there is, so that the window's size does not tell the answer's place
        low, high = low - max(0, high - len(context)), high - min(0, low)
    return max(0, low), min(len(context), high)


def _format_prompt(question: str, context: str) -> tuple[str, int]:
    """The text, and where the context begins in it."""
    head = f"Q: {question} C: "
    return f"{head}{context} A:", len(head)


def _locate_answer(context: str, answer: str, start: int, issue_counts: Counter[str]) -> Span | None:
    if answer and context[start : start + len(answer)] == answer and start >= 0:
        return start, start + len(answer)
    found = _occurrences(context, answer)
    if not found:
        issue_counts["answers dropped: not in the context"] += 1
        return None
    issue_counts["answers found at another place than given"] += 1
    return min(found, key=lambda span: abs(span[0] - start))


def _relocate_answer(
    context: str, answer_span: Span, answer_spans: list[Span], issue_counts: Counter[str]
) -> Span:
    """The occurrence of an answer that overlaps most of the other places; the given one on a tie."""
    others = [
        each for each in answer_spans if each != answer_span
    ]  # the same guess made twice supports nothing

    def support(span: Span) -> int:
        return sum(span[0] < high and low < span[1] for low, high in others)

    best = max([answer_span, *_occurrences(context, context[slice(*answer_span)])], key=support)
    if best != answer_span:
        issue_counts["answers moved to where the annotators agree"] += 1
    return best


def _occurrences(context: str, answer: str) -> list[Span]:
    spans: list[Span] = []
    start = context.find(answer) if answer else -1
    while start >= 0:
        spans.append((start, start + len(answer)))
        start = context.find(answer, start + 1)
    return spans
