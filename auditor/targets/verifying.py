"""What trying a finding comes to: confirmed, refuted, or not testable, with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Severity, Status, Verified
from ddaudit.auditor.targets.targeting import reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddaudit.auditor.claim import Answer, Claim
    from ddaudit.auditor.finding import Finding

NOTHING_ASKED = "it asks nothing of a model or cache that a class alone could answer"
REFUSED = "the class runs no token without weights, so it does not say"


def verified(finding: Finding, tried: Mapping[Claim, Mapping[str, Answer]]) -> Finding:
    """The finding with what came of it; `tried` has the answer of each class of the targets, by claim."""
    return replace(finding, verified=_verified(finding, tried))


def _verified(finding: Finding, tried: Mapping[Claim, Mapping[str, Answer]]) -> Verified:
    if finding.claim is None:
        return Verified(Status.NOT_TESTABLE, NOTHING_ASKED)
    answers = tried.get(finding.claim, {})
    if not answers:
        return Verified(Status.NOT_TESTABLE, REFUSED)
    failing = [
        f"{answer.outcome.value} on `{name}`: {answer.reason}" for name, answer in answers.items() if not answer.works
    ]
    if failing:
        return Verified(Status.CONFIRMED, "; ".join(failing))
    works = f"it works on {', '.join(f'`{name}`' for name in answers)}"
    # The release that is installed may have what the one that is meant has not.
    if finding.severity is Severity.WARN or finding.gone_in:
        return Verified(Status.CONFIRMED, f"{works}, under a name that is to go")
    found = reach(finding.claim) if finding.severity is Severity.PORT else None
    if found is not None and found.failing:
        return Verified(
            Status.CONFIRMED, f"{works}, and fails on {len(found.failing)} architectures: {found.failing[0]}"
        )
    return Verified(Status.REFUTED, works)


def claims_of(findings: Iterable[Finding]) -> list[Claim]:
    """Each once, in order."""
    return sorted({finding.claim for finding in findings if finding.claim is not None})
