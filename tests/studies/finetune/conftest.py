"""Small GLUE files that a tiny model learns in a few steps: the class follows from one word."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from words import WORDS

SIZES = {"train": 96, "dev": 40}


def write_sst2(folder: Path) -> None:
    """Write SST-2 files whose label is the first letter of the last word: `yes` or `no`."""
    folder = folder / "SST-2"
    folder.mkdir(parents=True)
    for split, size in SIZES.items():
        rng = random.Random(split)
        rows = ["sentence\tlabel"]
        for index in range(size):
            words = rng.choices(WORDS, k=2)
            rows.append(f"{' '.join(words)} {('nnnn', 'yyyy')[index % 2]}\t{index % 2}")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder)
    return folder
