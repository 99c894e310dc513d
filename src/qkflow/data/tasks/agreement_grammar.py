"""Generate agreement sentences with known positions of subject, attractors and verb.

    sentence   →  [opening ,] the [adjective] SUBJECT modifier* VERB rest
    modifier   →  preposition the [adjective] NOUN  |  that the NOUN liked  |  who saw the NOUN

An attractor is a noun of the other number between subject and verb: "the key to the cabinets". The verb's
number depends on the subject alone.
"""

from __future__ import annotations

import random

from qkflow.data.tasks.examples import Example, join_words
from qkflow.errors import InputError

_NOUNS = (
    "key keys|cabinet cabinets|report reports|author authors|senator senators|pilot pilots|farmer farmers|"
    "teacher teachers|dog dogs|house houses|painting paintings|letter letters|engine engines|bridge bridges|"
    "river rivers|doctor doctors|child children|woman women|man men|mouse mice|city cities|story stories|"
    "book books|garden gardens|window windows|guard guards|student students|judge judges|actor actors|"
    "violin violins|machine machines|ship ships|tower towers|customer customers|player players|clerk clerks"
)
NOUNS = tuple(tuple(pair.split()) for pair in _NOUNS.split("|"))  # (singular, plural)
VERBS = (("is", "are"), ("was", "were"), ("has", "have"), ("seems", "seem"), ("remains", "remain"))
_ADJECTIVES = "old new small large red famous quiet broken young local strange heavy".split()  # noqa: SIM905
_PREPOSITIONS = "near behind beside to from with of above".split()  # noqa: SIM905
_PAST_VERBS = "liked saw feared admired knew praised visited followed".split()  # noqa: SIM905
_OPENINGS = ("yesterday", "in the end", "last year", "according to the news", "as we all know")
_ENDINGS = ("very old .", "in the city .", "well known today .", "here again .", "not what it was .")


def generate(
    n_examples: int,
    seed: int = 0,
    max_modifiers: int = 2,
    attractor_prob: float = 0.5,
    full_sentence: bool = False,
) -> list[Example]:
    """Generate sentences, half singular and half plural, up to the verb or, if `full_sentence`, to the end.

    Each has 0…`max_modifiers` modifiers; the noun of a modifier is an attractor with probability
    `attractor_prob`. The rationale is the subject (`full_sentence`: subject and verb). The metadata are
    subject, verb, subject_index, verb_index, attractors and nouns_between.
    """
    if n_examples < 1 or max_modifiers < 0 or not 0 <= attractor_prob <= 1:
        raise InputError(
            "n_examples must be at least 1, max_modifiers at least 0 and attractor_prob between 0 and 1, not "
            f"{n_examples}, {max_modifiers} and {attractor_prob}",
            code="option-out-of-range",
        )
    rng = random.Random(seed)
    plurals = [index % 2 == 1 for index in range(n_examples)]
    rng.shuffle(plurals)
    return [
        _generate_sentence(rng, f"sentence {index}", plural, max_modifiers, attractor_prob, full_sentence)
        for index, plural in enumerate(plurals)
    ]


def _generate_sentence(
    rng: random.Random,
    name: str,
    plural: bool,
    max_modifiers: int,
    attractor_prob: float,
    full_sentence: bool,
) -> Example:
    words: list[str] = []
    if rng.random() < 0.3:
        words += [*rng.choice(_OPENINGS).split(), ","]
    words += _noun_phrase(rng, plural)
    subject = len(words) - 1
    n_modifiers = rng.randint(0, max_modifiers)
    n_attractors = 0
    for _ in range(n_modifiers):
        is_attractor = rng.random() < attractor_prob
        n_attractors += is_attractor
        words += _modifier(rng, plural != is_attractor)
    verb, verb_index = rng.choice(VERBS)[plural], len(words)
    metadata = {
        "subject": words[subject],
        "verb": verb,
        "subject_index": subject,
        "verb_index": verb_index,
        "attractors": n_attractors,
        "nouns_between": n_modifiers,
    }
    if full_sentence:
        words += [verb, *rng.choice(_ENDINGS).split()]
    text, spans = join_words(words)
    rationale = (spans[subject], spans[verb_index]) if full_sentence else (spans[subject],)
    return Example(name, text, "PL" if plural else "SG", rationales=(rationale,), metadata=metadata)


def _noun_phrase(rng: random.Random, plural: bool) -> list[str]:
    adjective = [rng.choice(_ADJECTIVES)] if rng.random() < 0.3 else []
    return ["the", *adjective, rng.choice(NOUNS)[plural]]


def _modifier(rng: random.Random, plural: bool) -> list[str]:
    phrase = _noun_phrase(rng, plural)
    shape = rng.random()
    if shape < 0.6:
        return [rng.choice(_PREPOSITIONS), *phrase]
    if shape < 0.8:
        return ["that", *phrase, rng.choice(_PAST_VERBS)]
    return ["that", rng.choice(_PAST_VERBS), *phrase]
