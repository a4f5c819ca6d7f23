"""A file's concrete tree, by LibCST, and where in the text its expressions and statements stand.

Analysis stays with Python's `ast`, ten times cheaper. This is for files that are rewritten: imported only then.
"""

from __future__ import annotations

import ast
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from ddaudit.auditor.sources.source import NEWLINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddaudit.auditor.sources.source import SourceFile

# Far deeper, LibCST's parser overflows the stack, which nothing can catch.
MAX_DEPTH = 1000
# Characters of code near edits. Two such trees take four seconds and 200 MiB.
MAX_SIZE = 80_000
_LAYOUT = (cst.BaseParenthesizableWhitespace, cst.TrailingWhitespace, cst.EmptyLine, cst.Newline, cst.Comment)
_STRINGS = (cst.FormattedString, cst.TemplatedString)
_BLOCKS = (cst.Module, cst.IndentedBlock, cst.SimpleStatementLine, cst.SimpleStatementSuite)

Span: TypeAlias = tuple[int, int]
Node: TypeAlias = cst.CSTNode


class Unproven(ValueError):
    """Why nothing can be said about a whole file."""


class Concrete:
    """A file's concrete tree, and where in the file's text its expressions and statements stand."""

    def __init__(self, source: SourceFile) -> None:
        """Raises Unproven, or what Python's parser raises."""
        if len(source.text) > MAX_SIZE:
            raise Unproven(f"{len(source.text)} characters are too many to prove edits in")
        self.source, self.tree = source, source.tree()
        if _depth(self.tree) > MAX_DEPTH:
            raise Unproven("it is nested too deeply for LibCST")
        # A lone CR at the end is not restored.
        lines = NEWLINE.split(source.text)
        try:
            self.module = cst.parse_module("\n".join(lines))
        except cst.ParserSyntaxError as error:
            raise Unproven(f"LibCST does not parse it, line {error.raw_line}: {error.message}") from error
        restored = self.module.code.split("\n")
        if _squeezed("".join(lines)) != _squeezed("".join(restored)):
            raise Unproven("LibCST does not restore its text")
        # Some blanks are not either: the form feed before a statement, the space in `except (A, B) :`, a blank line at
        # the end. Columns on such a line, and places behind a missing one, are not those of the file.
        pairs = takewhile(lambda pair: _squeezed(pair[0]) == _squeezed(pair[1]), zip(lines, restored, strict=False))
        self._is_restored = [line == again for line, again in pairs]

    @cached_property
    def children(self) -> dict[Node, Sequence[Node]]:
        children: dict[Node, Sequence[Node]] = {}
        pending: list[Node] = [self.module]
        while pending:
            node = pending.pop()
            children[node] = node.children
            pending += children[node]
        return children

    @cached_property
    def spans(self) -> dict[Node, Span]:
        """Offsets of nodes in the file's text, of an expression without its parentheses."""
        starts, spans = self.source.line_starts, {}
        ranges = MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)
        for node, where in (ranges or {}).items():
            first, last = where.start.line - 1, where.end.line - 1
            if last < len(self._is_restored) and self._is_restored[first] and self._is_restored[last]:
                spans[node] = (starts[first] + where.start.column, starts[last] + where.end.column)
        return spans

    @cached_property
    def expressions(self) -> dict[Span, Node]:
        """Expressions outside f-strings by place, with and without each pair of their parentheses."""
        found: dict[Span, Node] = {}
        pending: list[Node] = [self.module]
        while pending:
            node = pending.pop()
            if isinstance(node, cst.BaseExpression) and node in self.spans:
                found[self.spans[node]] = node
                for left, right in zip(reversed(node.lpar), node.rpar, strict=True):
                    if left in self.spans and right in self.spans:
                        found[self.spans[left][0], self.spans[right][1]] = node
            if not isinstance(node, _STRINGS):
                pending += self.children[node]
        return found

    @cached_property
    def statements(self) -> dict[int, list[tuple[Sequence[Node], int]]]:
        """By start: blocks, and the positions in them, of the statements there: whole lines, and parts of lines."""
        found: dict[int, list[tuple[Sequence[Node], int]]] = {}
        for block in self.children:
            if isinstance(block, _BLOCKS):
                for i, statement in enumerate(block.body):
                    if statement in self.spans:
                        found.setdefault(self.spans[statement][0], []).append((block.body, i))
        return found

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        """Offset, -1 where it is not known, and text, in order."""
        found = (node for node in self.children if isinstance(node, cst.Comment))
        return sorted((self.spans.get(node, (-1, -1))[0], node.value) for node in found)

    def nodes(self, start: int, end: int) -> dict[str, Sequence[Node]]:
        """What exactly covers a stretch of text, by kind: an expression, statements within a line, whole lines."""
        found: dict[str, Sequence[Node]] = {}
        if (start, end) in self.expressions:
            found["expression"] = [self.expressions[start, end]]
        for block, first in self.statements.get(start, ()):
            last = first
            while last < len(block) and self.spans.get(block[last], (0, 0))[1] < end:
                last += 1
            if last < len(block) and self.spans.get(block[last], (0, 0))[1] == end:
                kind = "parts of a line" if isinstance(block[first], cst.BaseSmallStatement) else "lines"
                found[kind] = block[first : last + 1]
        return found

    def frame(self, taken: Mapping[Node, str]) -> Iterator[str]:
        """The tree, layout left out, as a list; of each node that is taken only its label."""
        pending: list[Node | None] = [self.module]
        while pending:
            node = pending.pop()
            if node is None:
                yield "end"
            elif node in taken:
                yield from filter(None, [taken[node]])
            elif not isinstance(node, _LAYOUT):
                yield type(node).__name__
                pending += [None, *reversed(self.children[node])]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _depth(tree: ast.AST) -> int:
    """Levels of a syntax tree, counted without recursion."""
    level, count = [tree], 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        count += 1
    return count
