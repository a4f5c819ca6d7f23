"""The contract of a rule: one file in `ddaudit.rules` that says what breaks, decides, and builds its fix."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from ddaudit.auditor.finding import Applicability, Confidence, Finding, Fix, Severity

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Sequence

    from ddaudit.auditor.claim import Claim
    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.scopes import Named
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.suppressions import Suppression


@dataclass(frozen=True)
class Good:
    """Code that looks like the defect and is not one."""

    code: str

    @property
    def text(self) -> str:
        return textwrap.dedent(self.code).lstrip("\n")


@dataclass(frozen=True)
class Bad:
    """Code with the defect; `fixed` is the text after this rule's edits, None where only a report is right."""

    code: str
    fixed: str | None = None
    findings: int = 1

    @property
    def text(self) -> str:
        return textwrap.dedent(self.code).lstrip("\n")

    @property
    def fixed_text(self) -> str:
        return textwrap.dedent(self.fixed or "").lstrip("\n")


class Rule(ABC):
    """A brittle pattern. The module's docstring is its page; slug and file name follow from the class's name."""

    code: ClassVar[str]
    kind: ClassVar[str]
    severity: ClassVar[Severity]
    message: ClassVar[str]
    """The problem, then the remedy; `{name}` fields are filled by `report`."""
    since: ClassVar[str] = ""
    """The release of Transformers from which the code fails, where `report` is not told another; empty: any."""
    nodes: ClassVar[tuple[type[ast.AST] | Named, ...]]
    """Node types that `decide` wants to see, or those of a type with certain names."""
    markers: ClassVar[tuple[str, ...]]
    """A file with none of these strings cannot hold a finding."""
    EXAMPLES: ClassVar[tuple[Good | Bad, ...]]

    @property
    def slug(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def page(self) -> str:
        return inspect.getdoc(inspect.getmodule(type(self))) or ""

    @property
    def has_fix(self) -> bool:
        return any(isinstance(example, Bad) and example.fixed is not None for example in self.EXAMPLES)

    @abstractmethod
    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        """Findings at this node."""

    def review(self, comments: Sequence[Suppression], run: frozenset[str], file: FileFacts) -> Iterator[Finding]:
        """Findings about comments that suppress, with what each suppressed of the rules that were `run`, by code."""
        yield from ()

    def report(
        self,
        file: FileFacts,
        node: ast.AST,
        because: Value,
        *,
        fix: Fix | str = "",
        severity: Severity | None = None,
        message: str = "",
        claim: Claim | None = None,
        since: str | None = None,
        gone_in: str = "",
        **fields: str,
    ) -> Finding:
        """A finding at `node`. `fix` is the fix, or why there is none; `claim` is what the line asks of a model. What
        still works, and fails from a release on, has that as `gone_in`.

        Severity and message are those of the default target; where there is a claim, profiles have their say.

        Only a proven receiver keeps a safe fix: with less, the rewrite is right if the receiver is what it
        seems, and a person has to look.
        """
        receiver = node
        # Inside an f-string a rewrite may clash with the quotes, and parsers before 3.12 misplace what stands there.
        string = file.string_around(node)
        if string is not None:
            node = string
            fix = "it stands inside an f-string" if isinstance(fix, Fix) else fix
        if isinstance(fix, Fix) and any(file.source.has_comment(edit.start, edit.end) for edit in fix.edits):
            fix = "a comment stands inside the code that would be replaced"
        if (
            isinstance(fix, Fix)
            and fix.applicability is Applicability.SAFE
            and because.confidence is not Confidence.PROVEN
        ):
            reason = f"{fix.reason}; that this is a {because.kind.value} is {because.confidence.value}, not proven"
            fix = replace(fix, applicability=Applicability.UNSAFE, reason=reason)
        return Finding(
            code=self.code,
            slug=self.slug,
            kind=self.kind,
            path=file.source.path,
            span=file.span(node),
            expr=" ".join(file.text(node).split())[:160],
            message=(message or self.message).format(**fields),
            severity=severity or self.severity,
            confidence=because.confidence,
            evidence=(*because.evidence, *file.steps(receiver, because)),
            fix=fix if isinstance(fix, Fix) else None,
            no_fix_reason="" if isinstance(fix, Fix) else fix,
            claim=claim,
            since=self.since if since is None else since,
            gone_in=gone_in,
        )


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of the package `ddaudit.rules`, by code. A module that is not a rule starts with `_`."""
    package = importlib.import_module("ddaudit.rules")
    found: list[Rule] = []
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"ddaudit.rules.{info.name}")
        found += [
            member()
            for _, member in inspect.getmembers(module, inspect.isclass)
            if issubclass(member, Rule) and member.__module__ == module.__name__
        ]
    return tuple(sorted(found, key=lambda rule: rule.code))


def select_rules(select: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """Rules whose code starts with, or whose slug is, one of `select` (empty: all) and none of `ignore`.

    Raises ValueError for a name that no rule has.
    """
    rules = all_rules()

    def named(names: tuple[str, ...]) -> set[str]:
        chosen: set[str] = set()
        for name in names:
            hits = {rule.code for rule in rules if rule.slug == name.lower() or rule.code.startswith(name.upper())}
            if not name or not hits:
                raise ValueError(f"no rule {name!r}: `ddaudit explain` lists codes and slugs")
            chosen |= hits
        return chosen

    chosen = named(select) if select else {rule.code for rule in rules}
    chosen -= named(ignore)
    return tuple(rule for rule in rules if rule.code in chosen)
