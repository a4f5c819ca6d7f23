"""What a scan comes to: the plain, frozen data that reports, the fix and the cache of results share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability
from ddaudit.auditor.targets.releases import on_release

if TYPE_CHECKING:
    from ddaudit.auditor.finding import Finding
    from ddaudit.auditor.sources.source import Skipped
    from ddaudit.auditor.targets.releases import Releases
    from ddaudit.auditor.targets.targeting import Neutrality


@dataclass(frozen=True)
class ScanResult:
    """What a scan found, sorted, and what it could not examine."""

    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...]
    num_scanned: int
    limits: tuple[str, ...] = ()
    """What the facts of this scan could not take in, a sentence each."""
    notes: tuple[Finding, ...] = ()
    """Findings that trying refuted: they do not count."""
    neutrality: Neutrality | None = None
    """How far the lines are from one model, where that was asked."""
    releases: Releases | None = None
    """The release of Transformers that findings and fixes are for."""
    suppressed: tuple[Finding, ...] = ()
    """Findings that a comment keeps: they neither count nor are fixed."""

    @property
    def failed(self) -> tuple[Skipped, ...]:
        return tuple(entry for entry in self.skipped if entry.is_failure)

    def fixable(self, unsafe: bool = False) -> tuple[Finding, ...]:
        """Findings that `fix` mends, with `--unsafe` or without."""
        wanted = (Applicability.SAFE, Applicability.UNSAFE) if unsafe else (Applicability.SAFE,)
        return tuple(finding for finding in self.findings if finding.fix and finding.applicability in wanted)

    def on(self, releases: Releases) -> ScanResult:
        """The same for these releases: with the fixes that may be made for them."""
        found = tuple(on_release(finding, releases) for finding in self.findings)
        kept = tuple(on_release(finding, releases) for finding in self.suppressed)
        return replace(self, findings=found, suppressed=kept, releases=releases)

    @property
    def exit_code(self) -> int:
        return 2 if self.failed else 1 if self.findings else 0
