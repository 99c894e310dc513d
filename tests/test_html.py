from __future__ import annotations

import json

import pytest

from qkflow.html import PlotlySection, json_for_script, plotly_page


def test_json_cannot_close_its_script_element() -> None:
    value = {"a": "</script><!--&amp;", "b": [1.5, None, "é"]}
    text = json_for_script(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_nan_and_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_for_script(value)


def test_plotly_page_is_self_contained_and_escaped() -> None:
    from plotly.graph_objects import Figure, Scatter

    sections = [PlotlySection(f"<{i}>", "a & b", Figure(Scatter(x=[0, 1], y=[i, 2]))) for i in range(2)]
    page = plotly_page("<title>", sections, intro="1 < 2")
    assert page.count('class="plotly-graph-div"') == 2
    assert page.count("Plotly.newPlot") >= 2
    assert "<script src" not in page
    assert all(text in page for text in ("&lt;title&gt;", "&lt;1&gt;", "a &amp; b", "1 &lt; 2"))
