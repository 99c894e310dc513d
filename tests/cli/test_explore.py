"""`qkflow explore` from the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from explored import TEXT, save_small_model
from input_errors import raises_code
from qkflow.cli.main import dispatch


def test_serves_until_interrupted(tmp_path: Path) -> None:
    first = save_small_model(tmp_path / "first")
    second = save_small_model(tmp_path / "second", "euler")
    command = [sys.executable, "-m", "qkflow", "explore", str(first), str(second), "--text", TEXT]
    server = subprocess.Popen(
        [*command, "--no-browser", "--json", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(server.stdout.readline())
            assert lines[-1], "the server ended"
        announced = json.loads("".join(lines))
        assert announced["models"] == ["first", "second"]
        with httpx.Client(trust_env=False, follow_redirects=True) as client:
            page = client.get(announced["url"])
            assert page.status_code == 200
            assert "Attention explorer" in page.text
            described = client.get(f"{announced['url'].partition('?')[0]}api/models").json()
            assert described["text"] == TEXT
    finally:
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=20)
    assert server.returncode == 0
    assert err == ""


def test_refusals(tmp_path: Path) -> None:
    run = save_small_model(tmp_path / "run")
    with raises_code("model-not-found"):
        dispatch(["explore", str(tmp_path / "missing"), "--no-browser"])
    with raises_code("empty-text"):
        dispatch(["explore", str(run), "--text", " ", "--no-browser"])
    with raises_code("invalid-port"):
        dispatch(["explore", str(run), "--port", "99999", "--no-browser", "--threads", "1"])
