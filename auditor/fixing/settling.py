"""Fixes all files, pass after pass, until none is left to apply; what cannot be fixed soundly keeps its bytes."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability, Finding
from ddaudit.auditor.fixing.applying import Applied, Left, apply_fixes
from ddaudit.auditor.fixing.edits import offset_after, offset_before

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddaudit.auditor.finding import Edit, Span
    from ddaudit.auditor.sources.source import SourceFile

MAX_PASSES = 10


@dataclass(frozen=True)
class Fixed:
    """A finding that is gone, where it stood in the source."""

    finding: Finding
    how: str
    """`edited` by its own fix, or `follows` from the fixes of others."""
    by: tuple[str, ...] = ()
    """Codes of those others, where it follows: of one, unless nothing tells them apart."""


@dataclass(frozen=True)
class Settled:
    """What became of all sources: nothing is left that may be applied."""

    sources: dict[str, SourceFile]
    """Every path that was given, changed or not."""
    fixed: tuple[Fixed, ...]
    left: tuple[Left, ...]
    errors: dict[str, str]
    """Files left as they were because fixing them failed, and how: faults of the tool, not of the source."""
    parser_only: frozenset[str]
    """Changed files that this Python could not compile before either: only the parser has read the result."""


def settle(
    sources: Mapping[str, SourceFile],
    scan: Callable[[Mapping[str, SourceFile]], Sequence[Finding]],
    *,
    unsafe: bool = False,
    locked: Mapping[str, str] | None = None,
) -> Settled:
    """Scan and apply until no fix is left. A file that cannot be fixed soundly stays as it was.

    Files in `locked` stay too, each for the reason given. `scan` gives the findings of all sources; it runs again
    after each pass, because facts of one file serve others.
    """
    wanted = {Applicability.SAFE, Applicability.UNSAFE} if unsafe else {Applicability.SAFE}
    errors: dict[str, str] = {}
    while True:
        attempt = _Attempt(sources, wanted, errors, locked or {})
        attempt.run(scan)
        if not attempt.failed:
            return attempt.result()
        # Facts cross files, so the others start again beside the file that now stays as it is.
        errors |= attempt.failed


@dataclass
class _Attempt:
    """All passes over all files, those in `errors` and `locked` left alone."""

    original: Mapping[str, SourceFile]
    wanted: set[Applicability]
    errors: dict[str, str]
    locked: Mapping[str, str]
    failed: dict[str, str] = field(default_factory=dict)
    sources: dict[str, SourceFile] = field(default_factory=dict)
    steps: dict[str, list[tuple[Edit, ...]]] = field(default_factory=lambda: defaultdict(list))
    before: Sequence[Finding] = ()
    after: Sequence[Finding] = ()
    edited: list[Finding] = field(default_factory=list)
    refused: dict[Finding, str] = field(default_factory=dict)

    def run(self, scan: Callable[[Mapping[str, SourceFile]], Sequence[Finding]]) -> None:
        self.sources = dict(self.original)
        codes: dict[str, list[str]] = defaultdict(list)
        for number in range(MAX_PASSES + 1):
            self.after = scan(self.sources)
            if not number:
                self.before = self.after
            passed: dict[str, Applied] = {}
            self.refused = {}
            for path, found in self._applicable().items():
                try:
                    applied = apply_fixes(self.sources[path], found, self.original[path], self.sources.values())
                except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                    self.failed[path] = f"its fixes cannot be proven: {error}"
                    continue
                self.refused |= {left.finding: left.reason for left in applied.refused}
                if applied.findings:
                    passed[path] = applied
            if not passed:
                break
            for path, applied in passed.items():
                codes[path] += {finding.code for finding in applied.findings}
                if number == MAX_PASSES:
                    often = {code for code, count in Counter(codes[path]).items() if count > 2} or set(codes[path])
                    fighting = ", ".join(sorted(often))
                    self.failed[path] = f"not settled after {MAX_PASSES} passes of the fixes of {fighting}"
                elif applied.source.text == self.sources[path].text:
                    fighting = ", ".join(sorted({finding.code for finding in applied.findings}))
                    self.failed[path] = f"the fix of {fighting} changes nothing"
                else:
                    self._keep(path, applied)
            if self.failed:
                return

    def _applicable(self) -> dict[str, list[Finding]]:
        by_path: dict[str, list[Finding]] = defaultdict(list)
        for finding in self.after:
            kept = finding.path in self.errors or finding.path in self.locked
            if finding.fix and finding.applicability in self.wanted and not kept:
                by_path[finding.path].append(finding)
        return by_path

    def _keep(self, path: str, applied: Applied) -> None:
        if reason := _fault(self.original[path], applied.source):
            self.failed[path] = reason
            return
        for finding in applied.findings:
            self.edited.append(replace(finding, span=self._span_before(finding)))
        self.steps[path] += applied.steps
        self.sources[path] = applied.source

    def _span_before(self, finding: Finding) -> Span:
        """Where what stands there now stood in the source."""
        steps = self.steps[finding.path]
        start = offset_before(finding.span.start, steps)
        return self.original[finding.path].span(start, max(start, offset_before(finding.span.end, steps)))

    def result(self) -> Settled:
        left = tuple(Left(finding, self._why_left(finding), self._span_before(finding)) for finding in self.after)
        fixed = [Fixed(finding, "edited") for finding in self.edited]
        fixed += [Fixed(finding, "follows", self._mended_by(finding)) for finding in self._followed()]
        changed = {path: source for path, source in self.sources.items() if source.text != self.original[path].text}
        return Settled(
            sources=self.sources,
            fixed=tuple(sorted(fixed, key=lambda item: item.finding.sort_key)),
            left=left,
            errors=dict(self.errors),
            parser_only=frozenset(path for path in changed if not _compiles(self.original[path])),
        )

    def _why_left(self, finding: Finding) -> str:
        if finding.path in self.errors:
            return f"the file was left as it was: {self.errors[finding.path]}"
        if finding in self.refused:
            return self.refused[finding]
        if finding.fix is None:
            return finding.no_fix_reason or "no edit can be made by rule"
        if finding.path in self.locked and finding.applicability in self.wanted:
            return self.locked[finding.path]
        return f"its fix is {finding.applicability.value}: {finding.fix.reason}"

    def _followed(self) -> list[Finding]:
        """Findings that were never edited and are not there any more."""
        by_place = {(item.code, item.path, item.span.start) for item in self.after}
        by_text = Counter((item.code, item.path, item.expr) for item in self.after)
        edited = {(item.code, item.path, item.span.start) for item in self.edited}
        gone = []
        for finding in self.before:
            place = (finding.code, finding.path, offset_after(finding.span.start, self.steps[finding.path]))
            text = (finding.code, finding.path, finding.expr)
            if (finding.code, finding.path, finding.span.start) in edited:
                continue
            if place in by_place or by_text[text] > 0:
                by_text[text] -= 1
            else:
                gone.append(finding)
        return gone

    def _mended_by(self, finding: Finding) -> tuple[str, ...]:
        """Codes of the fixes that took the finding away: over its text, else with what its message asks for."""
        span = finding.span
        here = [item for item in self.edited if item.path == finding.path]
        over = [item for item in here if item.span.start < span.end and span.start < item.span.end]
        asked = [
            item
            for item in self.edited
            if item.fix and any(f"`{needed.name}" in finding.message for needed in item.fix.imports)
        ]
        return tuple(sorted({item.code for item in over or asked or here or self.edited}))


def _fault(before: SourceFile, after: SourceFile) -> str:
    """What is wrong with a fixed file; empty where nothing is."""
    try:
        after.tree()
        after.encode()
        if _compiles(before) and (error := _compile_error(after)):
            raise error
    except UnicodeEncodeError:
        return f"the fixed text cannot be written in {after.encoding}"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"the fixed text does not compile: {error}"
    return ""


@lru_cache(maxsize=64)
def _compiles(source: SourceFile) -> bool:
    return _compile_error(source) is None


def _compile_error(source: SourceFile) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source.text, source.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return error
    return None
