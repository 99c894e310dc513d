"""Readers of YAML, JSON and JSON Lines: damaged and hostile files are refused at once, in one sentence."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow import plain_data
from qkflow.plain_data import iter_lines, load_json, parse_json, parse_yaml, read_bytes, read_json, read_yaml

BILLION_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join(['*' + before] * 9)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        BILLION_LAUGHS,
        "[" * 20_000,
        "a: " + "{b: " * 100 + "1" + "}" * 100,
        "a: &x [*x]",
        "a: " + "9" * 5000,
        "!!python/object/apply:os.system [touch pwned]",
        "a: !!binary aGk=",
        "a: !!set {x}",
        "? [a, b]\n: c",
        "a: [",
        "a: \x00",
    ],
    ids=lambda text: text[:20],
)
def test_yaml_is_refused(text: str) -> None:
    with raises_code("invalid-yaml") as caught:
        parse_yaml(text, "study.yaml")
    assert str(caught.value).startswith("study.yaml ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a: &b {c: 1}\nd: *b\ne: {<<: *b, f: 2}", {"a": {"c": 1}, "d": {"c": 1}, "e": {"c": 1, "f": 2}}),
        ("a: 2024-13-45", {"a": "2024-13-45"}),  # a date stays text
        ("1: x", {"1": "x"}),
        ('a: "\\ud800"', {"a": "\N{REPLACEMENT CHARACTER}"}),
        ("a: 3e-3", {"a": "3e-3"}),
        ("", None),
    ],
)
def test_yaml_has_the_types_of_json(text: str, values: Any) -> None:
    assert parse_yaml(text, "study.yaml") == values


@pytest.mark.parametrize("text", ["", "{", "[" * 20_000, "[" * 70 + "]" * 70, '{"a":' * 20_000, "{'a': 1}"])
def test_json_is_refused(text: str) -> None:
    with raises_code("invalid-json"):
        parse_json(text, "result.json")
    with raises_code("invalid-json"):
        parse_json(b"\xff" + text.encode(), "result.json")


def test_json_has_no_nan_and_no_half_characters() -> None:
    assert load_json("[NaN, Infinity, -Infinity, 1e999, 1.5, 7]") == [None, None, None, None, 1.5, 7]
    assert load_json("9" * 5000) is None
    assert load_json('{"\\ud800": "\\udfff x", "\\ud83e\\udd89": 1}') == {"\ufffd": "\ufffd x", "🦉": 1}
    assert parse_json(b"\xef\xbb\xbf{}", "x") == {}


def test_missing_files_are_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "nowhere.json")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        read_yaml(tmp_path / "file" / "study.yaml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path, kind in ((tmp_path, "folder"), (tmp_path / "pipe", "pipe"), (Path("/dev/zero"), "device")):
            with raises_code("not-a-file") as caught:
                read_json(path)
            assert kind in str(caught.value)
        with raises_code("unreadable-file"):
            read_json(tmp_path / "socket")
    with raises_code("unreadable-file"):
        read_bytes("a\0b")
    (tmp_path / "loop").symlink_to("loop")
    with raises_code("unreadable-file"):
        read_bytes(tmp_path / "loop")


def test_files_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "sparse.yaml", "wb") as file:
        file.truncate(1 << 40)
    for read in (read_json, read_yaml):
        with raises_code("file-too-large"):
            read(tmp_path / "sparse.yaml")
    monkeypatch.setattr(plain_data, "MAX_LINE_BYTES", 8)
    assert list(iter_lines(io.BytesIO(b"ab\ncd"), "x")) == [b"ab\n", b"cd"]
    with raises_code("file-too-large"):
        list(iter_lines(io.BytesIO(b"x" * 9), "x"))


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"n": 1, "x": 0.5, "files": {"a": {"bytes": 0}}, "more": None}, True),
        ({"n": 1, "x": -1, "files": {}}, True),
        ({"n": -1, "x": 1, "files": {}}, False),
        ({"n": True, "x": 1, "files": {}}, False),
        ({"n": 1, "x": "1", "files": {}}, False),
        ({"n": 1, "x": 1, "files": {"a": 3}}, False),
        ({"n": 1, "x": 1}, False),
        ([], False),
    ],
)
def test_layout_of_values(value: Any, fits: bool) -> None:
    layout = {"n": int, "x": float, "files": {str: {"bytes": int}}}
    assert plain_data.has_layout(value, layout) is fits


@pytest.mark.parametrize(
    "text",
    [
        *('a: "\\UFFFFFFFF"', "a: " + "1:1" + ":1" * 2000 + ".5", "a: 1\na: 2", "a: {b: 1, 'b': 2}"),
        *("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}", "- 1\n" * plain_data.MAX_NODES),
    ],
    ids=["escape", "sexagesimal", "twice", "twice inside", "twice beside a merge", "many values"],
)
def test_yaml_that_its_parser_cannot_take_is_refused(text: str) -> None:
    with raises_code("invalid-yaml"):
        plain_data.parse_yaml(text, "x")


def test_a_merged_key_may_be_replaced() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: [*b, *a], y: 3}"
    assert plain_data.parse_yaml(text, "x")["c"] == {"x": 2, "y": 3}
