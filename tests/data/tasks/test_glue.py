"""GLUE: the original TSV layouts, labels and errors."""

from __future__ import annotations

from pathlib import Path

from input_errors import raises_code
from qkflow.data.tasks import load

MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def test_original_layouts(tmp_path: Path) -> None:
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


def test_invalid_files(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("a\tb\n1\t2\n")
    with raises_code("unknown-glue-layout"):
        load("sst-2", tmp_path)
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\tyes\n")
    with raises_code("invalid-label") as raised:
        load("sst-2", tmp_path)
    assert "train.tsv:2" in str(raised.value)
    with raises_code("split-not-found"):
        load("sst-2", tmp_path, split="validation")
