"""A tree too large to examine as a whole: divided by its folders, each part with facts of its own."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Bytes. Facts and syntax trees take about forty times the text's size: a repository of up to 200,000 lines is
# examined as a whole, a larger tree in parts, of which two and what starts them fit into 300 MiB.
MAX_WHOLE = 8_000_000
MAX_PART = 1_600_000


def divide(sizes: Mapping[str, int]) -> list[list[str]]:
    """Files, by name with their sizes, in parts of whole folders, neighbours together; one part where it is enough."""
    if sum(sizes.values()) <= MAX_WHOLE:
        return [sorted(sizes)]
    parts: list[list[str]] = [[]]
    filled = 0
    for names in _folders(sorted(sizes), sizes, 0):
        added = _size(names, sizes)
        if parts[-1] and filled + added > MAX_PART:
            parts.append([])
            filled = 0
        parts[-1] += names
        filled += added
    return parts


def _folders(names: list[str], sizes: Mapping[str, int], depth: int) -> Iterator[list[str]]:
    """All of a folder where that is not too large, or else what is in it, likewise."""
    if len(names) == 1 or _size(names, sizes) <= MAX_PART:
        yield names
        return
    inner: dict[str, list[str]] = defaultdict(list)
    for name in names:
        steps = name.split("/")
        inner[name if len(steps) == depth + 1 else steps[depth]].append(name)
    for below in inner.values():
        yield from _folders(below, sizes, depth + 1)


def _size(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in names)
