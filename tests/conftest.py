from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import yaml

from words import WORDS

torch.set_num_threads(1)  # tests run side by side; one thread each


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """A command run inside a test sets threads and denormals of the whole process: undone for the next."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    documents = [" ".join(chance.choices(WORDS, k=60)) + "." for _ in range(60)]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """One cache of prepared sets for the whole session, and none of the user's."""
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def settings(corpus):
    """The config of a very small run; sections given here are merged in."""

    def make(model=None, data=None, **train):
        return {
            "model": {"n_layers": 1, "dim": 16, "n_heads": 2, **(model or {})},
            "data": {"corpus": str(corpus), "tokenizer": "bytes", "seq_len": 16, **(data or {})},
            "train": {"steps": 6, "batch_size": 4, "evaluations": 2, "eval_tokens": 256, **train},
        }

    return make


@pytest.fixture
def run_folder(tmp_path, settings):
    """A folder with the config of a very small run in it."""

    def make(name="run", **options):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(settings(**options)))
        return folder

    return make
