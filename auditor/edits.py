"""Applies the fixes of findings to sources, pass after pass, until none is left to apply."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability, Edit, Finding
from ddaudit.auditor.imports import ImportNeeds, drop_unused
from ddaudit.auditor.source import NEWLINE, SourceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MAX_PASSES = 10


@dataclass(frozen=True)
class Left:
    """A finding that stays, where it stands in the fixed text, and why."""

    finding: Finding
    reason: str


@dataclass(frozen=True)
class Fixed:
    """A finding that is gone, where it stood in the source."""

    finding: Finding
    how: str
    """`edited` by its own fix, or `follows` from the fixes of others."""


@dataclass(frozen=True)
class Applied:
    """One pass over one file."""

    source: SourceFile
    steps: tuple[tuple[Edit, ...], ...]
    """What was done, in order; the offsets of each step are those of the text that the step before left."""
    findings: tuple[Finding, ...]
    deferred: tuple[Finding, ...]
    """Their fixes overlap one that was applied: the next pass finds them again, or finds them gone."""
    refused: tuple[Left, ...]


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


def apply_fixes(
    source: SourceFile,
    findings: Iterable[Finding],
    original: SourceFile | None = None,
    others: Iterable[SourceFile] = (),
) -> Applied:
    """Apply the fixes of one file's findings, each as a whole or not at all, then mend the imports.

    Of two that overlap the outer one is applied. `original` is the file before the first pass, whose imports may
    go once unused, and `others` are the files that may import from this one.

    Raises what parsing does where the text with the fixes no longer parses.
    """
    needs = ImportNeeds(source)
    edits: list[Edit] = []
    applied: list[Finding] = []
    deferred: list[Finding] = []
    refused: list[Left] = []
    accepted: set[tuple[Edit, ...]] = set()
    for finding in sorted(findings, key=_outer_first):
        fix = finding.fix
        if fix is None:
            raise ValueError(f"{finding.code} at line {finding.span.line} has no fix to apply")
        if fix.edits in accepted:
            applied.append(finding)
        elif reason := _obstacle(source, fix.edits) or needs.obstacle(fix):
            refused.append(Left(finding, reason))
        elif any(_collides(edit, edits) for edit in fix.edits):
            deferred.append(finding)
        else:
            for edit in fix.edits:
                insort(edits, edit)
            applied.append(finding)
            accepted.add(fix.edits)
            needs.add(fix)

    steps, now = [], source
    makers = (lambda now: edits, needs.edits, lambda now: drop_unused(original or source, now, others))
    for make in makers if applied else ():
        step = _with_newlines(source, make(now))
        steps.append(tuple(_trimmed(now, edit) for edit in step))
        now = splice(now, step)
    return Applied(now, tuple(steps), tuple(applied), tuple(deferred), tuple(refused))


def splice(source: SourceFile, edits: Iterable[Edit]) -> SourceFile:
    """`source` with edits that do not overlap made to its text; every other character stays."""
    text = source.text
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.replacement + text[edit.end :]
    return source.with_text(text)


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
                    self.failed[path] = f"the fixed text does not parse: {error}"
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
        for path in self.steps:
            if reason := _fault(self.original[path], self.sources[path]):
                self.failed[path] = reason

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
            offset = _before(finding.span.start, self.steps[path])
            end = max(offset, _before(finding.span.end, self.steps[path]))
            self.edited.append(replace(finding, span=self.original[path].span(offset, end)))
        self.steps[path] += applied.steps
        self.sources[path] = applied.source

    def result(self) -> Settled:
        left = tuple(Left(finding, self._why_left(finding)) for finding in self.after)
        fixed = [Fixed(finding, "edited") for finding in self.edited]
        fixed += [Fixed(finding, "follows") for finding in self._followed()]
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
            place = (finding.code, finding.path, _after(finding.span.start, self.steps[finding.path]))
            text = (finding.code, finding.path, finding.expr)
            if (finding.code, finding.path, finding.span.start) in edited:
                continue
            if place in by_place or by_text[text] > 0:
                by_text[text] -= 1
            else:
                gone.append(finding)
        return gone


def _outer_first(finding: Finding) -> tuple[int, int, str]:
    edits = finding.fix.edits if finding.fix and finding.fix.edits else ()
    start = min((edit.start for edit in edits), default=0)
    return start, -max((edit.end for edit in edits), default=0), finding.code


def _collides(edit: Edit, edits: Sequence[Edit]) -> bool:
    """Whether `edit` overlaps one of `edits`, which are sorted and do not overlap."""
    at = bisect_left(edits, edit)
    return any(_overlap(edit, other) for other in edits[max(at - 1, 0) : at + 1])


def _overlap(one: Edit, other: Edit) -> bool:
    """Whether two edits share text, or insert at one place, where their order would be a matter of chance."""
    return (one.start, one.end) == (other.start, other.end) or (one.start < other.end and other.start < one.end)


def _obstacle(source: SourceFile, edits: Sequence[Edit]) -> str:
    """Why the edits of one fix cannot be made; empty where they can."""
    if not edits:
        return "its fix has no edit"
    if any(not 0 <= edit.start <= edit.end <= len(source.text) for edit in edits):
        return "its fix reaches outside the file"
    if any(_overlap(one, other) for i, one in enumerate(edits) for other in edits[:i]):
        return "the edits of its fix overlap"
    # Up to the end of a comment: what is put there would become part of it.
    near = any(source.has_comment(source.line_starts[source.span(e.start, e.end).line - 1], e.end) for e in edits)
    if near or any("#" in edit.replacement for edit in edits):
        lost = _comments(source) - _comments(splice(source, edits))
        if lost:
            return f"it would drop the comment `{next(iter(lost))}`"
    return ""


def _comments(source: SourceFile) -> Counter[str]:
    return Counter(NEWLINE.split(source.text[start:], maxsplit=1)[0].rstrip() for start in source.comments)


def _with_newlines(source: SourceFile, edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """The edits with the file's own newline in their text."""
    counts = Counter(NEWLINE.findall(source.text))
    newline = counts.most_common(1)[0][0] if counts else "\n"
    return tuple(replace(edit, replacement=NEWLINE.sub(newline, edit.replacement)) for edit in edits)


def _trimmed(source: SourceFile, edit: Edit) -> Edit:
    """The edit without what it leaves as it was at either end: offsets in that text can be followed."""
    old = source.text[edit.start : edit.end]
    head = _num_shared(old, edit.replacement)
    tail = _num_shared(old[head:][::-1], edit.replacement[head:][::-1])
    return Edit(edit.start + head, edit.end - tail, edit.replacement[head : len(edit.replacement) - tail])


def _num_shared(one: str, other: str) -> int:
    """Length of the common start of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _fault(before: SourceFile, after: SourceFile) -> str:
    """What is wrong with a fixed file; empty where nothing is."""
    try:
        after.parse()
        after.encode()
        if _compiles(before) and (error := _compile_error(after)):
            raise error
    except UnicodeEncodeError:
        return f"the fixed text cannot be written in {after.encoding}"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"the fixed text does not compile: {error}"
    lost = _comments(before) - _comments(after)
    return f"the fixed text lacks the comment `{next(iter(lost))}`" if lost else ""


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


def _before(offset: int, steps: Sequence[Sequence[Edit]]) -> int:
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


def _after(offset: int, steps: Sequence[Sequence[Edit]]) -> int:
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
