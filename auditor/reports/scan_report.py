"""A scan's result as text, as one JSON object, or as JSON lines."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Confidence, Finding, Severity, Status
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.auditor.rule_table import first_sentence, fixes, releases, severities
from ddaudit.auditor.sources.source import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddaudit.auditor.facts.asking import Known
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.scanning.result import ScanResult
    from ddaudit.auditor.sources.source import Skipped
    from ddaudit.auditor.targets.releases import Releases

WIDTH = 110
"""Columns of the text, where the terminal is not narrower."""
MARKS = {Applicability.SAFE: "[fix]", Applicability.UNSAFE: "[unsafe]", Applicability.DISPLAY_ONLY: ""}
HAPPENS = {
    Severity.ERROR: "it raises on the target",
    Severity.SILENT: "it runs, and the result is wrong or the line has no effect",
    Severity.PORT: "it works for some loaders and model families only",
    Severity.WARN: "it still works: deprecated, or a suppression to put right",
}


def tool_version() -> str:
    try:
        return version("ddaudit")
    except PackageNotFoundError:
        return "unknown"


def finding_json(finding: Finding) -> dict[str, Any]:
    """The finding's own JSON, and whether `fix` mends it by default."""
    return {**finding.to_json(), "fixable": finding.fix is not None and finding.applicability is Applicability.SAFE}


def json_lines(result: ScanResult) -> Iterator[str]:
    """Every finding, those that a comment keeps too, which are marked `suppressed`."""
    for finding in sorted((*result.findings, *result.suppressed), key=lambda finding: finding.sort_key):
        yield json.dumps(finding_json(finding))


def json_object(result: ScanResult) -> str:
    record: dict[str, Any] = {
        "version": tool_version(),
        "findings": [finding_json(finding) for finding in result.findings],
        "suppressed": [finding_json(finding) for finding in result.suppressed],
        "skipped": [
            {"path": entry.path, "reason": entry.reason.value, "detail": entry.detail} for entry in result.skipped
        ],
        "limits": list(result.limits),
        "summary": summary(result),
    }
    if result.releases is not None:
        record["transformers"] = result.releases.to_json()
    if result.neutrality is not None:
        record["notes"] = [finding_json(finding) for finding in result.notes]
        record["neutrality"] = asdict(result.neutrality)
    return json.dumps(record, indent=2)


def summary(result: ScanResult) -> dict[str, int]:
    return {
        "scanned": result.num_scanned,
        "skipped": len(result.skipped) - len(result.failed),
        "failed": len(result.failed),
        "findings": len(result.findings),
        "suppressed": len(result.suppressed),
        "fixable": len(result.fixable()),
        "fixable_unsafe": len(result.fixable(unsafe=True)),
    }


def text(result: ScanResult, width: int = WIDTH, *, why: bool = False) -> Iterator[str]:
    """One line a finding, by file, with `why` what it rests on; each problem and remedy once; what happens."""
    for path, findings in groupby(result.findings, key=lambda finding: finding.path):
        yield shown(path)
        for finding in findings:
            yield clip(_row(finding, result.releases), width)
            yield from _reasons(finding, width) if why else ()
        yield ""
    if result.findings:
        yield "what to do"
        yield from _remedies(result.findings, width)
        yield ""
        yield "what happens"
        counts = Counter(finding.severity for finding in result.findings)
        for severity in (severity for severity in Severity if counts[severity]):
            yield f"  {counts[severity]:>3} {severity.value:<6}  {HAPPENS[severity]}"
        yield ""
    if result.neutrality is not None:
        yield from _verified(result, width)
        yield ""
    for limit in result.limits:
        yield from wrap(f"limit: {limit}", width, "", "  ")
        yield ""
    if result.releases is not None:
        yield from release_lines(result.releases, result.findings, width)
    yield summary_line(result)


def next_step(result: ScanResult, folder: str) -> str:
    """What to do after a scan of `folder`, the repository as the caller named it; empty where nothing was found."""
    if not result.findings:
        return ""
    if result.fixable():
        return f"next: ddaudit fix {folder}".rstrip()
    by_hand = "what is left is for a person; `ddaudit explain CODE` prints a rule's page"
    return f"next: ddaudit fix --unsafe {folder}".rstrip() if result.fixable(unsafe=True) else f"next: {by_hand}"


def _verified(result: ScanResult, width: int) -> Iterator[str]:
    """What trying the findings came to: how many, each reason once, and what was refuted."""
    yield "tried on the target's own classes"
    tried = [finding for finding in (*result.findings, *result.notes) if finding.verified]
    counts = Counter(finding.verified.status for finding in tried if finding.verified)
    for status in (status for status in Status if counts[status]):
        yield f"  {counts[status]:>3} {status.value}"
    for note in result.notes:
        place = f"{shown(note.path)}:{note.span.line}:{note.span.column}"
        reason = note.verified.reason if note.verified else ""
        yield from wrap(f"note: {place} {note.code} {note.expr}: refuted, {reason}", width, "    ", "      ")
    yield ""
    yield f"neutrality: {result.neutrality}"


def release_lines(chosen: Releases, findings: Sequence[Finding], width: int) -> Iterator[str]:
    """The release that the findings are about, and who says so; and where the code is for an older one, so."""
    yield from wrap(f"Transformers {chosen.target}, {chosen.source}", width, "", "  ")
    later = sum(chosen.begins_later(finding) for finding in findings)
    if chosen.written_for and later:
        way = "" if chosen.source.startswith("by") else "; name the release you port to with `--transformers`"
        said = f"{later} of {count(len(findings), 'finding')} start after {chosen.written_for}, marked `from`{way}"
        yield from wrap(said, width, "  ", "  ")


