"""Findings as they are on the targets that were asked for: severity and message follow the profiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Outcome
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.profile import load_profile, profile_names
from ddaudit.auditor.targets.judging import judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddaudit.auditor.claim import Answer, Claim
    from ddaudit.auditor.finding import Finding
    from ddaudit.auditor.profile import Profile

_RANK = (Severity.WARN, Severity.PORT, Severity.SILENT, Severity.ERROR)
# Their messages say already what happens, and on which layers.
_SAID = frozenset({Ask.CROP_LENGTH, Ask.CACHE_NAME, Ask.CACHE_PAIRS, Ask.LAYER_STATE})


def on_targets(findings: Iterable[Finding], targets: Sequence[Profile]) -> list[Finding]:
    """Each finding with the severity and the words of these targets: the worst of them counts."""
    return [_on_targets(finding, targets) for finding in findings]


def _on_targets(finding: Finding, targets: Sequence[Profile]) -> Finding:
    if finding.claim is None:
        return finding
    severities, said = [], []
    for target in targets:
        answers = answers_of(finding.claim, target)
        if answers:
            severities.append(severity_on(finding.severity, list(answers.values())))
        if answers and severities[-1] is not Severity.WARN:
            said += _sentences(finding.claim, answers)
    if not severities:
        return finding
    message = "; ".join([finding.message, *dict.fromkeys(said)])
    return replace(finding, severity=max(severities, key=_RANK.index), message=message)


def answers_of(claim: Claim, target: Profile) -> dict[str, Answer]:
    """The answer of each class of the target that has one."""
    found = ((facts.name, judge(claim, facts)) for facts in target.classes)
    return {name: answer for name, answer in found if answer is not None}


def severity_on(severity: Severity, answers: Sequence[Answer]) -> Severity:
    """Where every loader's class fails alike, how it fails; where none does, a line to port at most."""
    outcomes = {answer.outcome for answer in answers}
    if severity is Severity.WARN and outcomes == {Outcome.WORKS}:
        return severity
    return {
        frozenset({Outcome.RAISES}): Severity.ERROR,
        frozenset({Outcome.SILENT}): Severity.SILENT,
        frozenset({Outcome.WORKS}): Severity.PORT,
    }.get(frozenset(outcomes), severity)


def _sentences(claim: Claim, answers: dict[str, Answer]) -> list[str]:
    if claim.ask in _SAID:
        return []
    groups: dict[tuple[str, str], list[str]] = {}
    for name, answer in answers.items():
        groups.setdefault((answer.outcome.value, answer.reason), []).append(f"`{name}`")
    failing = [key for key in groups if key[0] != Outcome.WORKS.value] or list(groups)
    return [f"{key[0]} on {' and '.join(groups[key])}" + (f": {key[1]}" if key[1] else "") for key in failing]


@dataclass(frozen=True)
class Reach:
    """On how many of the built-in architectures a line works, of those whose facts say."""

    works: frozenset[str]
    known: frozenset[str]
    failing: tuple[str, ...]
    """`Class: why`, one for each architecture on which it does not."""

    @property
    def share(self) -> float:
        return len(self.works) / len(self.known)


def reach(claim: Claim) -> Reach | None:
    """None where no profile has an answer, as for an import."""
    works, known, failing = set(), set(), []
    for name in profile_names():
        answers = answers_of(claim, load_profile(name))
        if not answers:
            continue
        known.add(name)
        wrong = [f"`{each}`: {answer.reason}" for each, answer in answers.items() if not answer.works]
        if wrong:
            failing.append(wrong[0])
        else:
            works.add(name)
    return Reach(frozenset(works), frozenset(known), tuple(failing)) if known else None


@dataclass(frozen=True)
class Neutrality:
    """How far a repository's lines are from one model: a share of the built-in architectures."""

    score: float
    """The share of them on which a line works, averaged over the lines that were asked about; 1 without any."""
    num_lines: int
    num_architectures: int
    num_served: int
    """Architectures on which every one of those lines works."""

    def __str__(self) -> str:
        return (
            f"{self.score:.0%} of {self.num_architectures} architectures a line, over {self.num_lines}; "
            f"all of them work on {self.num_served}"
        )


def neutrality(findings: Iterable[Finding], num_fixed: int = 0) -> Neutrality:
    """Of the lines found; `num_fixed` more were found and are fixed, and a fixed line works everywhere."""
    reaches = [found for finding in findings if finding.claim and (found := reach(finding.claim))]
    served = set(profile_names())
    for found in reaches:
        served -= found.known - found.works
    num_lines = len(reaches) + num_fixed
    total = sum(found.share for found in reaches) + num_fixed
    return Neutrality(total / num_lines if num_lines else 1.0, num_lines, len(profile_names()), len(served))
