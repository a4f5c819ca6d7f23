"""Toy rules for tests of fixing: what is replaced is written in the test, not in a rule."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability, Confidence, Edit, Finding, Fix, Import, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddaudit.auditor.sources.source import SourceFile

MAKE_CACHE = Import("ddaudit.runtime", "make_cache")


def finding(
    source: SourceFile,
    edits: tuple[Edit, ...],
    *,
    code: str = "TOY1",
    imports: tuple[Import, ...] = (),
    applicability: Applicability = Applicability.SAFE,
    reason: str = "a toy",
) -> Finding:
    """A finding over what `edits` span, which they fix; with no edits one at the start, without a fix."""
    start, end = (min(e.start for e in edits), max(e.end for e in edits)) if edits else (0, 0)
    return Finding(
        code=code,
        slug="toy",
        kind="toy",
        path=source.path,
        span=source.span(start, end),
        expr=source.text[start:end],
        message="a toy",
        severity=Severity.ERROR,
        confidence=Confidence.PROVEN,
        evidence=(),
        fix=Fix(edits, applicability, reason, imports) if edits else None,
        no_fix_reason="" if edits else reason,
    )


def edit(source: SourceFile, old: str, new: str, nth: int = 0) -> Edit:
    """Replace the `nth` occurrence of `old`."""
    start = -1
    for _ in range(nth + 1):
        start = source.text.index(old, start + 1)
    return Edit(start, start + len(old), new)


@dataclass(frozen=True)
class Rename:
    """Calls of a function become calls of another one, the whole call replaced from its text in the file."""

    old: str
    new: str
    code: str = "TOY1"
    imports: tuple[Import, ...] = ()
    applicability: Applicability = Applicability.SAFE

    def __call__(self, source: SourceFile) -> Iterator[Finding]:
        for node in ast.walk(source.parse()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == self.old:
                start = source.offset(node.lineno, node.col_offset)
                end = source.offset(node.end_lineno or 0, node.end_col_offset or 0)
                called = start + len(self.old)
                replacement = Edit(start, end, self.new + source.text[called:end])
                yield finding(
                    source,
                    (replacement,),
                    code=self.code,
                    imports=self.imports,
                    applicability=self.applicability,
                )


def scanner(*rules: Callable[[SourceFile], Iterator[Finding]]) -> Callable[[Mapping[str, SourceFile]], list[Finding]]:
    """A scan over sources in memory with these rules; files that do not parse are passed over."""

    def scan(sources: Mapping[str, SourceFile]) -> list[Finding]:
        found: list[Finding] = []
        for _, source in sorted(sources.items()):
            try:
                source.parse()
            except SyntaxError:
                continue
            found += [item for rule in rules for item in rule(source)]
        return sorted(found, key=lambda item: item.sort_key)

    return scan
