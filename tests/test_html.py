from __future__ import annotations

import base64
import json
import zlib

import pytest

from qkflow.html import Card, cards, csp_hash, deflate_base64, json_for_script


def test_json_cannot_close_its_script_element() -> None:
    value = {"a": "</script><!--&amp;", "b": [1.5, None, "é"]}
    text = json_for_script(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_nan_and_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_for_script(value)


def test_deflated_text_is_unpacked_by_zlib() -> None:
    text = "figures \N{SNOWMAN} " * 100
    packed = deflate_base64(text)
    assert len(packed) < len(text) / 5
    assert zlib.decompress(base64.b64decode(packed)).decode() == text


def test_csp_hash_is_the_digest_of_the_script() -> None:
    # the example of the specification (Content Security Policy Level 3)
    assert csp_hash("doSomething();") == "'sha256-RFWPLDbv2BY+rCkDzsE+0fr8ylGr2R2faWMhq4lfEQc='"


def test_cards_are_escaped() -> None:
    page = cards([Card("<b>", "1 < 2 & 3", kind="no verdict", symbol="?", number="<i>", color='"red')])
    assert "<b>" not in page
    assert "<i>" not in page
    assert "1 &lt; 2 &amp; 3" in page
    assert 'class="card no-verdict"' in page
    assert '--variant: &quot;red"' in page
