from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import yaml

from browser import chromium  # noqa: F401 - a fixture: one per process, Playwright allows no second
from words import WORDS

torch.set_num_threads(1)  # test processes run in parallel
# Tests send these signals. Ctrl-C is ignored in a background job of a script, SIGHUP under nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _restore_process_settings() -> Iterator[None]:
    """Undo the settings of a command that ran inside the test process: threads and denormals."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one cache of prepared corpora per session instead of the user's."""
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = random.Random(0)
    documents = [" ".join(generator.choices(WORDS, k=60)) + "." for _ in range(60)]
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def settings(corpus: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that builds the config of a very small run; arguments override its sections."""

    def make(
        model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **train: Any
    ) -> dict[str, Any]:
        return {
            "model": {"n_layers": 1, "dim": 16, "n_heads": 2, **(model or {})},
            "data": {"corpus": str(corpus), "tokenizer": "bytes", "seq_len": 16, **(data or {})},
            "train": {"steps": 6, "batch_size": 4, "evaluations": 2, "eval_tokens": 256, **train},
        }

    return make


@pytest.fixture
def run_folder(tmp_path: Path, settings: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """Return a function that creates a run folder with the config of a very small run."""

    def make(name: str = "run", **options: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(settings(**options)))
        return folder

    return make
