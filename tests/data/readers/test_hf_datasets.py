"""Hub data sets, tried on folders laid out as the hub lays them out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from qkflow.data import prepare, synthetic
from qkflow.data.readers import hf_datasets
from qkflow.errors import InputError


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with two configurations, as its card declares them."""
    folder = tmp_path / "repository"
    for config, seed in (("small", 0), ("large", 10)):
        (folder / config).mkdir(parents=True)
        for number, split in enumerate(("train", "validation", "test")):
            texts = list(
                synthetic.parse_options(
                    f"documents={12 - number},words=60,seed={seed + number}"
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


def test_a_local_copy_streams_its_splits_and_is_prepared_once(copy: Path, tmp_path: Path) -> None:
    tokens = prepare(f"hf:{copy}:small", "bytes")
    counts = tokens.describe()["splits"]
    assert [counts[split]["documents"] for split in ("train", "validation", "test")] == [12, 11, 10]
    first = next(iter(synthetic.parse_options("documents=12,words=60").generate_documents()))
    assert tokens.tokenizer.decode(tokens.tokens("train")[: tokens.document_offsets("train")[1]]) == first
    assert prepare(f"hf:{copy}:small", "bytes").folder == tokens.folder
    assert prepare(f"hf:{copy}:large", "bytes").fingerprint != tokens.fingerprint
    assert not list((tmp_path / "cache" / "staging").glob("*"))


def test_a_missing_configuration_or_column_is_named(copy: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be loaded: .*medium"):
        prepare(f"hf:{copy}:medium", "bytes")
    with pytest.raises(InputError, match=r"unknown column of .* 'tekst': did you mean 'text'"):
        prepare(f"hf:{copy}:small#tekst", "bytes")


def test_rows_without_text_are_left_out_and_the_search_for_it_ends() -> None:
    def texts(column: str | None, rows: Iterable[dict[str, object]]) -> list[str]:
        return list(hf_datasets._iter_texts(rows, hf_datasets.HubDatasetSpec("some/set", column=column)))

    rows = [{"id": "a"}, {"id": "b", "text": None}, {"id": "c", "text": "one"}, {"id": "d"}]
    assert texts(None, rows) == texts("text", rows) == ["one"]
    endless = ({"id": number} for number in itertools.count())
    with pytest.raises(InputError, match="hf:some/set has no column of text, only id"):
        texts(None, endless)
    with pytest.raises(InputError, match="unknown column of hf:some/set 'text'"):
        texts("text", endless)
    assert next(endless)["id"] == 2 * hf_datasets.MAX_ROWS_WITHOUT_TEXT


def test_damaged_rows_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two\n{"text": "three"}\n')
    with pytest.raises(InputError, match="(reading hf:.*/set failed|cannot be loaded): .*JSON"):
        prepare(f"hf:{tmp_path}/set", "bytes")


def test_lines_of_wikitext_become_articles_and_a_budget_ends_reading(tmp_path: Path) -> None:
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


def test_without_network_a_local_copy_is_asked_for_at_once() -> None:
    for name in ("wikitext-2", "hf:nobody/nothing"):
        with pytest.raises(InputError, match=r"127.0.0.1 cannot be reached: pass a local copy, as hf:/path"):
            prepare(name, "bytes")
    assert not os.path.exists(os.path.join(os.environ["QKFLOW_CACHE"], "sets"))


def test_names_are_read_as_written() -> None:
    name = hf_datasets.parse_spec("Salesforce/wikitext@abc123:wikitext-2-raw-v1:mb=5#text")
    assert name == hf_datasets.HubDatasetSpec("Salesforce/wikitext", "abc123", "wikitext-2-raw-v1", "text", 5)
    assert hf_datasets.parse_spec("owner/name") == hf_datasets.HubDatasetSpec("owner/name")
