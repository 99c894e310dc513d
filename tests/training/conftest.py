"""A corpus that the tests make themselves, and runs on it that take a second."""

import json
import random
from pathlib import Path

import pytest
import torch
import yaml

from words import WORDS


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


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
            "model": {"layers": 1, "width": 16, "heads": 2, **(model or {})},
            "data": {"corpus": str(corpus), "tokenizer": "bytes", "length": 16, **(data or {})},
            "train": {"steps": 6, "batch": 4, "evaluations": 2, "eval_tokens": 256, **train},
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
