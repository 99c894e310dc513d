"""Names find their corpora, folders their splits, and a hash divides the rest stably."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import corpora, splits
from qkflow.data.readers.files import ReadProgress
from qkflow.data.synthetic import parse_options, word_for_rank
from qkflow.errors import InputError


def parts(name: object) -> list[tuple[str, str]]:
    return list(corpora.resolve(str(name)).iter_documents(ReadProgress()))


def test_speeches_are_dated_documents_found_without_pandas() -> None:
    code = (
        "import sys; from qkflow.data import corpora; from qkflow.data.readers.files import Meter;"
        "parts = list(corpora.resolve('speeches').parts(Meter()));"
        "print(len(parts), sum(len(text.encode()) for _, text in parts),"
        "'pandas' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    documents, size, pandas, torch = result.stdout.split()
    assert int(documents) == 249
    assert 12_000_000 < int(size) < 12_300_000
    assert (pandas, torch) == ("False", "False")


def test_python_is_the_standard_library_without_tests_and_packages() -> None:
    corpus = corpora.resolve("python")
    assert isinstance(corpus, corpora.FileCorpus)
    names = {str(file.path) for file in corpus.files}
    assert any(name.endswith("json/decoder.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert corpus.metadata["python"] == ".".join(map(str, sys.version_info[:3]))


def test_folders_use_the_splits_their_files_name(tmp_path: Path) -> None:
    for name in ("train-0.txt", "train-1.txt", "dev.txt", "test.txt", "notes.txt", "README.md"):
        (tmp_path / name).write_text(f"text of {name}\n")
    corpus = corpora.resolve(str(tmp_path))
    assert Counter(part for part, _ in corpus.iter_documents(ReadProgress())) == {
        "train": 2,
        "validation": 1,
        "test": 1,
    }
    assert corpus.metadata["left_out"] == [str(tmp_path / "notes.txt")]
    # a glob names its files itself: nothing is left out
    assert {part for part, _ in parts(tmp_path / "*.txt")} == {splits.UNSPLIT}
    assert {part for part, _ in parts(tmp_path / "t*.txt")} == {splits.UNSPLIT_TRAIN, "test"}
    assert {part for part, _ in parts(tmp_path / "train*")} == {splits.UNSPLIT}


@pytest.mark.parametrize(
    "names", [["imdb-train.csv", "imdb-test.csv"], ["data/train/a.txt", "data/test/a.txt", "b.txt"]]
)
def test_names_of_splits_count_if_all_have_one_or_they_are_the_whole_name(
    tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text\n{name}\n")
    corpus = corpora.resolve(str(tmp_path))
    assert [part for part, _ in corpus.iter_documents(ReadProgress())] == ["test", splits.UNSPLIT_TRAIN]
    assert corpus.metadata["left_out"] == [str(tmp_path / name) for name in names[2:]]


def test_a_word_in_a_title_is_no_split(tmp_path: Path) -> None:
    names = ["train a model.md", "train-2-models.md", "dev-setup.md", "how to test.md", "page.md"]
    for name in names:
        (tmp_path / name).write_text(f"text of {name}\n")
    corpus = corpora.resolve(str(tmp_path))
    assert [part for part, _ in corpus.iter_documents(ReadProgress())] == [splits.UNSPLIT] * len(names)
    assert corpus.metadata["left_out"] == []


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.md", "train"),
        ("Train_1.jsonl.gz", "train"),
        ("data/dev/a.txt", "validation"),
        ("ptb.valid.txt", "validation"),
        ("train-00000-of-00002.parquet", "train"),
        ("test-00000-of-00001-a09b74b3ef9c3b56.parquet", "test"),
        ("train-a-model.md", None),
        ("testing ground/a.txt", None),
    ],
)
def test_files_are_called_by_a_split(path: str, split: str | None) -> None:
    assert splits.split_from_path(path) == split


def test_folders_are_read_as_one_kind_below_and_hidden_files_skipped(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    (tmp_path / "deep" / ".git" / "x.jsonl").write_text('{"text": "hidden"}\n')
    (tmp_path / "deep" / "a.jsonl").write_text('{"text": "seen"}\n')
    (tmp_path / "about.txt").write_text("about\n")
    assert parts(tmp_path) == [(splits.UNSPLIT, "seen")]
    assert corpora.resolve(str(tmp_path)).metadata["left_out"] == [str(tmp_path / "about.txt")]


def test_many_text_files_are_a_document_each_and_few_are_cut(tmp_path: Path) -> None:
    for number in range(corpora.MIN_FILES_UNSPLIT):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n\n" * 1000)
    assert len(parts(tmp_path)) == corpora.MIN_FILES_UNSPLIT
    (tmp_path / "0.txt").unlink()
    assert len(parts(tmp_path)) > 2 * corpora.MIN_FILES_UNSPLIT


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("speches", "unknown corpus 'speches': did you mean 'speeches'"),
        ("./none.txt", "there is no file or folder ./none.txt"),
        ("none/*.txt", "no file matches none/"),
        ("speeches:x=1", "'speeches' has no options"),
        ("patterns:repeet=1", "unknown dial of patterns 'repeet': did you mean 'repeat'"),
        ("patterns:repeat=2", "repeat=2.0 is not a share between 0 and 1"),
        ("patterns:seed=x", "seed='x' is not a number of type int"),
        ("patterns:documents=1", "documents=1 is below 2"),
        ("hf:", "needs the name of a data set"),
        ("c4:mb=many", "mb='many' is not a whole number"),
        ("c4:gb=1", "unknown option of a hub data set 'gb'"),
    ],
)
def test_bad_names_get_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        corpora.resolve(name)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match="holds no file of text"):
        corpora.resolve(str(tmp_path))


def test_patterns_are_the_same_on_every_machine() -> None:
    texts = list(parse_options("documents=3,words=12,seed=7").generate_documents())
    assert texts == PATTERNS_OF_SEED_7
    assert len({word_for_rank(rank) for rank in range(10_000)}) == 10_000


PATTERNS_OF_SEED_7 = [
    "geba lafo fe gu kaba. da niba kubo vibo nu gu ba.\n",
    "be diba kubi ga zuba bi pi du zibu bebi ruba gi.\n",
    "li fogi zubi podi fugu rifo be ru fa vefu. ke taga.\n",
]


def test_dials_of_patterns_do_what_they_say() -> None:
    def words(dials: str) -> list[list[str]]:
        return [text.replace(".", "").split() for text in parse_options(dials).generate_documents()]

    def trigrams_seen_again(documents: list[list[str]]) -> float:
        again = [
            len(document) - 2 - len(set(zip(document, document[1:], document[2:], strict=False)))
            for document in documents
        ]
        return sum(again) / sum(map(len, documents))

    copying = [trigrams_seen_again(words(f"repeat={repeat},documents=50")) for repeat in (0, 0.3, 0.6)]
    assert copying[0] < 0.02
    assert copying[0] + 0.15 < copying[1] < copying[2] - 0.15

    def shared(dials: str) -> float:
        one, other = (set(document) for document in words(f"{dials},documents=2,words=2000,repeat=0"))
        return len(one & other) / len(one | other)

    assert shared("topics=2,mixing=0") < shared("topics=2,mixing=0.5") < shared("topics=1")
    common = Counter(word for document in words("repeat=0,documents=50") for word in document).most_common(10)
    assert 1.6 < common[0][1] / common[1][1] < 2.5  # Zipf: the second word half as often as the first
    assert 3 < common[0][1] / common[3][1] < 5


@given(
    st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=80).filter(
        lambda texts: len(set(texts)) > 1
    )
)
@settings(max_examples=100, deadline=None)
def test_every_set_gets_training_and_validation_text(texts: list[str]) -> None:
    divided = list(splits.assign_splits([(splits.UNSPLIT, text) for text in texts], "x"))
    assert [document.text.encode(errors="replace") for document in divided if document.text.isascii()] == [
        text.encode() for text in texts if text.isascii()
    ]
    assert {"train", "validation"} <= {document.split for document in divided}
    assert len({document.split for document in divided if document.text == divided[0].text}) == 1
    assert all(document.n_bytes == len(document.text.encode()) for document in divided)


def test_shares_are_as_said_and_a_documents_split_is_its_own() -> None:
    texts = [f"document {number}" for number in range(20_000)]
    divided = list(splits.assign_splits([(splits.UNSPLIT, text) for text in texts], "x"))
    counts = Counter(document.split for document in divided)
    assert counts["validation"] == pytest.approx(1000, rel=0.1)
    assert counts["test"] == pytest.approx(1000, rel=0.1)
    shuffled = {
        d.text: d.split
        for d in splits.assign_splits([(splits.UNSPLIT, t) for t in reversed(texts[40:])], "x")
    }
    alike = [shuffled[document.text] == document.split for document in divided[40:]]
    assert sum(alike) >= len(alike) - 1  # all but one that may have been sent to validation by force


def test_own_splits_stay_and_a_missing_validation_is_taken_from_training() -> None:
    given = [(splits.UNSPLIT_TRAIN, f"train {i}") for i in range(1000)] + [
        ("test", f"test {i}") for i in range(9)
    ]
    counts = Counter(document.split for document in splits.assign_splits(given, "x"))
    assert counts["test"] == 9
    assert counts["validation"] == pytest.approx(50, abs=25)
    assert splits.map_source_splits(["train", "validation"]) == {"train": "train", "validation": "validation"}
    assert splits.map_source_splits(["test"]) == {}


def test_a_single_document_cannot_be_divided() -> None:
    for times in (1, splits.LOOKAHEAD_DOCUMENTS, 3 * splits.LOOKAHEAD_DOCUMENTS):
        with pytest.raises(InputError, match="single document"):
            list(splits.assign_splits([(splits.UNSPLIT, "all there is")] * times, "x"))


@pytest.mark.parametrize("others", [1, 200])
def test_equal_documents_at_the_start_are_not_taken_for_a_single_one(others: int) -> None:
    texts = ["(none)"] * (splits.LOOKAHEAD_DOCUMENTS + 5) + [f"document {number}" for number in range(others)]
    divided = list(splits.assign_splits([(splits.UNSPLIT, text) for text in texts], "x"))
    assert [document.text for document in divided] == texts
    assert {"train", "validation"} <= {document.split for document in divided}
    assert len({document.split for document in divided if document.text == "(none)"}) == 1
    assert others == 1 or divided[0].split == "train"  # as its hash says: none had to be moved


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    first, _ = splits.assign_splits([(splits.UNSPLIT, "bad \ud800 end"), (splits.UNSPLIT, "good")], "x")
    assert first.text == "bad \ufffd end"
