"""A comment that suppresses nothing, everything, or what no rule finds.

`# ddaudit: ignore[RULE] reason` keeps a finding that a repository has to live with: on any line of the statement, or
alone on the line before it; `ignore-file` for the whole file. `# noqa: DDA101` does the same on its statement. Such a
comment outlives its reason. One whose finding is gone, or that names a rule which does not exist, misleads whoever
reads it; one that names no rule hides the next defect too. A blanket comment still suppresses, so that no fix touches
the line, and is reported until it names its rules. This rule itself is left out with `--ignore DDA501` only.

On: every release; it is about comments, not about a model.
Seen: linters that report comments of their own that have no effect.
Fix: safe: no code changes, and what a scan reports of the code stays the same.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability, Confidence, Edit, Finding, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule, all_rules
from ddaudit.auditor.suppressions import MARKERS, code_of

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Sequence

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.sources.source import SourceFile
    from ddaudit.auditor.suppressions import Suppression

REASON = "no code changes, and the comment kept nothing of what goes from it"


class FaultySuppression(Rule):
    code = "DDA501"
    kind = "faulty-suppression"
    severity = Severity.WARN
    message = "{problem}; write `# ddaudit: ignore[RULE] reason` with what is found there, or nothing"
    nodes = ()
    markers = MARKERS
    EXAMPLES = (
        Good("""
            x = 1  # noqa: E501
        """),
        Good("""
            text = "# ddaudit: ignore[DDA999] in a text"
        """),
        Good("""
            # as ddaudit: ignore[DDA101] has it, in prose
            x = 1
        """),
        Bad(
            """
            x = 1  # ddaudit: ignore[DDA999] because
            """,
            """
            x = 1
            """,
        ),
        Bad(
            """
            x = 1  # noqa: E501, DDA999
            """,
            """
            x = 1  # noqa: E501
            """,
        ),
        Bad(
            """
            def f(x):
                # ddaudit: ignore[DDA999] because
                return x
            """,
            """
            def f(x):
                return x
            """,
        ),
        Bad("""
            cache.crop(n)  # ddaudit: ignore[cache-corp] because
        """),
        Bad("""
            cache.crop(n)  # ddaudit: ignore because
        """),
        Bad("""
            cache.crop(n)  # ddaudit: ingore[DDA102] because
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        yield from ()

    def review(self, comments: Sequence[Suppression], run: frozenset[str], file: FileFacts) -> Iterator[Finding]:
        for comment in comments:
            problem, fix = _judged(comment, run, file.source)
            if problem:
                span = file.source.span(comment.start, comment.end)
                yield Finding(
                    code=self.code,
                    slug=self.slug,
                    kind=self.kind,
                    path=file.source.path,
                    span=span,
                    expr=file.source.text[comment.start : comment.end][:160],
                    message=self.message.format(problem=problem),
                    severity=self.severity,
                    confidence=Confidence.PROVEN,
                    evidence=(f"{file.source.path}:{span.line}: the comment",),
                    fix=Fix(fix, Applicability.SAFE, REASON) if not isinstance(fix, str) else None,
                    no_fix_reason=fix if isinstance(fix, str) else "",
                )


def _judged(comment: Suppression, run: frozenset[str], source: SourceFile) -> tuple[str, tuple[Edit, ...] | str]:
    """What is wrong with it, empty for nothing; and the edits that mend it, or why there are none."""
    if not comment.is_understood:
        return f"`{comment.form}` is neither `ignore` nor `ignore-file`", "what it was to suppress is not known"
    if not comment.names:
        problem = "a suppression without a rule hides whatever comes"
        if run != {rule.code for rule in all_rules()}:
            return problem, "not every rule was looked for, so what it suppresses is not known"
        return problem, _rewritten(comment, sorted(comment.held), source)
    ours = [name for name in comment.names if comment.form != "noqa" or name.startswith("DDA")]
    unknown = [name for name in ours if not code_of(name)]
    unused = [name for name in ours if code_of(name) in run - comment.held]
    problems = [f"`{name}` is no rule{_meant(name)}" for name in unknown]
    problems += [f"`{name}` is not found there" for name in unused]
    if any(map(_meant, unknown)):
        return "; ".join(problems), "another rule may be meant"
    kept = [name for name in comment.names if name not in (*unknown, *unused)]
    return "; ".join(problems), _rewritten(comment, kept, source)


def _meant(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [rule.slug for rule in all_rules()], 1, 0.8)
    return f" (`{near[0]}`?)" if near else ""


def _rewritten(comment: Suppression, names: Sequence[str], source: SourceFile) -> tuple[Edit, ...]:
    """The comment with these names, or without any gone: its line too, where it stands alone on it."""
    text, start, end = source.text, comment.start, comment.end
    if names and comment.form == "noqa":
        return (Edit(start, end, f"# noqa: {', '.join(names)}"),)
    if names:
        return (Edit(start, end, f"# ddaudit: {comment.form}[{', '.join(names)}] {comment.reason}".rstrip()),)
    number = source.span(start, start).line - 1
    first = source.line_starts[number]
    last = source.line_starts[number + 1] if number + 1 < len(source.line_starts) else len(text)
    before, after = text[first:start], text[end:last]
    if before.strip():
        return (Edit(first + len(before.rstrip()), end, ""),)
    if after.strip():
        return (Edit(start, end + len(after) - len(after.lstrip()), ""),)
    return (Edit(first, last, ""),)