def _row(finding: Finding, chosen: Releases | None) -> str:
    place = f"{finding.span.line}:{finding.span.column}"
    sure = "" if finding.confidence is Confidence.PROVEN else f"({finding.confidence.value}) "
    mark = MARKS[finding.applicability]
    tried = f"{finding.verified.status.value:<12} " if finding.verified else ""
    what = f"{finding.code} {finding.slug:<22} {finding.severity.value:<6}"
    later = f"(from {finding.since}) " if chosen and chosen.begins_later(finding) else ""
    return f"  {place:<8} {what} {mark:<8} {tried}{sure}{later}{finding.expr}"


def _reasons(finding: Finding, width: int) -> Iterator[str]:
    """What the finding rests on, a line a fact; from which release it is so; what is to be said of its fix."""
    first = f"{finding.confidence.value}: "
    for number, fact in enumerate(finding.evidence or ("",)):
        yield from wrap(shown(fact), width, " " * 11 + (first if not number else " " * len(first)), " " * 24)
    if finding.since:
        yield f"{'':11}from Transformers {finding.since}"
    since = f" (from Transformers {finding.fix.exists_since})" if finding.fix and finding.fix.exists_since else ""
    reason = finding.fix.reason if finding.fix else finding.no_fix_reason
    if reason:
        kind = finding.applicability.value if finding.fix else "none"
        yield from wrap(f"fix: {kind}{since}, {reason}", width, " " * 11, " " * 13)


def known_lines(place: str, known: Sequence[Known], width: int) -> Iterator[str]:
    """What is known of a line's names, and how it came there: each name once, and once what it can hold."""
    yield shown(place)
    for each in known:
        old = "; in a branch for old releases" if each.is_legacy else ""
        if not each.values:
            yield from wrap(f"`{each.text}`: nothing is known{old}", width, "  ", "    ")
        reasons: dict[str, list[str]] = {}
        for number, value in enumerate(each.values):
            what = f"{value.kind.value}{_origin(value)}, {value.confidence.value}"
            reasons.setdefault(what, []).extend((*value.evidence, *(each.steps if not number else ())))
        for number, (what, facts) in enumerate(reasons.items()):
            start = "  or " if number else f"`{each.text}`: "
            yield from wrap(f"{start}{what}{old}", width, "  ", "    ")
            for fact in dict.fromkeys(facts):
                yield from wrap(shown(fact), width, "    ", "      ")


def _origin(value: Value) -> str:
    """The name of what is another's, or the place of what is the repository's own."""
    own = (Kind.OWN, Kind.OWN_CLASS, Kind.FUNCTION, Kind.METHOD)
    where = value.origin.rpartition(":")[0] if value.kind in own else value.origin if value.kind is Kind.LIBRARY else ""
    return f" ({shown(where)})" if where else ""


def _remedies(findings: Sequence[Finding], width: int) -> Iterator[str]:
    """Every message once, under its rule."""
    for code in sorted({finding.code for finding in findings}):
        found = [finding for finding in findings if finding.code == code]
        yield f"  {code} {found[0].slug}, {len(found)} here"
        for message in dict.fromkeys(finding.message for finding in found):
            yield from wrap(message, width, "    ", "      ")


def clip(line: str, width: int) -> str:
    """The line, cut where it is longer."""
    return line if len(line) <= width else line[: max(width - 3, 0)] + "..."


def wrap(line: str, width: int, first: str, others: str) -> list[str]:
    """The line broken between words, each part with its indent."""
    return textwrap.wrap(
        line, max(width, 40), initial_indent=first, subsequent_indent=others,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def summary_line(result: ScanResult) -> str:
    counts = summary(result)
    line = (
        f"{count(counts['findings'], 'finding')} in {count(counts['scanned'], 'file')} scanned"
        f" ({counts['skipped']} skipped, {counts['failed']} failed)"
    )
    if counts["findings"]:
        line += f"; {counts['fixable']} fixable with `fix`, {counts['fixable_unsafe']} with `fix --unsafe`"
    if counts["suppressed"]:
        line += f"; {counts['suppressed']} suppressed by comments"
    return line


def skipped_line(entry: Skipped) -> str:
    detail = f" ({entry.detail})" if entry.detail else ""
    return f"not examined: {shown(entry.path)}: {entry.reason.value}{detail}"


def rule_entry(rule: Rule, width: int = WIDTH) -> Iterator[str]:
    """The rule in the list of all: its name, then what it finds."""
    yield _rule_head(rule)
    yield from wrap(first_sentence(rule.page), width, "    ", "    ")


def rule_page(rule: Rule) -> Iterator[str]:
    """What `explain` prints: the rule's own words, then its examples."""
    yield _rule_head(rule)
    yield ""
    yield rule.page
    for example in rule.EXAMPLES:
        yield ""
        yield "Fine:" if isinstance(example, Good) else "Found:"
        yield _indent(example.text)
        if isinstance(example, Bad) and example.fixed is not None:
            yield "becomes:"
            yield _indent(example.fixed_text)


def _rule_head(rule: Rule) -> str:
    return f"{rule.code} {rule.slug} ({severities(rule)}; from {releases(rule)}; fix: {fixes(rule)})"


def _indent(code: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in code.rstrip().splitlines())


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
