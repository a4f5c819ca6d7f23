"""The README's table of rules, made from the rules: `python -m ddaudit.auditor.rule_table README.md`."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.rule import Bad, all_rules
from ddaudit.auditor.sources.source import SourceFile
from ddaudit.auditor.targets.releases import number

if TYPE_CHECKING:
    from ddaudit.auditor.finding import Finding
    from ddaudit.auditor.rule import Rule

BEGIN = "<!-- rule table: python -m ddaudit.auditor.rule_table README.md -->"
END = "<!-- end of rule table -->"


def rule_table() -> str:
    """One row a rule, as Markdown: code, slug, severity, releases, the fixes its own examples get, what it finds."""
    rows = ["| code | rule | what happens | from | fix | finds |", "|---|---|---|---|---|---|"]
    for rule in all_rules():
        cells = (rule.code, f"`{rule.slug}`", severities(rule), releases(rule), fixes(rule), first_sentence(rule.page))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def with_rule_table(text: str) -> str:
    """`text` with the current table between its two markers; raises ValueError where it lacks them."""
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"no lines {BEGIN!r} and {END!r} to write the rule table between")
    return f"{text[:begin]}{BEGIN}\n{rule_table()}\n{text[end:]}"


@cache
def _findings(rule: Rule) -> list[Finding]:
    examples = [example.text for example in rule.EXAMPLES if isinstance(example, Bad)]
    return [
        finding
        for text in examples
        for finding in scan_sources({"example.py": SourceFile("example.py", text)}, select=(rule.code,)).findings
    ]


def severities(rule: Rule) -> str:
    """What happens, over the rule's own examples."""
    return ", ".join(sorted({rule.severity.value} | {finding.severity.value for finding in _findings(rule)}))


def releases(rule: Rule) -> str:
    """The releases of Transformers from which the rule's own examples fail; `any` for every one known."""
    found = {finding.since for finding in _findings(rule)}
    return ", ".join(sorted(filter(None, found), key=number) + ["any"] * ("" in found))


def fixes(rule: Rule) -> str:
    """The kinds of fix that the rule's own examples get, each with the releases from which its replacements exist."""
    made = [(finding.fix.applicability.value, finding.fix.exists_since) for finding in _findings(rule) if finding.fix]
    kinds = []
    for kind in (kind for kind in ("safe", "unsafe") if any(kind == each for each, _ in made)):
        since = sorted({release for each, release in made if each == kind and release}, key=number)
        kinds.append(f"{kind} (from {', '.join(since)})" if since else kind)
    return ", ".join(kinds) or "by hand"


def first_sentence(page: str) -> str:
    """What a rule finds, without the full stop."""
    text = " ".join(page.split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) ", text)[0].rstrip(".:")


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(with_rule_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
