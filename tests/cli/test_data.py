"""`qkflow data`: tables, JSON, and errors with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.cli import main

SMALL = "patterns:documents=60,words=80"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.dispatch(["data", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_list_shows_sizes_and_licenses(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "list")
    for text in ("speeches", "12 MB", "PSF-2.0", "wikitext-103", "ODC-BY"):
        assert text in out
    listed = json.loads(run(capsys, "list", "--json"))["corpora"]
    names = {row["name"] for row in listed}
    assert {"speeches", "python", "patterns", "wikitext-2", "pubmed", "openwebtext", "c4"} < names


def test_prepare_describe_verify(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    prepared = json.loads(run(capsys, "prepare", SMALL, "--tokenizer", "bpe:300", "--json"))
    assert Path(prepared["folder"]).parent == cache / "sets"
    out = run(capsys, "prepare", SMALL, "--tokenizer", "bpe:300")
    assert f"{prepared['splits']['train']['tokens']:,}" in out
    assert prepared["fingerprint"] in out
    described = json.loads(run(capsys, "describe", SMALL, "--tokenizer", "bpe:300", "--json"))
    assert described["fingerprint"] == prepared["fingerprint"]
    assert 3 < described["unigram_entropy_bits"] < 8.3
    assert 0 < described["repetition"]["induction_1"] < described["repetition"]["seen"] < 1
    assert 0.2 < described["splits"]["train"]["tokens_per_byte"] < 0.8
    out = run(capsys, "describe", SMALL, "--tokenizer", "bpe:300")
    assert f"{described['unigram_entropy_bits']:.3f} bits per token" in out
    checked = json.loads(run(capsys, "verify", SMALL, "--tokenizer", "bpe:300", "--json"))
    assert checked == {"corpus": SMALL, "corrupted": [], "fingerprint": prepared["fingerprint"]}
    assert "all checksums match" in run(capsys, "verify", SMALL, "--tokenizer", "bpe:300")


def test_describe_measures_induction(capsys: pytest.CaptureFixture[str]) -> None:
    described = [
        json.loads(run(capsys, "describe", f"{SMALL},repeat={repeat}", "--tokenizer", "bytes", "--json"))
        for repeat in ("0", "0.8")
    ]
    assert described[0]["repetition"]["induction_2"] < described[1]["repetition"]["induction_2"]


def test_brackets_in_paths_are_not_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"some text of {name}\n")
    name, options = f"{tmp_path}/[ab]*.txt", ["--tokenizer", "bytes", "--cache", f"{tmp_path}/[/cache]"]
    assert "[/cache]" in run(capsys, "prepare", name, *options)
    assert run(capsys, "verify", name, *options).startswith(f"{name}: all checksums")


def test_files_left_out_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for folder, others in (("one", ["[a].txt"]), ("two", [f"{number}.txt" for number in range(7)])):
        for name in ("train.txt", "dev.txt", *others):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text(f"some text of {name}\n")
        # Both folders have the same text and the same token set, but other files left out.
        assert main.dispatch(["data", "prepare", str(tmp_path / folder), "--tokenizer", "bytes"]) == 0
        stderr = capsys.readouterr().err
        assert stderr.startswith(
            f"qkflow: {len(others)} file{'s' if others[1:] else ''} left out: {tmp_path}"
        )
        assert stderr.endswith(f"{folder}/[a].txt\n" if folder == "one" else "/4.txt and 2 more\n")
        assert main.dispatch(["data", "describe", str(tmp_path / folder), "--tokenizer", "bytes"]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in ("files left out", *others))


def test_single_document_error_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"title": "about this corpus"}')
    (tmp_path / "text.txt").write_text("some text\n\n" * 1000)
    with raises_code("single-document") as raised:
        main.dispatch(["data", "prepare", str(tmp_path), "--tokenizer", "bytes"])
    assert "meta.json" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["prepare", "no such corpus"], "unknown-corpus"),
        (["describe", "/no/such/file.txt"], "corpus-not-found"),
        (["prepare", SMALL, "--tokenizer", "bpe:5"], "invalid-vocab-size"),
        (["prepair", SMALL], "unknown-command"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(
    arguments: list[str],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache: Path,
) -> None:
    monkeypatch.setattr("sys.argv", ["qkflow", "data", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert f"[{code}]" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not cache.exists()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("list", "prepare", "describe", "verify"):
        with pytest.raises(SystemExit):
            main.dispatch(["data", command, "--help"])
        assert f"qkflow data {command}" in capsys.readouterr().out
