"""A tree too large to examine as a whole: divided by its folders, the parts examined side by side."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddaudit.auditor.sources.source import SourceFile

Result = TypeVar("Result")

# Characters. Facts and syntax trees take about sixty times the text's size: a repository of up to 200,000 lines is
# examined as a whole, a larger tree in parts that fit into 300 MiB each.
MAX_WHOLE = 8_000_000
MAX_PART = 2_500_000


def divide(sources: Mapping[str, SourceFile]) -> list[dict[str, SourceFile]]:
    """The files in parts of whole folders, neighbours together; one part for a tree that is not too large."""
    if _size(list(sources), sources) <= MAX_WHOLE:
        return [dict(sources)]
    parts: list[dict[str, SourceFile]] = [{}]
    size = 0
    for paths in _folders(sorted(sources), sources, 0):
        added = _size(paths, sources)
        if parts[-1] and size + added > MAX_PART:
            parts.append({})
            size = 0
        parts[-1].update((path, sources[path]) for path in paths)
        size += added
    return parts


def _folders(paths: list[str], sources: Mapping[str, SourceFile], depth: int) -> Iterator[list[str]]:
    """All of a folder where that is not too large, or else what is in it, likewise."""
    if len(paths) == 1 or _size(paths, sources) <= MAX_PART:
        yield paths
        return
    inner: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        names = path.split("/")
        inner[path if len(names) == depth + 1 else names[depth]].append(path)
    for below in inner.values():
        yield from _folders(below, sources, depth + 1)


def _size(paths: list[str], sources: Mapping[str, SourceFile]) -> int:
    return sum(len(sources[path].text) for path in paths)


def scan_parts(
    scan: Callable[[Mapping[str, SourceFile]], Result], parts: Sequence[Mapping[str, SourceFile]]
) -> list[Result]:
    """Results in the order of the parts, whichever ends first: several parts share the cores."""
    if len(parts) == 1:
        return [_without_collecting(scan, parts[0])]
    with ProcessPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        return list(pool.map(partial(_leaving_nothing, scan), parts))


def _without_collecting(scan: Callable[[Mapping[str, SourceFile]], Result], part: Mapping[str, SourceFile]) -> Result:
    # Syntax trees are millions of live objects: collecting garbage among them takes longer than the scan.
    collects = gc.isenabled()
    gc.disable()
    try:
        return scan(part)
    finally:
        if collects:
            gc.enable()


def _leaving_nothing(scan: Callable[[Mapping[str, SourceFile]], Result], part: Mapping[str, SourceFile]) -> Result:
    """In a worker, which goes on with another part: what is done with must not stay beside it."""
    result = _without_collecting(scan, part)
    gc.collect()
    return result
