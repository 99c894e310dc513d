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
from qkflow.data.tasks.examples import Example, Loaded, find_file, join_words, read_tsv
from qkflow.errors import InputError

LINZEN = "agr_50_mostcommon_10K.tsv"
_NUMBERS = {"VBZ": "SG", "VBP": "PL"}
_NEEDED = ("orig_sentence", "verb_pos", "subj_index", "verb_index")


def load(source: str | Path, as_published: bool = False, limit: int | None = None, seed: int = 0) -> Loaded:
    """Sentences of a TSV file in either layout, or of a folder of them; as source `generate`, 10,000 (or
    `limit`) made by a grammar.

    From Linzen's file: the text ends before the verb, and the rationale is the subject. `as_published`
    follows Vashisht & Ramaswamy (ICML 2026) instead: the whole sentence, verb included, which gives the
    answer away, with both subject and verb as the rationale. Plain prefixes carry no rationale.
    """
    if str(source) == "generate":
        return Loaded(generate(10_000 if limit is None else limit, seed, whole=as_published))
    notes: Counter[str] = Counter()
    examples: list[Example] = []
    for path in _files(Path(source)):
        for example in _read(path, as_published, notes):
            if limit is not None and len(examples) >= limit:
                return Loaded(examples, notes)
            examples.append(example)
    return Loaded(examples, notes)


def _files(source: Path) -> list[Path]:
    """The file itself, Linzen's file of a folder, or every TSV in it."""
    tables = sorted(source.glob("*.tsv")) if source.is_dir() else []
    if tables and not (source / LINZEN).is_file():
        return tables
    return [find_file(source, (LINZEN,), "agreement file")]


def _read(path: Path, as_published: bool, notes: Counter[str]) -> Iterator[Example]:
    _, first = next(read_tsv(path), ("", []))
    if set(_NEEDED) <= set(first):
        return _linzen(path, first, as_published, notes)
    if first and first[0] in ("SG", "PL"):
        return _prefixes(path)
    needed = ", ".join(_NEEDED)
    raise InputError(f"{path} has neither Linzen's header ({needed}) nor lines of SG or PL, verb, sentence")


def _linzen(path: Path, header: list[str], as_published: bool, notes: Counter[str]) -> Iterator[Example]:
    places = {name: header.index(name) for name in _NEEDED}
    attractors = header.index("n_diff_intervening") if "n_diff_intervening" in header else None
    lines = read_tsv(path)
    next(lines)
    for where, cells in lines:
        if len(cells) < len(header):
            notes["lines skipped: too few columns"] += 1
            continue
        words = cells[places["orig_sentence"]].split(" ")
        number = _NUMBERS.get(cells[places["verb_pos"]])
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
            notes["sentences dropped: the subject follows the verb"] += 1
            continue
        text, spans = join_words(words if as_published else words[:verb])
        rationale = tuple(spans[index] for index in sorted({subject, verb} if as_published else {subject}))
        facts: dict[str, object] = {"verb": words[verb]}
        if attractors is not None and cells[attractors].isdigit():
            facts["attractors"] = int(cells[attractors])
        yield Example(where, text, number, rationales=(rationale,), facts=facts)


def _prefixes(path: Path) -> Iterator[Example]:
    """Number, verb, any further columns, and last the sentence up to the verb."""
    for where, cells in read_tsv(path):
        if len(cells) < 3 or cells[0] not in ("SG", "PL") or not cells[-1].strip():
            raise InputError(f"{where} must hold SG or PL, a verb and a sentence, separated by tabs")
        yield Example(where, cells[-1].strip(), cells[0], facts={"verb": cells[1]})
