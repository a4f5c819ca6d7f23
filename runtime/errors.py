"""The one exception that a run raises for what its user can mend."""

from __future__ import annotations


class RunError(Exception):
    """What was asked and what was found, with what to do about it in `remedy`."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy
