"""Hub datasets, read from local folders with the hub's layout."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from input_errors import raises_code
from qkflow.data import prepare, synthetic
from qkflow.data.readers import hf_datasets


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there


@pytest.fixture
def local_copy(tmp_path: Path) -> Path:
    """A repository with two configurations, declared in its card."""
    folder = tmp_path / "repository"
    for config, seed in (("small", 0), ("large", 10)):
        (folder / config).mkdir(parents=True)
        for number, split in enumerate(("train", "validation", "test")):
            texts = list(
                synthetic.parse_options(
                    "patterns", f"documents={12 - number},words=60,seed={seed + number}"
                ).generate_documents()
            )
            table = pyarrow.table({"id": list(range(len(texts))), "text": texts, "title": ["t"] * len(texts)})
            parquet.write_table(table, folder / config / f"{split}-00000-of-00001.parquet")
    files = "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(
            f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "validation", "test")
        )
        for config in ("small", "large")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{files}---\n# A card\n")
    return folder


def test_local_local_copy_keeps_splits_and_is_prepared_once(local_copy: Path, tmp_path: Path) -> None:
    tokens = prepare(f"hf:{local_copy}:small", "bytes")
    counts = tokens.describe()["splits"]
    assert [counts[split]["documents"] for split in ("train", "validation", "test")] == [12, 11, 10]
    first = next(iter(synthetic.parse_options("patterns", "documents=12,words=60").generate_documents()))
    assert tokens.tokenizer.decode(tokens.tokens("train")[: tokens.document_offsets("train")[1]]) == first
    assert prepare(f"hf:{local_copy}:small", "bytes").folder == tokens.folder
    assert prepare(f"hf:{local_copy}:large", "bytes").fingerprint != tokens.fingerprint
    assert not list((tmp_path / "cache" / "staging").glob("*"))


def test_unknown_config_or_column(local_copy: Path) -> None:
    with raises_code("hub-dataset-failed") as raised:
        prepare(f"hf:{local_copy}:medium", "bytes")
    assert "medium" in str(raised.value)
    with raises_code("unknown-column"):
        prepare(f"hf:{local_copy}:small#tekst", "bytes")


def test_search_for_the_text_column_is_bounded() -> None:
    def texts(column: str | None, rows: Iterable[dict[str, object]]) -> list[str]:
        return list(hf_datasets._iter_texts(rows, hf_datasets.HubDatasetSpec("some/set", column=column)))

    rows = [{"id": "a"}, {"id": "b", "text": None}, {"id": "c", "text": "one"}, {"id": "d"}]
    assert texts(None, rows) == texts("text", rows) == ["one"]
    endless = ({"id": number} for number in itertools.count())
    with raises_code("no-text-column"):
        texts(None, endless)
    with raises_code("unknown-column"):
        texts("text", endless)
    assert next(endless)["id"] == 2 * hf_datasets.MAX_ROWS_WITHOUT_TEXT


def test_corrupt_rows(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two\n{"text": "three"}\n')
    with raises_code("hub-dataset-failed"):
        prepare(f"hf:{tmp_path}/set", "bytes")


def test_wikitext_lines_become_articles_and_mb_limits_reading(tmp_path: Path) -> None:
    lines = ["", *(line for i in range(6) for line in (f" = Title {i} = \n", "", " Some text . \n" * 20_000))]
    (tmp_path / "wiki").mkdir()
    parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "wiki" / "train-00000-of-00001.parquet")
    documents = [
        text
        for _, text in hf_datasets.iter_documents(hf_datasets.parse_spec(f"{tmp_path}/wiki:mb=0"))
        if text.strip()
    ]
    assert len(documents) == 6
    assert documents[3].startswith(" = Title 3 = \n")
    assert (
        len(
            [
                text
                for _, text in hf_datasets.iter_documents(hf_datasets.parse_spec(f"{tmp_path}/wiki:mb=1"))
                if text.strip()
            ]
        )
        == 4
    )


def test_hub_unreachable() -> None:
    for name in ("wikitext-2", "hf:nobody/nothing"):
        with raises_code("hub-unreachable") as raised:
            prepare(name, "bytes")
        assert "127.0.0.1" in str(raised.value)
    assert not os.path.exists(os.path.join(os.environ["QKFLOW_CACHE"], "sets"))


def test_parse_spec() -> None:
    name = hf_datasets.parse_spec("Salesforce/wikitext@abc123:wikitext-2-raw-v1:mb=5#text")
    assert name == hf_datasets.HubDatasetSpec("Salesforce/wikitext", "abc123", "wikitext-2-raw-v1", "text", 5)
    assert hf_datasets.parse_spec("owner/name") == hf_datasets.HubDatasetSpec("owner/name")


def test_iter_rows_of_one_split(local_copy: Path) -> None:
    spec = hf_datasets.parse_spec(f"{local_copy}:small")
    assert [row["id"] for row in hf_datasets.iter_rows(spec, "test")] == list(range(10))
    with raises_code("split-not-found") as raised:
        list(hf_datasets.iter_rows(spec, "dev"))
    assert "train, validation, test" in str(raised.value)
