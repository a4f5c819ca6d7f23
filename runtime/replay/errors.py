"""Why something cannot be replayed and runs eagerly instead."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Generic, TypeVar

from ddaudit.runtime.caches.mode import note_refusal

if TYPE_CHECKING:
    import torch

_Key = TypeVar("_Key")


class NotReplayable(Exception):
    """The reason, as a clause for a warning: what was found, in the model's or the code's own terms."""


class Refusals(Generic[_Key]):
    """What is not replayed any more. Each reason is told once, as a warning and to the run's log."""

    def __init__(self) -> None:
        self._reasons: dict[_Key, str] = {}

    def __contains__(self, key: _Key) -> bool:
        return key in self._reasons

    def add(self, key: _Key, reason: str, what: str) -> None:
        """Refuse `key` from now on; `what` says what runs eagerly instead."""
        is_new = reason not in self._reasons.values()
        self._reasons[key] = reason
        if is_new:
            text = f"{what}: {reason}"
            note_refusal(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def relative_difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    """`||output - expected|| / ||expected||` in float64. Not-a-number compares as neither small nor large."""
    return float((output.double() - expected.double()).norm() / expected.double().norm())
