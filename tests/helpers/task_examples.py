"""Examples of tasks, as tests compare them."""

from __future__ import annotations

from qkflow.data.tasks import Example


def marked_texts(example: Example) -> list[list[str]]:
    """Return the text spans that each annotator marked."""
    return [[example.text[slice(*span)] for span in spans] for spans in example.rationales]
