"""HTML helpers shared by every page that qkflow writes."""

from __future__ import annotations

import json
from typing import Any


def json_for_script(value: Any) -> str:
    r"""Return `value` as JSON for a `<script type="application/json">` element.

    `<`, `>` and `&` are written as `\uXXXX`, so that no string in `value` can close the element. NaN and
    infinity raise ValueError: JSON has neither.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
