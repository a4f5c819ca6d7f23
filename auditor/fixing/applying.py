"""One pass of fixes over one file: those that can be made are made together, and proven."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddaudit.auditor.fixing.edits import collides, overlap, splice, trimmed, with_newlines
from ddaudit.auditor.fixing.imports import ImportNeeds, drop_unused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddaudit.auditor.finding import Edit, Finding, Span
    from ddaudit.auditor.fixing.concrete import Concrete
    from ddaudit.auditor.sources.source import SourceFile


@dataclass(frozen=True)
class Left:
    """A finding that stays, where it stands in the fixed text, and why."""

    finding: Finding
    reason: str
    before: Span | None = None
    """Where it stood in the source, once all is settled."""


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


def apply_fixes(
    source: SourceFile,
    findings: Iterable[Finding],
    original: SourceFile | None = None,
    others: Iterable[SourceFile] = (),
) -> Applied:
    """Apply the fixes of one file's findings, each as a whole or not at all, then mend the imports.

    Of two that overlap the outer one is applied. `original` is the file before the first pass, whose imports may
    go once unused, and `others` are the files that may import from this one. A fix whose edits cannot be proven is
    refused; where that goes for the file as a whole, Unproven is raised, or what parsing raises.
    """
    # LibCST takes long to import, and most runs edit nothing.
    from ddaudit.auditor.fixing.proof import check_imports, faults

    findings = sorted(findings, key=_outer_first)
    needs = ImportNeeds(source)
    refused: dict[Finding, str] = {}
    while True:
        fixes, deferred = _choose(source, needs, findings, refused)
        if not fixes:
            return Applied(source, (), (), deferred, _left(refused))
        edits = tuple(edit for group in fixes for edit in group)
        before, short, after = _trees(source, edits)
        found = faults(before, short, after)
        wrong = {edit: found[moved] for edit, moved in zip(edits, short, strict=True) if moved in found}
        if not wrong:
            break
        for group, served in fixes.items():
            for edit in set(group) & set(wrong):
                refused |= dict.fromkeys(served, wrong[edit])
    applied = tuple(finding for served in fixes.values() for finding in served)
    for finding in applied:
        if finding.fix is not None:
            needs.add(finding.fix)

    steps = [_followable(source, edits)]
    now = splice(source, edits)
    for make, allowed in (
        (needs.edits, needs.missing),
        (lambda now: drop_unused(original or source, now, others), ()),
    ):
        if edits := with_newlines(now, make(now)):
            before, _, after = _trees(now, edits)
            check_imports(before, after, allowed)
            steps.append(_followable(now, edits))
            now = splice(now, edits)
    return Applied(now, tuple(steps), applied, deferred, _left(refused))


def _choose(
    source: SourceFile, needs: ImportNeeds, findings: Sequence[Finding], refused: dict[Finding, str]
) -> tuple[dict[tuple[Edit, ...], list[Finding]], tuple[Finding, ...]]:
    """The edits to make, by fix, with the findings that each serves; and the findings to defer. Adds to `refused`."""
    fixes: dict[tuple[Edit, ...], list[Finding]] = {}
    edits: list[Edit] = []
    deferred: list[Finding] = []
    for finding in findings:
        if finding in refused:
            continue
        if finding.fix is None:
            raise ValueError(f"{finding.code} at line {finding.span.line} has no fix to apply")
        wanted = with_newlines(source, finding.fix.edits)
        if wanted in fixes:
            fixes[wanted].append(finding)
        elif reason := _obstacle(source, wanted) or needs.obstacle(finding.fix):
            refused[finding] = reason
        elif any(collides(edit, edits) for edit in wanted):
            deferred.append(finding)
        else:
            fixes[wanted] = [finding]
            for edit in wanted:
                insort(edits, edit)
    return fixes, tuple(deferred)


def _trees(source: SourceFile, edits: Sequence[Edit]) -> tuple[Concrete, tuple[Edit, ...], Concrete]:
    """What has to be proven: the text before, the edits and the text after, where they differ and around it."""
    from ddaudit.auditor.fixing.concrete import Concrete, Unproven
    from ddaudit.auditor.fixing.reducing import reduced

    after = splice(source, edits)
    try:
        after.tree()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unproven(f"the fixed text does not parse: {error}") from error
    short, moved, short_after = reduced(source, edits, after)
    return Concrete(short), moved, Concrete(short_after)


def _followable(source: SourceFile, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    return tuple(trimmed(source, edit) for edit in edits)


def _left(refused: dict[Finding, str]) -> tuple[Left, ...]:
    return tuple(Left(finding, reason) for finding, reason in refused.items())


def _outer_first(finding: Finding) -> tuple[int, int, str]:
    edits = finding.fix.edits if finding.fix and finding.fix.edits else ()
    start = min((edit.start for edit in edits), default=0)
    return start, -max((edit.end for edit in edits), default=0), finding.code


def _obstacle(source: SourceFile, edits: Sequence[Edit]) -> str:
    """Why the edits of one fix cannot be made; empty where they can."""
    if not edits:
        return "its fix has no edit"
    if any(not 0 <= edit.start <= edit.end <= len(source.text) for edit in edits):
        return "its fix reaches outside the file"
    if any(overlap(one, other) for i, one in enumerate(edits) for other in edits[:i]):
        return "the edits of its fix overlap"
    return ""
