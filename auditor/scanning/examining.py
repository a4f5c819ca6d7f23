"""Examines files together: each is parsed, the facts of all are learnt, and every rule sees its nodes in one visit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.exhaustion import EXHAUSTION, TOO_DEEP, said
from ddaudit.auditor.facts.repository import FileFacts, learn
from ddaudit.auditor.rule import all_rules
from ddaudit.auditor.sources.newer_syntax import newer_syntax
from ddaudit.auditor.sources.source import Listed, Skipped, SkipReason, SourceFile, not_collecting, read_listed
from ddaudit.auditor.suppressions import suppress, suppressions

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Iterable, Sequence

    from ddaudit.auditor.finding import Finding
    from ddaudit.auditor.rule import Rule

VERSION = ".".join(map(str, sys.version_info[:2]))


@dataclass(frozen=True)
class Examined:
    """What was found, in no order, what is suppressed marked so, and what could not be examined."""

    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...]
    num_scanned: int


def markers(rules: Iterable[Rule]) -> frozenset[str]:
    """Without any of these strings a file has no finding."""
    return frozenset(marker for rule in rules for marker in rule.markers)


def examine(
    files: Sequence[SourceFile | Listed],
    codes: frozenset[str],
    names: frozenset[str] | None = None,
    at: Callable[[str], None] = lambda name: None,
) -> Examined:
    """What the rules of these codes find, with one set of facts for all files; in `names` only, where given.

    `at` hears which file is being examined, before it is, and "" where it is all of them.
    """
    with not_collecting():
        sources, skipped = _read(files)
        trees, broken = _parse(sources, at)
        skipped += broken
        rules = [rule for rule in all_rules() if rule.code in codes]
        # Cheaper than any fact: what no rule has a word for is not looked at.
        words = markers(rules)
        findings: list[Finding] = []
        if any(word in sources[name].text for name in trees if names is None or name in names for word in words):
            at("")
            failures: dict[str, str] = {}
            for view in learn({name: (sources[name], tree) for name, tree in trees.items()}, failures):
                name = view.source.path
                if name not in failures and (names is None or name in names):
                    at(name)
                    found = _visit(view, rules)
                    view.forget()
                    if isinstance(found, str):
                        failures[name] = found
                    else:
                        findings += found
            skipped += [Skipped(name, SkipReason.CRASH, reason) for name, reason in failures.items()]
            trees = {name: tree for name, tree in trees.items() if name not in failures}
    return Examined(tuple(findings), tuple(skipped), len(trees))


def _read(files: Sequence[SourceFile | Listed]) -> tuple[dict[str, SourceFile], list[Skipped]]:
    found = [read_listed(file) if isinstance(file, Listed) else file for file in files]
    sources = {source.path: source for source in found if isinstance(source, SourceFile)}
    return dict(sorted(sources.items())), [entry for entry in found if isinstance(entry, Skipped)]


def _parse(sources: dict[str, SourceFile], at: Callable[[str], None]) -> tuple[dict[str, ast.Module], list[Skipped]]:
    trees: dict[str, ast.Module] = {}
    failed: list[Skipped] = []
    broken: dict[str, str] = {}
    for name, source in sources.items():
        at(name)
        try:
            trees[name] = source.parse()
        except SyntaxError as error:
            broken[name] = f"line {error.lineno}: {error.msg}"
        except (ValueError, *EXHAUSTION) as error:
            failed.append(Skipped(name, SkipReason.SYNTAX, str(error) or TOO_DEEP))
    at("")
    newer = newer_syntax([sources[name] for name in broken])
    for name, detail in broken.items():
        why = f"{detail}; LibCST parses it: its syntax is newer than Python {VERSION}" if name in newer else detail
        failed.append(Skipped(name, SkipReason.SYNTAX, why))
    return trees, failed


def _visit(file: FileFacts, rules: Sequence[Rule]) -> list[Finding] | str:
    """Findings, or why there are none: a rule that fails costs the file.

    Each rule sees the nodes of the types it asked for, in files that have one of its words.
    """
    found: list[Finding] = []
    has = cache(file.source.text.__contains__)
    for rule in rules:
        if any(map(has, rule.markers)):
            try:
                found += chain.from_iterable(map(rule.decide, file.file.of(*rule.nodes), repeat(file)))
            except EXHAUSTION as error:
                return said(error)
            except Exception as error:
                return f"a fault of {rule.code} {rule.slug}: {type(error).__name__}: {error}"
    if comments := suppressions(file.source):
        found, comments = suppress(found, comments)
        run = frozenset(rule.code for rule in rules)
        found += chain.from_iterable(rule.review(comments, run, file) for rule in rules)
    return found
