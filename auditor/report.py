"""A scan's result as text, as one JSON object, or as JSON lines."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ddaudit.auditor.finding import Applicability, Finding
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.engine import ScanResult
    from ddaudit.auditor.source import Skipped

MARKS = {Applicability.SAFE: "[fix]", Applicability.UNSAFE: "[fix --unsafe]", Applicability.DISPLAY_ONLY: ""}


def tool_version() -> str:
    try:
        return version("ddaudit")
    except PackageNotFoundError:
        return "unknown"


def finding_json(finding: Finding) -> dict[str, Any]:
    """The finding's own JSON, and whether `fix` mends it by default."""
    return {**finding.to_json(), "fixable": finding.fix is not None and finding.applicability is Applicability.SAFE}


def json_lines(result: ScanResult) -> Iterator[str]:
    for finding in result.findings:
        yield json.dumps(finding_json(finding), ensure_ascii=False)


def json_object(result: ScanResult) -> str:
    record = {
        "version": tool_version(),
        "findings": [finding_json(finding) for finding in result.findings],
        "skipped": [
            {"path": entry.path, "reason": entry.reason.value, "detail": entry.detail} for entry in result.skipped
        ],
        "summary": summary(result),
    }
    return json.dumps(record, ensure_ascii=False, indent=2)


def summary(result: ScanResult) -> dict[str, int]:
    return {
        "scanned": result.num_scanned,
        "skipped": len(result.skipped) - len(result.failed),
        "failed": len(result.failed),
        "findings": len(result.findings),
        "fixable": len(result.fixable()),
        "fixable_unsafe": len(result.fixable(unsafe=True)),
    }


def text(result: ScanResult) -> Iterator[str]:
    """Findings by file, then the summary."""
    for path, findings in groupby(result.findings, key=lambda finding: finding.path):
        yield path
        for finding in findings:
            mark = MARKS[finding.applicability]
            place = f"{finding.span.line}:{finding.span.column}"
            sure = "" if finding.confidence.value == "proven" else f" ({finding.confidence.value})"
            head = f"  {place:<8} {finding.code} {finding.slug:<20} {finding.severity.value:<6}{sure} {mark}"
            yield head.rstrip()
            yield f"           {finding.expr[:90]}"
            yield f"           {finding.message}"
        yield ""
    yield summary_line(result)


def summary_line(result: ScanResult) -> str:
    counts = summary(result)
    line = (
        f"{_count(counts['findings'], 'finding')} in {_count(counts['scanned'], 'file')} scanned"
        f" ({counts['skipped']} skipped, {counts['failed']} failed)"
    )
    if counts["findings"]:
        line += f"; {counts['fixable']} fixable with `fix`, {counts['fixable_unsafe']} with `fix --unsafe`"
    return line


def skipped_line(entry: Skipped) -> str:
    detail = f" ({entry.detail})" if entry.detail else ""
    return f"not examined: {entry.path}: {entry.reason.value}{detail}"


def rule_line(rule: Rule) -> str:
    mark = "fix" if rule.has_fix else ""
    return f"{rule.code}  {rule.slug:<24} {rule.severity.value:<7} {mark:<4} {rule.message.partition(':')[0]}"


def rule_page(rule: Rule) -> Iterator[str]:
    """What `explain` prints: the rule's own words, then its examples."""
    yield f"{rule.code} {rule.slug} ({rule.severity.value})"
    yield ""
    yield rule.page
    for example in rule.EXAMPLES:
        yield ""
        yield "Fine:" if isinstance(example, Good) else "Found:"
        yield _indent(example.text)
        if isinstance(example, Bad) and example.fixed is not None:
            yield "becomes:"
            yield _indent(example.fixed_text)


def _indent(code: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in code.rstrip().splitlines())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
