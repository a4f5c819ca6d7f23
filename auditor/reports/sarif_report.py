"""A scan's result as SARIF 2.1.0, the format that code hosts and editors read.

The same bytes for the same source: paths are relative to the scanned root, and there is no time in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ddaudit.auditor.finding import Severity
from ddaudit.auditor.reports.scan_report import tool_version
from ddaudit.auditor.rule import Bad, Good, all_rules
from ddaudit.auditor.rule_table import first_sentence
from ddaudit.auditor.sources.source import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddaudit.auditor.finding import Finding, Span
    from ddaudit.auditor.fixing.previewing import Replacement
    from ddaudit.auditor.rule import Rule
    from ddaudit.auditor.scanning.result import ScanResult
    from ddaudit.auditor.sources.source import Skipped

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 25_000
"""GitHub refuses a run with more."""
LEVELS = {Severity.ERROR: "error", Severity.SILENT: "error", Severity.PORT: "warning", Severity.WARN: "note"}
ROOT = "%SRCROOT%"


def sarif(result: ScanResult, fixes: Mapping[Finding, Sequence[Replacement]], max_results: int = MAX_RESULTS) -> str:
    """One run: every finding, those that a comment keeps too; `fixes` are those to offer. Of too many findings the
    worst are given, and a notification says so."""
    every = sorted((*result.findings, *result.suppressed), key=lambda finding: finding.sort_key)
    # Two findings in one f-string can be equal in all that is known of them.
    named = list(zip(every, _fingerprints(every), strict=True))
    worst = sorted(named, key=lambda item: list(Severity).index(item[0].severity))[:max_results]
    given = sorted(worst, key=lambda item: item[0].sort_key)
    rules = all_rules()
    places = {rule.code: i for i, rule in enumerate(rules)}
    notifications = [_skipped(entry) for entry in result.skipped]
    notifications += [{"level": "note", "message": {"text": limit}} for limit in result.limits]
    if num_left_out := len(every) - len(given):
        text = f"{num_left_out} of {len(every)} findings are left out, the least severe: a run holds {max_results}"
        notifications.append({"level": "warning", "message": {"text": text}})
    run = {
        "tool": {
            "driver": {"name": "ddaudit", "version": tool_version(), "rules": [_rule(rule) for rule in rules]},
        },
        "invocations": [
            {"executionSuccessful": not result.failed, "toolExecutionNotifications": notifications},
        ],
        "originalUriBaseIds": {ROOT: {"description": {"text": "The folder that was scanned."}}},
        "columnKind": "unicodeCodePoints",
        "results": [
            {
                "ruleId": finding.code,
                "ruleIndex": places[finding.code],
                "level": LEVELS[finding.severity],
                "message": {"text": finding.message},
                "locations": [_location(finding.path, finding.span)],
                "partialFingerprints": {"ddaudit/v1": fingerprint},
                # In all results of a run or in none.
                "suppressions": _suppressions(finding),
                **({"fixes": [_fix(finding, fixes[finding])]} if finding in fixes else {}),
                "properties": {
                    "severity": finding.severity.value,
                    "confidence": finding.confidence.value,
                    "applicability": finding.applicability.value,
                    "since": finding.since,
                    "evidence": list(finding.evidence),
                },
            }
            for finding, fingerprint in given
        ],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _fingerprints(findings: Sequence[Finding]) -> Iterator[str]:
    """By rule, file and expression, and which of several such in order: lines and columns do not matter."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for finding in findings:
        what = (finding.code, finding.path, finding.expr)
        yield hashlib.sha256(json.dumps([*what, seen[what]]).encode()).hexdigest()[:32]
        seen[what] += 1


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": type(rule).__name__,
        "shortDescription": {"text": first_sentence(rule.page)},
        "fullDescription": {"text": " ".join(rule.page.partition("\n\n")[2].split("\n\n")[0].split())},
        "help": {"text": rule.page, "markdown": _markdown(rule)},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def _markdown(rule: Rule) -> str:
    """The rule's page with one example of each kind."""
    # The last lines stand for themselves, as in the page.
    parts = [rule.page.replace("\nSeen: ", "  \nSeen: ").replace("\nFix: ", "  \nFix: ")]
    good = next(example for example in rule.EXAMPLES if isinstance(example, Good))
    bad = [example for example in rule.EXAMPLES if isinstance(example, Bad)]
    shown_bad = next((example for example in bad if example.fixed is not None), bad[0])
    parts += ["Fine:", _block(good.text), "Found:", _block(shown_bad.text)]
    if shown_bad.fixed is not None:
        parts += ["becomes:", _block(shown_bad.fixed_text)]
    return "\n\n".join(parts)


def _block(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def _artifact(path: str) -> dict[str, str]:
    # A name may hold bytes of no encoding.
    return {"uri": quote(os.fsencode(path)), "uriBaseId": ROOT}


def _region(span: Span) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def _location(path: str, span: Span) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": _artifact(path), "region": _region(span)}}


def _suppressions(finding: Finding) -> list[dict[str, str]]:
    if finding.suppressed is None:
        return []
    return [{"kind": "inSource", **({"justification": finding.suppressed} if finding.suppressed else {})}]


def _fix(finding: Finding, replacements: Sequence[Replacement]) -> dict[str, Any]:
    changes = [{"deletedRegion": _region(each.span), "insertedContent": {"text": each.text}} for each in replacements]
    return {
        "description": {"text": finding.fix.reason if finding.fix else ""},
        "artifactChanges": [{"artifactLocation": _artifact(finding.path), "replacements": changes}],
    }


def _skipped(entry: Skipped) -> dict[str, Any]:
    detail = f": {entry.detail}" if entry.detail else ""
    return {
        "level": "error" if entry.is_failure else "note",
        "message": {"text": f"not examined: {shown(entry.path)}: {entry.reason.value}{detail}"},
        "locations": [{"physicalLocation": {"artifactLocation": _artifact(entry.path)}}],
    }
