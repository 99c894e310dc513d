from __future__ import annotations

import json

import pytest

from qkflow.html import json_for_script


def test_json_cannot_close_its_script_element() -> None:
    value = {"a": "</script><!--&amp;", "b": [1.5, None, "é"]}
    text = json_for_script(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_nan_and_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_for_script(value)
