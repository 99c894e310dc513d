"""F1 of generated answers."""

from __future__ import annotations

import pytest

from qkflow.studies.pace.squad_f1 import squad_f1


def test_squad_f1_normalizes_words() -> None:
    assert squad_f1("The  Denver Broncos!", ["denver broncos"]) == 1
    assert squad_f1("Denver", ["the Denver Broncos", "Carolina"]) == pytest.approx(2 / 3)
    assert squad_f1("", ["something"]) == 0
