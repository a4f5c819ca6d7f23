"""What a rule found: the plain, frozen data that passes between the stages of a scan and a fix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddaudit.auditor.claim import Claim


RUNTIME_SINCE = "5.17"
"""The oldest release of Transformers on which a fork that calls `ddaudit.runtime` runs."""


class Severity(str, Enum):
    """What happens on the target when the line runs."""

    ERROR = "error"
    """It raises."""
    SILENT = "silent"
    """It runs, and the result is wrong or the line has no effect."""
    PORT = "port"
    """It works for one loader class or model family and fails for others."""
    WARN = "warn"
    """It still works: it is deprecated, or a comment that suppresses is to be put right."""


class Confidence(str, Enum):
    """How sure the facts are that the receiver is what the rule takes it for."""

    PROVEN = "proven"
    LIKELY = "likely"
    GUESS = "guess"

    # As fast as a string's own: by name, as `Enum` has it, hashing calls Python code.
    __hash__ = str.__hash__


class Applicability(str, Enum):
    """Whether the fix of one finding may be applied without a person looking at it."""

    SAFE = "safe"
    """Unchanged on the architecture the code was written for, and right on the new one."""
    UNSAFE = "unsafe"
    """Right in the cases known; applied with `--unsafe` only."""
    DISPLAY_ONLY = "display-only"
    """No edit: the message says what to do."""


@dataclass(frozen=True, order=True)
class Span:
    """A stretch of one file's decoded text.

    `start` and `end` are code-point offsets into the decoded text (the byte-order mark not counted, newlines
    as they stand in the file); lines and columns count from 1, columns in code points, the end exclusive.
    """

    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, order=True)
class Edit:
    """Replace the text between two code-point offsets of the decoded source. `start == end` inserts."""

    start: int
    end: int
    replacement: str


@dataclass(frozen=True, order=True)
class Import:
    """`from module import name`: what a fix's replacement text needs to find bound in its module."""

    module: str
    name: str


@dataclass(frozen=True)
class Fix:
    """The edits that mend one finding, applied together or not at all."""

    edits: tuple[Edit, ...]
    applicability: Applicability
    reason: str
    """Why it is safe or not, in a sentence a reviewer can check."""
    imports: tuple[Import, ...] = ()
    since: str = ""
    """The release of Transformers from which the replacement exists; empty for every one known."""

    @property
    def exists_since(self) -> str:
        """The same, for the runtime's calls too."""
        return self.since or (RUNTIME_SINCE if any(each.module.startswith("ddaudit.") for each in self.imports) else "")


class Status(str, Enum):
    """What came of trying a finding on the class itself."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_TESTABLE = "not testable"


@dataclass(frozen=True)
class Verified:
    """A finding held against the class: what came of it, and why."""

    status: Status
    reason: str


@dataclass(frozen=True)
class Finding:
    """One place that breaks on the target, and what is known about it."""

    code: str
    slug: str
    kind: str
    """The label kind's name, such as `cache-crop`; the slug for rules beyond those kinds."""
    path: str
    """Relative to the scanned root, with forward slashes."""
    span: Span
    expr: str
    message: str
    """The problem, then the remedy."""
    severity: Severity
    confidence: Confidence
    evidence: tuple[str, ...]
    """What the confidence rests on, one `path:line: fact` each."""
    fix: Fix | None = None
    no_fix_reason: str = ""
    """Why there is no edit, where `fix` is None."""
    claim: Claim | None = None
    """What the line asks of a model, where a profile or the class itself can answer."""
    verified: Verified | None = None
    """What came of trying it, where it was tried."""
    since: str = ""
    """The release of Transformers from which the line fails so; empty for every one known: a model is to blame."""
    gone_in: str = ""
    """The release of Transformers on which a line that still works fails; empty where none is named."""
    suppressed: str | None = None
    """The reason that a comment gives for keeping it, empty where it gives none; None where no comment does."""

    @property
    def applicability(self) -> Applicability:
        return self.fix.applicability if self.fix else Applicability.DISPLAY_ONLY

    @property
    def sort_key(self) -> tuple[str, int, int, str, str]:
        return (self.path, self.span.start, self.span.end, self.code, self.message)

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form: names stay, more may be added."""
        tried = (
            {"verified": self.verified.status.value, "verified_reason": self.verified.reason} if self.verified else {}
        )
        kept = {} if self.suppressed is None else {"suppressed": True, "suppressed_reason": self.suppressed}
        return {
            "code": self.code,
            "slug": self.slug,
            "kind": self.kind,
            "path": self.path,
            "line": self.span.line,
            "column": self.span.column,
            "end_line": self.span.end_line,
            "end_column": self.span.end_column,
            "expr": self.expr,
            "severity": self.severity.value,
            "confidence": self.confidence.value,
            "applicability": self.applicability.value,
            "since": self.since,
            "fix_since": self.fix.exists_since if self.fix else "",
            "fix_reason": self.fix.reason if self.fix else self.no_fix_reason,
            "message": self.message,
            "evidence": list(self.evidence),
            **tried,
            **kept,
        }
