"""Why something cannot be replayed and runs eagerly instead."""

from __future__ import annotations

import warnings
from typing import Generic, TypeVar

import torch

from ddaudit.runtime.caches.mode import note_refusal

_Key = TypeVar("_Key")
_PIECE = 2**22


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
    # By pieces: as float64 the logits of a window of 64 take half a gigabyte.
    pairs = zip(output.flatten().split(_PIECE), expected.flatten().split(_PIECE), strict=True)
    squares = [((a.double() - b.double()).square().sum(), b.double().square().sum()) for a, b in pairs]
    apart, whole = (torch.stack(sums).sum().sqrt() for sums in zip(*squares, strict=True))
    return float(apart / whole)
