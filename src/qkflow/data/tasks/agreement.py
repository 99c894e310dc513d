"""Subject–verb agreement: is the verb to come singular or plural?

Three sources: the dependency set of Linzen, Dupoux & Goldberg (2016), a TSV with the positions of subject and
verb; plain prefixes, a TSV of number, verb and the sentence up to the verb; and `agreement_grammar`, which
makes sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from qkflow.data.tasks.agreement_grammar import generate
from qkflow.data.tasks.examples import Example, TaskDataset, find_file, join_words, read_tsv
from qkflow.errors import InputError

LINZEN_FILE_NAME = "agr_50_mostcommon_10K.tsv"
_NUMBER_BY_TAG = {"VBZ": "SG", "VBP": "PL"}
_REQUIRED_COLUMNS = ("orig_sentence", "verb_pos", "subj_index", "verb_index")


def load(
    source: str | Path, as_published: bool = False, limit: int | None = None, seed: int = 0
) -> TaskDataset:
    """Sentences of a TSV file in either layout, or of a folder of them; as source `generate`, 10,000 (or
    `limit`) made by a grammar.

    From Linzen's file: the text ends before the verb, and the rationale is the subject. `as_published`
    follows Vashisht & Ramaswamy (ICML 2026) instead: the whole sentence, verb included, which gives the
    answer away, with both subject and verb as the rationale. Plain prefixes carry no rationale.
    """
    if str(source) == "generate":
        return TaskDataset(generate(10_000 if limit is None else limit, seed, full_sentence=as_published))
    notes: Counter[str] = Counter()
    examples: list[Example] = []
    for path in _tsv_files(Path(source)):
        for example in _read_examples(path, as_published, notes):
            if limit is not None and len(examples) >= limit:
                return TaskDataset(examples, notes)
            examples.append(example)
    return TaskDataset(examples, notes)


def _tsv_files(source: Path) -> list[Path]:
    """The file itself, Linzen's file of a folder, or every TSV in it."""
    tables = sorted(source.glob("*.tsv")) if source.is_dir() else []
    if tables and not (source / LINZEN_FILE_NAME).is_file():
        return tables
    return [find_file(source, (LINZEN_FILE_NAME,), "agreement file")]


def _read_examples(path: Path, as_published: bool, issue_counts: Counter[str]) -> Iterator[Example]:
    _, first = next(read_tsv(path), ("", []))
    if set(_REQUIRED_COLUMNS) <= set(first):
        return _read_linzen(path, first, as_published, issue_counts)
    if first and first[0] in ("SG", "PL"):
        return _read_prefixes(path)
    needed = ", ".join(_REQUIRED_COLUMNS)
    raise InputError(f"{path} has neither Linzen's header ({needed}) nor lines of SG or PL, verb, sentence")


def _read_linzen(
    path: Path, header: list[str], as_published: bool, issue_counts: Counter[str]
) -> Iterator[Example]:
    places = {name: header.index(name) for name in _REQUIRED_COLUMNS}
    attractors = header.index("n_diff_intervening") if "n_diff_intervening" in header else None
    lines = read_tsv(path)
    next(lines)
    for where, cells in lines:
        if len(cells) < len(header):
            issue_counts["lines skipped: too few columns"] += 1
            continue
        words = cells[places["orig_sentence"]].split(" ")
        number = _NUMBER_BY_TAG.get(cells[places["verb_pos"]])
        if number is None:
            raise InputError(f"{where}: verb_pos is VBZ or VBP, not '{cells[places['verb_pos']]}'")
        try:
            subject, verb = (int(cells[places[name]]) - 1 for name in ("subj_index", "verb_index"))
        except ValueError:
            raise InputError(f"{where}: subj_index and verb_index must be whole numbers") from None
        if not 0 <= subject < len(words) or not 0 <= verb < len(words) or subject == verb:
            raise InputError(
                f"{where}: subject {subject + 1} and verb {verb + 1} do not fit {len(words)} words"
            )
        if not as_published and subject > verb:
            issue_counts["sentences dropped: the subject follows the verb"] += 1
            continue
        text, spans = join_words(words if as_published else words[:verb])
        rationale = tuple(spans[index] for index in sorted({subject, verb} if as_published else {subject}))
        facts: dict[str, object] = {"verb": words[verb]}
        if attractors is not None and cells[attractors].isdigit():
            facts["attractors"] = int(cells[attractors])
        yield Example(where, text, number, rationales=(rationale,), metadata=facts)


def _read_prefixes(path: Path) -> Iterator[Example]:
    """Number, verb, any further columns, and last the sentence up to the verb."""
    for where, cells in read_tsv(path):
        if len(cells) < 3 or cells[0] not in ("SG", "PL") or not cells[-1].strip():
            raise InputError(f"{where} must hold SG or PL, a verb and a sentence, separated by tabs")
        yield Example(where, cells[-1].strip(), cells[0], metadata={"verb": cells[1]})
