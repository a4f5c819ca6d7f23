"""Scanning: sources in, facts once, every rule in one visit of each file, findings out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.repository import FileFacts, learn
from ddaudit.auditor.facts.values import RANK
from ddaudit.auditor.finding import Applicability, Confidence, Finding
from ddaudit.auditor.profile import DEFAULT_TARGET, load_profile
from ddaudit.auditor.rule import Rule, all_rules, select_rules
from ddaudit.auditor.sources.newer_syntax import newer_syntax
from ddaudit.auditor.sources.parts import divide, scan_parts
from ddaudit.auditor.sources.selection import select_files
from ddaudit.auditor.sources.source import Skipped, SkipReason, SourceFile, read_tree
from ddaudit.auditor.targets.targeting import on_targets

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ddaudit.auditor.targets.targeting import Neutrality

VERSION = ".".join(map(str, sys.version_info[:2]))


@dataclass(frozen=True)
class ScanResult:
    """What a scan found, sorted, and what it could not examine."""

    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...]
    num_scanned: int
    notes: tuple[Finding, ...] = ()
    """Findings that trying refuted: they do not count."""
    neutrality: Neutrality | None = None
    """How far the lines are from one model, where that was asked."""

    @property
    def failed(self) -> tuple[Skipped, ...]:
        return tuple(entry for entry in self.skipped if entry.is_failure)

    def fixable(self, unsafe: bool = False) -> tuple[Finding, ...]:
        """Findings that `fix` mends, with `--unsafe` or without."""
        wanted = (Applicability.SAFE, Applicability.UNSAFE) if unsafe else (Applicability.SAFE,)
        return tuple(finding for finding in self.findings if finding.fix and finding.applicability in wanted)

    def only(self, names: frozenset[str]) -> ScanResult:
        """What concerns these files."""
        skipped = tuple(entry for entry in self.skipped if entry.path in names)
        findings = tuple(finding for finding in self.findings if finding.path in names)
        return ScanResult(findings, skipped, len(names) - len({entry.path for entry in skipped}))

    @property
    def exit_code(self) -> int:
        return 2 if self.failed else 1 if self.findings else 0


def scan(
    paths: Sequence[Path],
    *,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    min_confidence: Confidence = Confidence.LIKELY,
    targets: tuple[str, ...] = (),
) -> ScanResult:
    """Scan files and folders together: facts of one file serve the others. Of files alone only their own findings
    are given, and the facts are those of their repository.

    Severities and messages are those of `targets`, profiles by name or file; without any, of the default one.

    Raises FileNotFoundError for a missing path; ValueError where there is no Python file, or no such rule or profile.
    """
    rules = select_rules(select, ignore)
    selection = None if any(path.is_dir() for path in paths) else select_files(paths, markers(rules))
    tree = selection.tree if selection else read_tree(paths)
    result = scan_sources(
        tree.sources, tree.skipped, select=select, ignore=ignore, min_confidence=min_confidence, targets=targets
    )
    return result.only(selection.names) if selection else result


def markers(rules: Iterable[Rule]) -> frozenset[str]:
    """Without any of these strings a file has no finding."""
    return frozenset(marker for rule in rules for marker in rule.markers)


def scan_sources(
    sources: Mapping[str, SourceFile],
    skipped: tuple[Skipped, ...] = (),
    *,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    min_confidence: Confidence = Confidence.LIKELY,
    targets: tuple[str, ...] = (),
) -> ScanResult:
    """Scan texts in memory, by path. `skipped` is carried into the result.

    A repository is examined as a whole, with one set of facts; a tree that is too large for that, folder by folder.
    """
    profiles = tuple(load_profile(name) for name in targets or (DEFAULT_TARGET,))
    codes = tuple(rule.code for rule in select_rules(select, ignore))
    results = scan_parts(partial(_scan, codes=codes), divide(sources))
    findings = (finding for result in results for finding in result.findings)
    sure = (finding for finding in findings if RANK[finding.confidence] >= RANK[min_confidence])
    return ScanResult(
        findings=tuple(sorted(on_targets(sure, profiles), key=lambda finding: finding.sort_key)),
        skipped=tuple(sorted({*skipped, *(entry for result in results for entry in result.skipped)})),
        num_scanned=sum(result.num_scanned for result in results),
    )


def _scan(sources: Mapping[str, SourceFile], codes: tuple[str, ...]) -> ScanResult:
    """One part's findings by the rules of these codes, in no order."""
    rules = [rule for rule in all_rules() if rule.code in codes]
    trees: dict[str, ast.Module] = {}
    failed: list[Skipped] = []
    broken: dict[str, str] = {}
    for path, source in sorted(sources.items()):
        try:
            tree = source.parse()
        except SyntaxError as error:
            broken[path] = f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            failed.append(Skipped(path, SkipReason.SYNTAX, str(error) or "nested too deeply"))
        else:
            trees[path] = tree
    newer = newer_syntax([sources[path] for path in broken])
    for path, detail in broken.items():
        why = f"{detail}; LibCST parses it: its syntax is newer than Python {VERSION}" if path in newer else detail
        failed.append(Skipped(path, SkipReason.SYNTAX, why))
    findings: list[Finding] = []
    num_crashed = 0
    if any(_mentions(sources[path], rule.markers) for path in trees for rule in rules):
        for file in learn({path: (sources[path], tree) for path, tree in trees.items()}):
            try:
                found = _visit(file, rules)
            except RecursionError:
                num_crashed += 1
                failed.append(Skipped(file.source.path, SkipReason.CRASH, "an expression is nested too deeply"))
            else:
                findings += found
    return ScanResult(tuple(findings), tuple(failed), len(trees) - num_crashed)


def _mentions(source: SourceFile, markers: tuple[str, ...]) -> bool:
    return any(marker in source.text for marker in markers)


def _visit(file: FileFacts, rules: Sequence[Rule]) -> list[Finding]:
    """Each rule sees the nodes of the types it asked for, in files that have one of its words."""
    found: list[Finding] = []
    has = cache(file.source.text.__contains__)
    for rule in rules:
        if any(map(has, rule.markers)):
            decide = rule.decide
            for node in file.file.of(*rule.nodes):
                found += decide(node, file)
    return found
