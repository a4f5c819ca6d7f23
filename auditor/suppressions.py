"""Comments that keep a finding out of the count: `# ddaudit: ignore[RULE] reason`, and `# noqa: CODE` of ours.

On any physical line of a statement, or alone on a line before it, such a comment holds for what the statement begins
with: of a compound one the header, not the body. `ignore-file` holds for the whole file.
"""

from __future__ import annotations

import re
import tokenize
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ddaudit.auditor.rule import all_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddaudit.auditor.finding import Finding
    from ddaudit.auditor.sources.source import SourceFile

MARKERS = ("ddaudit:", "DDA")
"""Without either of these a file has no such comment. Of other tools' `noqa` there may be many."""
# Several may share a comment, which then holds several `#`.
PART = re.compile(
    r"""\#\s*(?:
          ddaudit:\s*(?P<form>[\w-]*)\s*(?:\[(?P<names>[^\]\#]*)\])?(?P<reason>[^\#]*)
        | (?i:noqa)\s*:\s*(?P<codes>[A-Za-z]+\d+(?:[\s,]+[A-Za-z]+\d+)*)
    )""",
    re.VERBOSE,
)
_BETWEEN = frozenset(
    {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.COMMENT}
)


@dataclass(frozen=True)
class Suppression:
    """One such comment, or the part of a comment that is one."""

    start: int
    end: int
    """Code-point offsets in the decoded text."""
    form: str
    """`ignore`, `ignore-file` or `noqa`; anything else is not understood and suppresses nothing."""
    names: tuple[str, ...]
    """As written, those of other tools too; without any it holds for every rule."""
    reason: str
    lines: range
    """Those on which a finding has to begin."""
    held: frozenset[str] = frozenset()
    """Codes of what it suppressed, once that is known."""

    @property
    def is_understood(self) -> bool:
        return self.form in ("ignore", "ignore-file", "noqa")

    def holds(self, finding: Finding) -> bool:
        if not self.is_understood or finding.span.line not in self.lines:
            return False
        return not self.names or finding.code in map(code_of, self.names)


@cache
def code_of(name: str) -> str:
    """Code of the rule with this code or slug; empty where there is none."""
    return next((rule.code for rule in all_rules() if name.upper() == rule.code or name.lower() == rule.slug), "")


def suppressions(source: SourceFile) -> tuple[Suppression, ...]:
    """Those of a file, in order."""
    if not any(marker in source.text for marker in MARKERS):
        return ()
    return tuple(sorted(_read(source), key=lambda found: found.start))


def suppress(
    findings: Iterable[Finding], comments: Sequence[Suppression]
) -> tuple[list[Finding], tuple[Suppression, ...]]:
    """The findings, marked where a comment holds for them, and the comments with what each suppressed."""
    marked: list[Finding] = []
    held: dict[Suppression, set[str]] = {comment: set() for comment in comments}
    for finding in findings:
        holding = [comment for comment in comments if comment.holds(finding)]
        for comment in holding:
            held[comment].add(finding.code)
        marked.append(replace(finding, suppressed=holding[0].reason) if holding else finding)
    return marked, tuple(replace(comment, held=frozenset(codes)) for comment, codes in held.items())


def _read(source: SourceFile) -> Iterator[Suppression]:
    for start, text, lines, is_alone in _comments(source):
        for match in PART.finditer(text):
            names = tuple(re.findall(r"[^\s,]+", match["names"] or match["codes"] or ""))
            form = match["form"] if match["codes"] is None else "noqa"
            if form == "noqa" and not any(name.startswith("DDA") for name in names):
                continue
            at = start + match.start()
            line = source.span(at, at).line
            over = range(line, line + 1) if form == "noqa" and is_alone else lines
            yield Suppression(
                start=at,
                end=at + len(match.group().rstrip()),
                form=form,
                names=names,
                reason=(match["reason"] or "").strip(),
                lines=range(1, len(source.line_starts) + 1) if form == "ignore-file" else over,
            )


def _comments(source: SourceFile) -> Iterator[tuple[int, str, range, bool]]:
    """Offset and text of each comment, the lines of its statement or else the next, and whether it stands alone."""
    waiting: list[tuple[int, str, bool]] = []
    first = 0
    try:
        for token in source.tokens():
            if token.type == tokenize.COMMENT:
                waiting.append((source.line_starts[token.start[0] - 1] + token.start[1], token.string, not first))
            elif token.type == tokenize.NEWLINE:
                lines = range(first, token.start[0] + 1)
                yield from ((start, text, lines, is_alone) for start, text, is_alone in waiting)
                waiting, first = [], 0
            elif token.type not in _BETWEEN:
                first = first or token.start[0]
    except (tokenize.TokenError, SyntaxError):
        # The parser took the file and the tokenizer does not: what follows is reported, comment or none.
        pass
    yield from ((start, text, range(0), is_alone) for start, text, is_alone in waiting)
