"""Whether forwards through a cache of ours may be replayed as CUDA graphs, and what came of it.

Replay asks `replay_wanted`, and says `note_graph` for each graph it captures and `note_refusal` for each that it
cannot. A run listens with `replay_log`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class ReplayLog:
    """What was captured, and what could not be, while it was open."""

    num_graphs: int = 0
    refusals: list[str] = field(default_factory=list)
    """Why a forward runs eagerly after all, each reason once."""


_is_wanted = True
_logs: list[ReplayLog] = []


def replay_wanted() -> bool:
    """Whether caches made now may replay graphs; on a CPU there are none to replay."""
    return _is_wanted


@contextlib.contextmanager
def eager_only(is_eager: bool = True) -> Iterator[None]:
    """Caches made inside run everything eagerly; `is_eager` False leaves things as they were."""
    global _is_wanted
    before, _is_wanted = _is_wanted, _is_wanted and not is_eager
    try:
        yield
    finally:
        _is_wanted = before


@contextlib.contextmanager
def replay_log() -> Iterator[ReplayLog]:
    """Listen to what replay does until the end of the block."""
    log = ReplayLog()
    _logs.append(log)
    try:
        yield log
    finally:
        # By identity: two empty logs are equal.
        _logs[:] = [each for each in _logs if each is not log]


def note_graph() -> None:
    """A graph was captured."""
    for log in _logs:
        log.num_graphs += 1


def note_refusal(reason: str) -> None:
    """A graph could not be captured, or may not be: what runs eagerly instead, and why."""
    for log in _logs:
        if reason not in log.refusals:
            log.refusals.append(reason)
