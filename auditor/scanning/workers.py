"""Examines parts side by side, each in a process of its own: one that dies costs the file it was at, not the run."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ddaudit.auditor.facts.exhaustion import EXHAUSTION
from ddaudit.auditor.sources.source import Skipped, SkipReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

Result = TypeVar("Result")
# Examines the files of these names, telling which it is at.
Work: TypeAlias = "Callable[[Sequence[str], Callable[[str], None]], Result]"

MAX_WORKERS = 8
SILENT_S = 120
"""A worker that has been at one file for so long is at it for ever."""
MAX_DEATHS = 100
"""Of one run: something else is wrong then."""


@dataclass
class _Worker:
    """A process at work on a part."""

    names: list[str]
    process: BaseProcess
    heard: Connection
    at: str = ""
    since: float = field(default_factory=time.monotonic)


def num_workers() -> int:
    """One for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


class Workers(Generic[Result]):
    """Runs `work` on parts, so many at a time."""

    def __init__(self, work: Work[Result], workers: int) -> None:
        self.work, self.workers = work, workers
        # Where it can be had, a fork starts in milliseconds and shares what is loaded already.
        self.context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self.running: list[_Worker] = []
        self.results: list[Result] = []
        """Of all parts, in no order."""
        self.lost: list[Skipped] = []
        """Files at which a worker died."""
        self.num_halved = 0
        """Parts that were examined in halves."""

    def run(self, parts: Sequence[Sequence[str]]) -> None:
        """Where a worker dies, the rest of its part is examined again without the file that it was at; where it is
        not known which file that was, in halves."""
        pending = deque(list(part) for part in parts if part)
        try:
            while pending or self.running:
                while pending and len(self.running) < self.workers:
                    self.running.append(self._start(pending.popleft()))
                heard = wait([worker.heard for worker in self.running], timeout=1)
                for worker in list(self.running):
                    if worker.heard in heard:
                        pending += self._listen(worker)
                    elif time.monotonic() - worker.since > SILENT_S:
                        worker.process.kill()
                        pending += self._lose(worker, SkipReason.TIMEOUT, f"not done after {SILENT_S} seconds")
        finally:
            for worker in self.running:
                worker.process.kill()
                worker.process.join()

    def _start(self, names: list[str]) -> _Worker:
        heard, told = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_work, args=(self.work, names, told), daemon=True)
        process.start()
        told.close()
        return _Worker(names, process, heard)

    def _listen(self, worker: _Worker) -> list[list[str]]:
        """Take what the worker says; returns what is to be examined again."""
        try:
            message, content = worker.heard.recv()
        except (EOFError, OSError):
            worker.process.join()
            return self._lose(worker, SkipReason.CRASH, f"the worker ended with {worker.process.exitcode}")
        worker.since = time.monotonic()
        if message == "at":
            worker.at = content
            return []
        self._end(worker)
        if message == "fault":
            raise RuntimeError(content)
        self.results.append(content)
        return []

    def _lose(self, worker: _Worker, reason: SkipReason, detail: str) -> list[list[str]]:
        self._end(worker)
        names, at = worker.names, worker.at
        if len(self.lost) >= MAX_DEATHS:
            self.lost += [Skipped(name, reason, "too many workers ended before") for name in names]
            return []
        if not at and len(names) > 1:
            middle = len(names) // 2
            self.num_halved += 1
            return [names[:middle], names[middle:]]
        at = at or names[0]
        self.lost.append(Skipped(at, reason, detail))
        return [rest] if (rest := [name for name in names if name != at]) else []

    def _end(self, worker: _Worker) -> None:
        worker.process.join()
        worker.heard.close()
        self.running.remove(worker)


def _work(work: Work[Result], names: list[str], told: Connection) -> None:
    """In the worker: examine, and say so."""
    # An interrupt reaches the whole group of processes: the parent says so, once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # A process that ends with its part has no use for memory set free.
    gc.disable()
    with contextlib.suppress(BrokenPipeError):
        try:
            result = work(names, lambda name: told.send(("at", name)))
        except EXHAUSTION:
            os._exit(1)
        except Exception:
            told.send(("fault", traceback.format_exc()))
        else:
            told.send(("done", result))
    # Neither takes the trees apart, which would take as long again as building them.
    told.close()
    os._exit(0)
