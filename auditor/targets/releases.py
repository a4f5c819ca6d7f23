"""Which release of Transformers a scan is about, who says so, and what that means for a finding and its fix.

A research repository's pin is its past: it tells where the code comes from, and the code is ported to a newer release.
So a pin to a release on which no fork can run is stated and silences nothing; only `--transformers` makes such a
release the target.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ddaudit.auditor.facts.names import RELEASE as NEWEST
from ddaudit.auditor.finding import RUNTIME_SINCE, Applicability, Finding, Severity
from ddaudit.auditor.sources.requirements import Requirement, read_requirement

if TYPE_CHECKING:
    from pathlib import Path

# Every minor release known by number; what a range admits is found among them.
MINORS = (*(f"4.{minor}" for minor in range(58)), *(f"5.{minor}" for minor in range(int(NEWEST.split(".")[1]) + 1)))
CLAUSE = re.compile(r"^(===|==|~=|!=|>=|<=|\^|~|=|>|<)?v?(\d+(?:\.\d+)*)(\.\*)?")


@dataclass(frozen=True)
class Releases:
    """The release that findings are about and fixes have to work on."""

    target: str
    source: str
    """Who says so, as words that follow the release."""
    oldest: str
    """The oldest release on which a fix of what fails on the target has to work."""
    requirement: Requirement | None = None
    """What the repository itself says."""
    written_for: str = ""
    """The newest release that the repository, or the flag, says the code is for; empty where nothing says."""
    lowest: str = ""
    """The oldest such release."""
    is_assumed: bool = False
    """Nobody named the target or has it installed: a fix has to work from the oldest release of a fork on."""

    def begins_later(self, finding: Finding) -> bool:
        """Whether the line is still right on the releases that the code is for."""
        return bool(finding.since and self.written_for) and number(finding.since) > number(self.written_for)

    def to_json(self) -> dict[str, Any]:
        asked = self.requirement
        project = {"requirement": asked.releases, "path": asked.path, "line": asked.line} if asked else None
        return {"release": self.target, "source": self.source, "project": project}


def number(release: str) -> tuple[int, ...]:
    """`4.57.1` as three numbers that compare; what follows them, such as `rc1`, is left out."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", release)
    parts = [int(part) for part in found[1].split(".")] if found else []
    return (*parts, 0, 0, 0)[: max(3, len(parts))]


def choose(root: Path, asked: str = "") -> Releases:
    """By `--transformers`, else the repository's metadata, else what is installed, else the newest release known.

    Of a release beyond that `source` says so. Raises ValueError where `asked` is no release.
    """
    chosen = _choose(root, asked)
    if number(chosen.target)[:2] <= number(NEWEST)[:2]:
        return chosen
    return replace(chosen, source=f"{chosen.source}; the newest that the rules know is {NEWEST}")


def _choose(root: Path, asked: str) -> Releases:
    requirement = read_requirement(root)
    if asked:
        if not re.fullmatch(r"v?\d+(\.\d+){0,2}\w*", asked):
            raise ValueError(f"--transformers {asked}: give one release, such as {NEWEST}")
        return Releases(asked, "by --transformers", asked, requirement, asked, asked)
    if requirement is not None:
        return _by_project(requirement)
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return Releases(NEWEST, "the newest known; nothing names one", RUNTIME_SINCE, is_assumed=True)
    if number(installed) < number(RUNTIME_SINCE):
        source = f"the newest known; {installed} is installed, on which no fork runs"
        return Releases(NEWEST, source, RUNTIME_SINCE, written_for=installed, is_assumed=True)
    return Releases(installed, "installed", installed)


def _by_project(requirement: Requirement) -> Releases:
    admitted = [release for release in _candidates(requirement.releases) if admits(requirement.releases, release)]
    newest, lowest = (admitted[-1], admitted[0]) if admitted else ("", "")
    if not newest or number(newest) < number(RUNTIME_SINCE):
        source = f"the newest known; the code is for {requirement}"
        return Releases(NEWEST, source, RUNTIME_SINCE, requirement, newest, lowest, is_assumed=True)
    target = NEWEST if number(newest)[:2] == number(NEWEST)[:2] and newest in MINORS else newest
    # A release that the project admits and no fork runs on is none that a fix of a failing line has to serve.
    oldest = max(lowest, RUNTIME_SINCE, key=number)
    return Releases(target, f"the newest admitted by {requirement}", oldest, requirement, target, lowest)


def _candidates(releases: str) -> list[str]:
    """Releases known, and those that the requirement names, in order."""
    named = [found[2] for clause in re.split(r"[,\s|]+", releases) if (found := CLAUSE.match(clause))]
    return sorted({number(release): release for release in (*named, *MINORS)}.values(), key=number)


def admits(releases: str, release: str) -> bool:
    """Whether a requirement, as Python packages, Poetry or conda write it, admits the release."""
    return any(
        all(_admits(clause, number(release)) for clause in choice.split(",") if clause)
        for choice in releases.split("|")
        if choice
    )


def _admits(clause: str, release: tuple[int, ...]) -> bool:
    found = CLAUSE.match(clause)
    if found is None:
        return True
    operator, text, is_prefix = found[1] or "==", found[2], bool(found[3])
    named, digits = number(text), text.count(".") + 1
    same = release[:digits] == named[:digits]
    match operator:
        case "==" | "===" | "=":
            return same if is_prefix or operator == "=" else release == named
        case "!=":
            return not same if is_prefix else release != named
        case ">=":
            return release >= named
        case "<=":
            return release <= named
        case ">":
            return release > named
        case "<":
            return release < named
        case "^":
            return release >= named and release[0] == named[0]
        case "~=":
            return release >= named and release[: max(digits - 1, 1)] == named[: max(digits - 1, 1)]
        case _:
            return release >= named and release[: min(digits, 2)] == named[: min(digits, 2)]


def on_release(finding: Finding, releases: Releases) -> Finding:
    """The finding as it is on the target, with the fix that may be made for these releases.

    What fails on the target is rewritten where the replacement exists there. A line that still works there is
    rewritten, without a person looking, only where the code is for no release that lacks the replacement.
    """
    if finding.severity is Severity.WARN and finding.gone_in and number(releases.target) >= number(finding.gone_in):
        finding = replace(finding, severity=Severity.ERROR)
    fix = finding.fix
    if fix is None or not fix.exists_since:
        return finding
    needed = number(fix.exists_since)
    if needed > number(releases.oldest if releases.is_assumed else releases.target):
        said = "no release is named by `--transformers`" if releases.is_assumed else f"{releases.target} is meant"
        reason = f"its replacement exists from Transformers {fix.exists_since}, and {said}"
        return replace(finding, fix=None, no_fix_reason=reason)
    works = finding.severity is Severity.WARN
    oldest = releases.lowest if works else releases.oldest
    if oldest and needed <= number(oldest):
        return finding
    said = f"the code is for Transformers {oldest} too" if oldest else "nothing says that no older one is meant"
    reason = f"{fix.reason}; the replacement exists from Transformers {fix.exists_since}, and {said}"
    return replace(finding, fix=replace(fix, applicability=Applicability.UNSAFE, reason=reason))
