"""Corpora on disk for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

from qkflow.data import synthetic


def write_corpus(path: Path, n_documents: int, seed: int = 0) -> Path:
    """Write a JSONL file of synthetic documents with an old time stamp, so that the cache indexes it."""
    texts = synthetic.parse_options(
        "patterns", f"documents={n_documents},words=100,seed={seed}"
    ).generate_documents()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    os.utime(path, (1e9, 1e9 + seed))
    return path
