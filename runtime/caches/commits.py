"""Lets a meter see where a cache is committed: the calls that cut it back or keep the accepted nodes."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Watcher = Callable[[], contextlib.AbstractContextManager[None]]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_watchers: list[Watcher] = []


def commits(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Mark `function` as one that commits; each call of it runs inside the watcher's context, if there is one."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not _watchers:
            return function(*args, **kwargs)
        with _watchers[-1]():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def watched_commits(watcher: Watcher) -> Iterator[None]:
    """Until the end of the block, `watcher()` is entered around each call that commits."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
