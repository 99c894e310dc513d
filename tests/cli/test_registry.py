"""`qkflow couplings`, `scorings`, `inits` and `config` list what the code registers."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from input_errors import raises_code
from qkflow.attention import couplings, scorings
from qkflow.attention.init import BASE_INITS, INIT_MODIFIERS, INIT_PARTS
from qkflow.cli.commands import registry
from qkflow.cli.main import dispatch


def test_couplings_lists_every_registered_coupling(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["couplings", "--full", "--json"])
    rows = json.loads(capsys.readouterr().out)["couplings"]
    assert [row["coupling"] for row in rows] == couplings.names()
    affine = next(row for row in rows if row["coupling"] == "affine")
    assert affine["identity at init"] is True
    assert "bound" in affine["options"]


def test_scorings_lists_every_registered_scoring(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["scorings", "--json"])
    rows = json.loads(capsys.readouterr().out)["scorings"]
    assert [row["scoring"] for row in rows] == scorings.names()


def test_inits_lists_every_base_modifier_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["inits", "--json"])
    rows = json.loads(capsys.readouterr().out)["inits"]
    names = {row["init"].partition("=")[0] for row in rows}
    assert names == {*BASE_INITS, *INIT_MODIFIERS, *(f"{{{part}" for part in INIT_PARTS)}


def test_config_describes_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["config", "data", "--json"])
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["config"]}
    assert list(rows) == ["data.corpus", "data.tokenizer", "data.seq_len", "data.fingerprint"]
    assert rows["data.seq_len"]["type"] == "int"
    assert rows["data.seq_len"]["default"] == 128
    with raises_code("unknown-section"):
        dispatch(["config", "dat"])


def test_every_config_key_has_a_description() -> None:
    assert not [row["key"] for row in registry.config_rows() if not row["description"]]


def test_every_form_names_the_first_row(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["couplings"], ["scorings"], ["inits"], ["config", "train"]):
        for form in ([], ["--markdown"], ["--json"]):
            dispatch([*arguments, *form])
            printed = capsys.readouterr().out
            assert any(name in printed for name in ("affine", "differential", "gpt2", "train.tokens"))


@dataclass
class Described:
    """Options.

    size   rows of the table,
           header included
    """

    size: int = 1
    name: str = "a # b"  # shown in the title
    plain: bool = False
    long: int | None = None
    """from the string below"""


def test_field_descriptions_come_from_comments_and_docstrings() -> None:
    assert registry.field_descriptions(Described) == {
        "size": "rows of the table, header included",
        "name": "shown in the title",
        "long": "from the string below",
    }


def test_markdown_escapes_pipes() -> None:
    table = registry.markdown_table([{"key": "a", "type": "int | None", "on": True, "many": []}])
    assert table.splitlines()[2] == r"| `a` | int \| None | true | – |"
