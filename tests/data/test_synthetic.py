"""The synthetic corpora: reproducible text, and options that do what they promise."""

from __future__ import annotations

from collections import Counter

from input_errors import raises_code
from qkflow.data.synthetic import parse_options, word_for_rank

PATTERNS_OF_SEED_7 = [
    "geba lafo fe gu kaba. da niba kubo vibo nu gu ba.\n",
    "be diba kubi ga zuba bi pi du zibu bebi ruba gi.\n",
    "li fogi zubi podi fugu rifo be ru fa vefu. ke taga.\n",
]

NAMES_OF_SEED_3 = (
    "bo be bu fa bu fa da bi du fi da bi da bi du fi du fi da bi "
    "du fi da bi da bi bu fa da bi du fi du fi da bi du fi bu fa\n"
)


def test_text_of_a_seed_is_fixed() -> None:
    texts = list(parse_options("patterns", "documents=3,words=12,seed=7").generate_documents())
    assert texts == PATTERNS_OF_SEED_7
    assert len({word_for_rank(rank) for rank in range(10_000)}) == 10_000


def test_options_set_repetition_topics_and_zipf() -> None:
    def words(options: str) -> list[list[str]]:
        return [
            text.replace(".", "").split() for text in parse_options("patterns", options).generate_documents()
        ]

    def repeated_trigrams(documents: list[list[str]]) -> float:
        again = [
            len(document) - 2 - len(set(zip(document, document[1:], document[2:], strict=False)))
            for document in documents
        ]
        return sum(again) / sum(map(len, documents))

    copying = [repeated_trigrams(words(f"repeat={repeat},documents=50")) for repeat in (0, 0.3, 0.6)]
    assert copying[0] < 0.02
    assert copying[0] + 0.15 < copying[1] < copying[2] - 0.15

    def shared(options: str) -> float:
        one, other = (set(document) for document in words(f"{options},documents=2,words=2000,repeat=0"))
        return len(one & other) / len(one | other)

    assert shared("topics=2,mixing=0") < shared("topics=2,mixing=0.5") < shared("topics=1")
    common = Counter(word for document in words("repeat=0,documents=50") for word in document).most_common(10)
    assert 1.6 < common[0][1] / common[1][1] < 2.5  # Zipf: the second word half as often as the first
    assert 3 < common[0][1] / common[3][1] < 5


def test_names_of_a_document_recur_and_share_no_word() -> None:
    first, other = list(parse_options("names", "documents=2,names=4,words=40,seed=3").generate_documents())
    assert first != other
    words = first.split()
    pairs = set(zip(words[::2], words[1::2], strict=True))
    assert len(words) == 40
    assert len(pairs) == 4
    assert len({word for pair in pairs for word in pair}) == 8
    assert first == NAMES_OF_SEED_3
    with raises_code("vocab-too-small"):
        parse_options("names", "names=20")
    with raises_code("unknown-option"):
        parse_options("names", "repeat=1")
