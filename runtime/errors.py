"""The one exception that a run raises for what its user can mend."""

from __future__ import annotations

_LONGEST = 1000
"""Characters of another's error that are passed on."""


class RunError(Exception):
    """What was asked and what was found, with what to do about it in `remedy`."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def describe(error: BaseException) -> str:
    """Kind and words of an error that others raised: they may be a book, or fail to be told at all."""
    try:
        text = f"{type(error).__name__}: {error}".strip()
    except Exception:
        text = type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
