"""Each task's loader on small files in the original layout, good and bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qkflow.data.tasks import load, majority_mask, token_mask, word_spans
from qkflow.data.tasks.agreement_grammar import NOUNS, generate
from qkflow.data.tasks.examples import Example
from qkflow.errors import InputError


def marked(example: Example) -> list[list[str]]:
    """The text that each annotator marked."""
    return [[example.text[slice(*span)] for span in spans] for spans in example.rationales]


# SQuAD

CONTEXT = "In 1973 oil was dear. The crisis began in October 1973 and ended in 1974."


def squad_file(folder: Path, *questions: dict[str, Any]) -> Path:
    path = folder / "dev-v2.0.json"
    paragraph = {"context": CONTEXT, "qas": list(questions)}
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": [paragraph]}]}))
    return path


def ask(identifier: str, *answers: tuple[str, int], impossible: bool | None = None) -> dict[str, Any]:
    question = {"id": identifier, "question": "When?"}
    question["answers"] = [{"text": text, "answer_start": start} for text, start in answers]
    return question | ({} if impossible is None else {"is_impossible": impossible})


def test_squad_answers_stand_where_they_are_said_to(tmp_path: Path) -> None:
    start = CONTEXT.index("October 1973")
    squad_file(tmp_path, ask("a", ("October 1973", start), ("October", start)), ask("b", impossible=True))
    found = load("squad", tmp_path)
    (example,) = found.examples
    assert example.text == f"Q: When? C: {CONTEXT} A:"
    assert example.label == "October 1973"
    assert marked(example) == [["October 1973"]]
    assert example.metadata["answers"] == ["October 1973", "October"]
    assert found.issue_counts == {"impossible questions dropped": 1}
    kept = load("squad", tmp_path, keep_impossible=True)
    assert [each.label for each in kept.examples] == ["October 1973", ""]


def test_squad_wrong_offsets_are_found_again_and_counted(tmp_path: Path) -> None:
    near = CONTEXT.index("1973 and") + 2  # off by two from the second 1973
    squad_file(tmp_path, ask("near", ("1973", near)), ask("past", ("1974", 10_000)), ask("none", ("1975", 3)))
    found = load("squad", tmp_path / "dev-v2.0.json")
    places = [each.rationales[0][0][0] - len("Q: When? C: ") for each in found.examples]
    assert places == [CONTEXT.index("1973 and"), CONTEXT.index("1974")]
    assert found.issue_counts["answers found at another place than given"] == 2
    assert found.issue_counts["answers dropped: not in the context"] == 1
    assert found.issue_counts["questions dropped: no answer stands in the context"] == 1


def test_squad_guessed_offsets_move_to_where_annotators_agree(tmp_path: Path) -> None:
    start = CONTEXT.index("October 1973")
    path = squad_file(tmp_path, ask("a", ("1973", CONTEXT.index("1973")), ("October 1973", start)))
    given, moved = load("squad", path), load("squad", path, relocate=True)
    assert given.examples[0].rationales[0][0][0] < moved.examples[0].rationales[0][0][0]
    assert marked(moved.examples[0]) == [["1973"]]
    assert moved.issue_counts == {"answers moved to where the annotators agree": 1}


def test_squad_window_keeps_the_answer_in_place(tmp_path: Path) -> None:
    path = squad_file(tmp_path, ask("a", ("October 1973", CONTEXT.index("October 1973"))))
    (example,) = load("squad", path, window=6).examples
    assert example.text == "Q: When? C: an in October 1973 and e A:"
    assert marked(example) == [["October 1973"]]


@pytest.mark.parametrize("content", ["{}", "[1]", '{"data": [{"paragraphs": [{}]}]}', "not json"])
def test_squad_refuses_other_layouts(tmp_path: Path, content: str) -> None:
    (tmp_path / "dev-v1.1.json").write_text(content)
    with pytest.raises(InputError, match=r"dev-v1\.1\.json"):
        load("squad", tmp_path)


# HateXplain


def hatexplain_folder(
    folder: Path, posts: dict[str, Any], divisions: dict[str, list[str]] | None = None
) -> Path:
    (folder / "dataset.json").write_text(json.dumps(posts))
    if divisions is not None:
        (folder / "post_id_divisions.json").write_text(json.dumps(divisions))
    return folder


def post(labels: list[str], masks: list[list[int]], tokens: str = "you are a bad dog") -> dict[str, Any]:
    annotators = [{"label": label, "annotator_id": i, "target": ["None"]} for i, label in enumerate(labels)]
    return {"post_tokens": tokens.split(), "annotators": annotators, "rationales": masks}


def test_hatexplain_original_layout(tmp_path: Path) -> None:
    posts = {
        "1_twitter": post(["offensive", "hatespeech", "offensive"], [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]),
        "2_gab": post(["normal", "normal", "offensive"], []),
        "3_gab": post(["normal", "hatespeech", "offensive"], [[1, 0, 0, 0, 0]]),
        "4_gab": post(["normal", "normal", "normal"], []),
    }
    divisions = {"train": ["1_twitter", "2_gab", "3_gab"], "val": [], "test": ["4_gab"]}
    found = load("hatexplain", hatexplain_folder(tmp_path, posts, divisions), split="train")
    assert [(each.name, each.label) for each in found.examples] == [
        ("1_twitter", "offensive"),
        ("2_gab", "normal"),
    ]
    assert marked(found.examples[0]) == [["a bad"], ["bad dog"]]
    assert found.examples[0].metadata["annotators"] == 3
    assert found.issue_counts == {"undecided posts dropped": 1, "posts without a rationale": 1}
    assert [each.name for each in load("hatexplain", tmp_path, split="test").examples] == ["4_gab"]


def test_hatexplain_rationale_that_does_not_fit_names_the_post(tmp_path: Path) -> None:
    posts = {"77_gab": post(["offensive"] * 3, [[0, 1]])}
    with pytest.raises(InputError, match="post 77_gab: a rationale marks 2 tokens, but the text has 5"):
        load("hatexplain", hatexplain_folder(tmp_path, posts, {"train": ["77_gab"]}))


def test_hatexplain_jsonl(tmp_path: Path) -> None:
    lines = [
        {"text": "you are  a bad dog", "label": "offensive", "rationale_token_spans": [[0, 1], [3, 5]]},
        {"text": "hello", "label": "normal"},
    ]
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = load("hatexplain", tmp_path, split="validation")
    assert marked(found.examples[0]) == [["you", "bad dog"]]
    assert found.examples[1].rationales == ()
    assert found.issue_counts == {"posts without a rationale": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "a b", "label": "offensive", "post_id": "9", "rationale_token_spans": [[1, 3]]}, "post 9"),
        ({"text": "a b", "label": "offensive", "rationale_token_spans": [[1]]}, "does not fit its 2 tokens"),
        ({"text": "a b"}, r"train\.jsonl:1 needs a label"),
        ({"label": "normal"}, r"train\.jsonl:1 has no text"),
    ],
)
def test_hatexplain_jsonl_refuses_bad_posts(tmp_path: Path, line: dict[str, Any], said: str) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    with pytest.raises(InputError, match=said):
        load("hatexplain", tmp_path)


# Agreement

LINZEN = [
    "sentence",
    "orig_sentence",
    "pos_sentence",
    "subj",
    "verb",
    "verb_pos",
    "subj_index",
    "verb_index",
    "n_diff_intervening",
]


def linzen_file(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "agr_50_mostcommon_10K.tsv"
    lines = [LINZEN, *([str(row.get(name, "x")) for name in LINZEN] for row in rows)]
    path.write_text("\n".join("\t".join(line) for line in lines))
    return path


ROW = {
    "orig_sentence": "the key to the cabinets is on the table .",
    "verb_pos": "VBZ",
    "subj_index": 2,
    "verb_index": 6,
    "n_diff_intervening": 1,
}


def test_linzen_text_ends_before_the_verb(tmp_path: Path) -> None:
    linzen_file(tmp_path, ROW, ROW | {"verb_pos": "VBP", "verb_index": 1, "subj_index": 5})
    found = load("agreement", tmp_path)
    (example,) = found.examples
    assert example.text == "the key to the cabinets"
    assert (example.label, marked(example)) == ("SG", [["key"]])
    assert example.metadata == {"verb": "is", "attractors": 1}
    assert found.issue_counts == {"sentences dropped: the subject follows the verb": 1}


def test_linzen_as_published_shows_the_verb(tmp_path: Path) -> None:
    (example,) = load("agreement", linzen_file(tmp_path, ROW), as_published=True).examples
    assert example.text == ROW["orig_sentence"]
    assert marked(example) == [["key", "is"]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"subj_index": 40}, "do not fit 10 words"),
        ({"verb_pos": "NN"}, "VBZ or VBP"),
        ({"verb_index": "x"}, "whole"),
    ],
)
def test_linzen_refuses_bad_rows(tmp_path: Path, change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=f"10K.tsv:2.*{said}"):
        load("agreement", linzen_file(tmp_path, ROW | change))


def test_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.tsv"
    path.write_text('SG\tis\tThe key to the "cabinets"\nPL\tare\t1\t0\tsource.txt\tThe keys\n')
    found = load("agreement", path)
    assert [(each.text, each.label) for each in found.examples] == [
        ('The key to the "cabinets"', "SG"),
        ("The keys", "PL"),
    ]
    assert found.examples[1].rationales == ()
    path.write_text("SG\tis\tThe key\nSG\tis\n")
    with pytest.raises(InputError, match=r"prefixes\.tsv:2"):
        load("agreement", path)
    path.write_text("a\tb\n")
    with pytest.raises(InputError, match="neither Linzen's header"):
        load("agreement", path)


def test_generated_sentences_know_their_own_structure() -> None:
    numbers = {form: index for pair in NOUNS for index, form in enumerate(pair)}
    examples = generate(600, seed=3, max_modifiers=3, attractor_prob=0.6)
    assert sum(each.label == "PL" for each in examples) == 300
    for each in examples:
        words, facts = each.text.split(), each.metadata
        plural = int(each.label == "PL")
        assert words[facts["subject_index"]] == facts["subject"]
        assert marked(each) == [[facts["subject"]]]
        assert numbers[facts["subject"]] == plural
        assert facts["verb_index"] == len(words)
        between = [numbers[word] for word in words[facts["subject_index"] + 1 :] if word in numbers]
        assert len(between) == facts["nouns_between"] <= 3
        assert sum(number != plural for number in between) == facts["attractors"]
    shares = [each.metadata["attractors"] for each in examples]
    assert sum(shares) / sum(each.metadata["nouns_between"] for each in examples) == pytest.approx(
        0.6, abs=0.08
    )


def test_generated_whole_sentences_mark_the_verb_too() -> None:
    for each in load("agreement", "generate", as_published=True, limit=50).examples:
        assert marked(each) == [[each.metadata["subject"], each.metadata["verb"]]]
        assert each.text.split()[each.metadata["verb_index"]] == each.metadata["verb"]


def test_generation_repeats_and_refuses() -> None:
    assert generate(20, seed=1) == generate(20, seed=1)
    assert generate(20, seed=1) != generate(20, seed=2)
    with pytest.raises(InputError, match="attractor share"):
        generate(5, attractor_prob=2)


# GLUE


MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def test_glue_layouts(tmp_path: Path) -> None:
    files = {
        "SST-2/train.tsv": "sentence\tlabel\nit 's \"good \t1\n",
        "CoLA/train.tsv": "gj04\t1\t\tThey left.\ngj04\t0\t*\tThey leaved the.\n",
        "CoLA/test.tsv": "index\tsentence\n0\tThey left.\n",
        "MRPC/msr-para-train.tsv": "\ufeff" + MRPC_HEADER + "\n1\t7\t8\tA b.\tB a.\n1\t7\n",
        "RTE/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert [(e.text, e.label) for e in load("sst-2", tmp_path).examples] == [("it 's \"good", "1")]
    assert [(e.text, e.label) for e in load("cola", tmp_path / "CoLA").examples] == [
        ("They left.", "1"),
        ("They leaved the.", "0"),
    ]
    assert load("cola", tmp_path, split="test").examples[0].label is None
    mrpc = load("mrpc", tmp_path / "MRPC" / "msr-para-train.tsv")
    assert [(e.text, e.text_pair, e.label) for e in mrpc.examples] == [("A b.", "B a.", "1")]
    assert mrpc.issue_counts == {"lines skipped: too few columns": 1}
    assert load("rte", tmp_path, split="validation").labels == ["not_entailment"]


def test_glue_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(InputError, match="not a SST-2 file"):
        load("sst-2", tmp_path)
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\tyes\n")
    with pytest.raises(InputError, match=r"train\.tsv:2 needs a label out of 0, 1"):
        load("sst-2", tmp_path)
    with pytest.raises(InputError, match="no SST-2 validation file"):
        load("sst-2", tmp_path, split="validation")


# The hub, without the network: its row layouts, fed from memory.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], list[dict[str, Any]]]:
    datasets = pytest.importorskip("datasets")
    sets: dict[tuple[str, str | None, str], list[dict[str, Any]]] = {}

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        if (name, config, split) not in sets:
            raise FileNotFoundError(f"{name} is not there")
        return sets[name, config, split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return sets


def test_hub_rows_become_the_same_examples(hub: dict) -> None:
    answers = {"text": ["oil"], "answer_start": [CONTEXT.index("oil")]}
    row = {"id": "q", "question": "What?", "context": CONTEXT, "answers": answers}
    hub["rajpurkar/squad", None, "validation"] = [row]
    hub["nyu-mll/glue", "rte", "test"] = [{"sentence1": "A.", "sentence2": "B.", "label": -1, "idx": 0}]
    hub["someone/copy", None, "train"] = [
        {
            "id": "1",
            "annotators": {"label": [0, 2, 2]},
            "rationales": [[1, 0]],
            "post_tokens": ["bad", "dog"],
        }
    ]
    assert marked(load("squad", "hf").examples[0]) == [["oil"]]
    assert load("rte", "hf", split="test").examples[0].text_pair == "B."
    post = load("hatexplain", "hf:someone/copy").examples[0]
    assert (post.label, marked(post)) == ("offensive", [["bad"]])
    with pytest.raises(InputError, match="cannot read nobody/nothing from the hub"):
        load("squad", "hf:nobody/nothing")


# Spans


def test_tokens_overlapping_a_span_are_marked() -> None:
    offsets = [(0, 3), (3, 5), (6, 9)]
    assert token_mask(offsets, [(4, 7)]) == [False, True, True]
    assert token_mask(offsets, []) == [False] * 3
    votes = [[(0, 3)], [(0, 5)], [(6, 9)]]
    assert majority_mask(offsets, votes) == [True, False, False]
    assert majority_mask(offsets, []) == [False] * 3
    assert word_spans("a  bc ") == [(0, 1), (3, 5)]


def test_unknown_tasks_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'squad'"):
        load("squadd", tmp_path)
    with pytest.raises(InputError, match="no SQuAD file at"):
        load("squad", tmp_path / "nowhere")
