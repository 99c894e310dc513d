from __future__ import annotations

from qkflow.errors import InputError, unknown


def test_error_line_round_trip() -> None:
    error = InputError("seq_len 1 is too short [see docs]", code="invalid-seq-len")
    assert error.to_line() == "qkflow: seq_len 1 is too short [see docs] [invalid-seq-len]"
    parsed = InputError.from_line(error.to_line())
    assert (str(parsed), parsed.code) == (str(error), error.code)


def test_error_line_of_any_other_text_is_the_message() -> None:
    assert str(InputError.from_line("Killed")) == "Killed"


def test_unknown_value_that_is_no_text() -> None:
    error = unknown("preset", None, ("tiny", "small"))
    assert str(error).startswith("unknown preset 'None'")
    assert error.code == "unknown-preset"
