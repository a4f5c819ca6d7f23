"""What each fix would do to its file by itself, as lines in place of lines: for editors that offer fixes singly."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability
from ddaudit.auditor.fixing.applying import apply_fixes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddaudit.auditor.finding import Finding, Span
    from ddaudit.auditor.sources.source import SourceFile


@dataclass(frozen=True)
class Replacement:
    """Whole lines of a file, or the place between two, and the text to have there."""

    span: Span
    text: str


def preview(findings: Iterable[Finding], sources: Mapping[str, SourceFile]) -> dict[Finding, tuple[Replacement, ...]]:
    """For each finding with a safe fix that is proven, all that the fix changes, imports too. `sources` are the files
    of the repository, by path."""
    found: dict[Finding, tuple[Replacement, ...]] = {}
    others = list(sources.values())
    for finding in findings:
        source = sources.get(finding.path)
        if source is None or finding.fix is None or finding.applicability is not Applicability.SAFE:
            continue
        try:
            applied = apply_fixes(source, [finding], others=others)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            # As in a fork, which leaves such a file as it is.
            continue
        if applied.findings:
            found[finding] = tuple(_replacements(source, applied.source))
    return found


def _replacements(before: SourceFile, after: SourceFile) -> Iterator[Replacement]:
    old, new = ([file.line(n + 1) for n in range(len(file.line_starts))] for file in (before, after))
    starts = [*before.line_starts, len(before.text)]
    for kind, first, last, new_first, new_last in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if kind != "equal":
            yield Replacement(before.span(starts[first], starts[last]), "".join(new[new_first:new_last]))
