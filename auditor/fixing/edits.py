"""Edits of a text: made, compared, and followed, so that a place in one text is found in the other."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Edit
from ddaudit.auditor.sources.source import NEWLINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddaudit.auditor.sources.source import SourceFile


def splice(source: SourceFile, edits: Iterable[Edit]) -> SourceFile:
    """`source` with edits that do not overlap made to its text; every other character stays."""
    parts, at = [], 0
    for edit in sorted(edits):
        parts += [source.text[at : edit.start], edit.replacement]
        at = edit.end
    return source.with_text("".join(parts) + source.text[at:])


def overlap(one: Edit, other: Edit) -> bool:
    """Whether two edits share text, or insert at one place, where their order would be a matter of chance."""
    return (one.start, one.end) == (other.start, other.end) or (one.start < other.end and other.start < one.end)


def collides(edit: Edit, edits: Sequence[Edit]) -> bool:
    """Whether `edit` overlaps one of `edits`, which are sorted and do not overlap."""
    at = bisect_left(edits, edit)
    return any(overlap(edit, other) for other in edits[max(at - 1, 0) : at + 1])


def with_newlines(source: SourceFile, edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """The edits with the file's own newline in their text."""
    return tuple(replace(edit, replacement=NEWLINE.sub(source.newline, edit.replacement)) for edit in edits)


def trimmed(source: SourceFile, edit: Edit) -> Edit:
    """The edit without what it leaves as it was at either end: offsets in that text can be followed."""
    old = source.text[edit.start : edit.end]
    head = _num_shared(old, edit.replacement)
    tail = _num_shared(old[head:][::-1], edit.replacement[head:][::-1])
    return Edit(edit.start + head, edit.end - tail, edit.replacement[head : len(edit.replacement) - tail])


def _num_shared(one: str, other: str) -> int:
    """Length of the common start of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def offset_before(offset: int, steps: Sequence[Sequence[Edit]]) -> int:
    """Where an offset of the last text was in the first. Inside a replacement: where the replaced text began."""
    for edits in reversed(steps):
        shift = 0
        for edit in sorted(edits):
            if offset < edit.start + shift:
                break
            if offset < edit.start + shift + len(edit.replacement):
                offset = edit.start + shift
                break
            shift += len(edit.replacement) - (edit.end - edit.start)
        offset -= shift
    return offset


def offset_after(offset: int, steps: Sequence[Sequence[Edit]]) -> int:
    """Where an offset of the first text is in the last. Inside replaced text: where its replacement begins."""
    for edits in steps:
        shift = 0
        for edit in sorted(edits):
            if offset < edit.end or edit.start > offset:
                offset = min(offset, edit.start)
                break
            shift += len(edit.replacement) - (edit.end - edit.start)
        offset += shift
    return offset
