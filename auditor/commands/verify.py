"""`--verify`: findings tried on the targets' own classes, which needs the runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddaudit.auditor.commands.probe import load_runtime
from ddaudit.auditor.finding import Status
from ddaudit.auditor.profile import DEFAULT_TARGET
from ddaudit.auditor.targets.targeting import neutrality
from ddaudit.auditor.targets.verifying import claims_of, verified

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddaudit.auditor.claim import Answer, Claim
    from ddaudit.auditor.finding import Finding
    from ddaudit.auditor.scanning.result import ScanResult


def try_all(findings: Sequence[Finding], targets: Sequence[str] = ()) -> list[Finding]:
    """Each finding with what came of trying it on every class of every target."""
    runtime = load_runtime("trying")
    claims = claims_of(findings)
    tried: dict[Claim, dict[str, Answer]] = {claim: {} for claim in claims}
    for target in targets or (DEFAULT_TARGET,):
        try:
            found = runtime.try_on(target, claims)
        except runtime.RunError as error:
            raise ValueError(f"{target}: {error}") from error
        for claim, answers in found.items():
            tried[claim] |= answers
    return [verified(finding, tried) for finding in findings]


def verify(result: ScanResult, targets: Sequence[str]) -> ScanResult:
    """The result with findings tried: those refuted are notes and do not count."""
    tried = try_all(result.findings, targets)
    kept = tuple(finding for finding in tried if not _is_refuted(finding))
    notes = tuple(finding for finding in tried if _is_refuted(finding))
    return replace(result, findings=kept, notes=notes, neutrality=neutrality(kept))


def _is_refuted(finding: Finding) -> bool:
    return finding.verified is not None and finding.verified.status is Status.REFUTED
