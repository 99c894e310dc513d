"""Output on odd terminals: other encodings, closed streams, readers that stop early, few columns."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qkflow import streams
from qkflow.cli import main as cli

MAIN = "from qkflow.cli.main import main; main()"


@pytest.mark.parametrize(
    "arguments", ["couplings", "couplings --markdown", "inits", "config", "timescale theory --help"]
)
def test_ascii_terminal(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stdout)  # not in a fixture: pytest replaces it before the call
    monkeypatch.setattr(sys, "argv", ["qkflow", *arguments.split()])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    assert len(written.getvalue().decode("ascii")) > 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k ← k + (Δ/2)·φ(q)", "k <- k + (Delta/2)*phi(q)"),
        ("σ² ≤ ½ – x₁ … 3 × é", "sigma^2 <= 1/2 - x1 ... 3 x e"),
        ("┏━┓┃ █ 界 \udcff", "+-+| # ? \\xff"),
    ],
)
def test_characters_that_an_encoding_lacks(text: str, expected: str) -> None:
    assert text.encode("ascii", streams.ERROR_HANDLER).decode() == expected


def test_utf_8_is_unchanged_but_for_bytes_of_file_names() -> None:
    assert "Δ → \udc80".encode("utf-8", streams.ERROR_HANDLER) == "Δ → \\x80".encode()


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell command with buffered output; QKFLOW is the command line, without torch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    environment["QKFLOW"] = f"{sys.executable} -c '{MAIN}'"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("eval $QKFLOW --help | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("eval $QKFLOW --help >/dev/full", 2, "[disk-full]"),
        ("eval $QKFLOW --help <&- >&-", 0, ""),
        ("eval $QKFLOW nonsense <&- >&- 2>&-", 2, ""),
    ],
)
def test_streams_that_are_closed_or_full(command: str, code: int, error: str, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == bool(error)
    assert done.stderr.strip().endswith(error)


def test_closed_stream_does_not_receive_the_next_file(tmp_path: Path) -> None:
    """Without stdout, a file would get the number 1, and with it the output of every process."""
    code = (
        "import sys; from qkflow import streams; streams.configure_streams();"
        "print(open('file', 'w').fileno(), file=sys.stderr)"
    )
    done = run(f'{sys.executable} -c "{code}" <&- >&-', tmp_path)
    assert int(done.stderr) > 2
