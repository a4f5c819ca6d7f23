"""Leaves out of a proof what no edit is near: runs of whole statements that the text before and the text after share.

LibCST takes a thousand times a text's size and seconds for a thousand lines. A run of statements that no edit touches,
whole lines of one block in both texts, is the same code in both. With one `pass` in its place, the two trees differ
exactly where they did.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from ddaudit.auditor.finding import Edit
from ddaudit.auditor.fixing.edits import splice
from ddaudit.auditor.sources.source import NEWLINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddaudit.auditor.sources.source import SourceFile

MIN_RUN = 200
"""Characters. A shorter run is as soon parsed as left out."""


class _Statement(NamedTuple):
    """A statement with its decorators, by offsets."""

    kind: type[ast.AST]
    start: int
    end: int


def reduced(
    before: SourceFile, edits: Sequence[Edit], after: SourceFile
) -> tuple[SourceFile, tuple[Edit, ...], SourceFile]:
    """Text before, edits in their order, and text after, without what proves nothing. `edits` made `after` of `before`.

    Raises what Python's parser raises.
    """
    places = {item: (i, j) for i, block in enumerate(_blocks(after)) for j, item in enumerate(block)}
    shifts = _Shifts(edits)
    gone: list[Edit] = []
    end = 0
    for run in sorted(_untouched(before, edits), key=lambda run: (run[0].start, -run[-1].end)):
        first, last = _line_start(before, run[0].start), _line_end(before, run[-1].end)
        by = shifts.at(first)
        moved = [places.get(_Statement(item.kind, item.start + by, item.end + by)) for item in run]
        block, place = moved[0] or (-1, -1)
        if first >= end and last - first >= MIN_RUN and moved == [(block, place + i) for i in range(len(run))]:
            end = last
            newline = NEWLINE.search(before.text, run[-1].end, last)
            line = before.text[first : run[0].start] + "pass" + (newline.group() if newline else "")
            gone.append(Edit(first, last, line))
    short, shifts = splice(before, gone), _Shifts(gone)
    kept = tuple(
        Edit(edit.start + shifts.at(edit.start), edit.end + shifts.at(edit.start), edit.replacement) for edit in edits
    )
    return short, kept, splice(short, kept)


def _untouched(source: SourceFile, edits: Sequence[Edit]) -> Iterator[list[_Statement]]:
    """Runs of statements of one block that have their lines to themselves and no edit in them."""
    touched = sorted((edit.start, edit.end) for edit in edits)
    for block in _blocks(source):
        for is_free, run in groupby(block, lambda item: _is_free(source, item, touched)):
            if is_free:
                yield list(run)


def _is_free(source: SourceFile, item: _Statement, touched: Sequence[tuple[int, int]]) -> bool:
    first, last = _line_start(source, item.start), _line_end(source, item.end)
    # Edits do not overlap: of those that begin by the end of these lines the last one ends last.
    at = bisect_right(touched, (last, len(source.text)))
    if at and touched[at - 1][1] >= first:
        return False
    rest = source.text[item.end : last].strip()
    # A chain's `elif` is a statement that cannot stand alone.
    is_alone = not source.text[first : item.start].strip() and (not rest or rest[0] == "#")
    return is_alone and not source.text.startswith("elif", item.start)


def _blocks(source: SourceFile) -> Iterator[list[_Statement]]:
    pending: list[ast.AST] = [source.tree()]
    while pending:
        for _, value in ast.iter_fields(pending.pop()):
            if not isinstance(value, list) or not value:
                continue
            if isinstance(value[0], ast.stmt | ast.ExceptHandler | ast.match_case):
                pending += value
            if isinstance(value[0], ast.stmt):
                yield [_placed(source, item) for item in value]


def _placed(source: SourceFile, node: ast.stmt) -> _Statement:
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = source.offset(node.lineno, node.col_offset)
    for decorator in getattr(node, "decorator_list", ()):
        # The sign stands before it, on its line or on one before.
        at = source.text.rfind("@", 0, source.offset(decorator.lineno, decorator.col_offset))
        start = min(start, at)
    return _Statement(type(node), start, source.offset(node.end_lineno, node.end_col_offset))


def _line_start(source: SourceFile, offset: int) -> int:
    return source.line_starts[bisect_right(source.line_starts, offset) - 1]


def _line_end(source: SourceFile, offset: int) -> int:
    """After the line's newline."""
    following = bisect_right(source.line_starts, offset)
    return source.line_starts[following] if following < len(source.line_starts) else len(source.text)


class _Shifts:
    """How far edits move what stands behind them."""

    def __init__(self, edits: Iterable[Edit]) -> None:
        inner = sorted(edits)
        self._ends = [edit.end for edit in inner]
        self._by = [0, *accumulate(len(edit.replacement) - (edit.end - edit.start) for edit in inner)]

    def at(self, offset: int) -> int:
        return self._by[bisect_right(self._ends, offset)]
