"""Assertions on `InputError` by its stable code, never by its wording."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from qkflow.errors import InputError


def raises_code(code: str) -> AbstractContextManager[pytest.ExceptionInfo[InputError]]:
    """Expect an `InputError` with this code."""
    return pytest.raises(InputError, check=lambda error: error.code == code)
