"""Scanning: sources in, facts once, every rule in one visit of each file, findings out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import names as names_of_releases
from ddaudit.auditor.facts.values import RANK
from ddaudit.auditor.finding import Confidence
from ddaudit.auditor.profile import DEFAULT_TARGET, load_profile
from ddaudit.auditor.rule import all_rules, select_rules
from ddaudit.auditor.scanning.examining import Examined, examine, markers
from ddaudit.auditor.scanning.parts import MAX_WHOLE, divide
from ddaudit.auditor.scanning.result import ScanResult
from ddaudit.auditor.scanning.workers import Workers, num_workers
from ddaudit.auditor.sources.selection import select_files
from ddaudit.auditor.sources.source import list_tree, read_tree
from ddaudit.auditor.targets.releases import choose
from ddaudit.auditor.targets.targeting import on_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ddaudit.auditor.profile import Profile
    from ddaudit.auditor.scanning.result_cache import ResultCache
    from ddaudit.auditor.sources.source import Listed, Skipped, SourceFile


def scan(
    paths: Sequence[Path],
    *,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    min_confidence: Confidence = Confidence.LIKELY,
    targets: tuple[str, ...] = (),
    transformers: str = "",
    cache: ResultCache | None = None,
) -> ScanResult:
    """Scan files and folders together: facts of one file serve the others. Of files alone only their own findings
    are given, and the facts are those of their repository.

    Severities and messages are those of `targets`, profiles by name or file; without any, of the default one. Fixes
    are those for the release `transformers`; without one it is chosen by the repository or what is installed. What
    `cache` holds of a scan of the same bytes with the same settings is given again.

    Raises FileNotFoundError for a missing path; ValueError where there is no Python file, or no such rule, profile or
    release.
    """
    files: Mapping[str, Listed | SourceFile]
    names: frozenset[str] | None = None
    if any(path.is_dir() for path in paths):
        listing = list_tree(paths)
        # A file is read where it is examined.
        root, files, skipped = listing.root, listing.files, listing.skipped
    else:
        selection = select_files(paths, markers(select_rules(select, ignore)))
        tree, names = selection.tree, selection.names
        root, files, skipped = tree.root, tree.sources, tree.skipped
    releases = choose(root, transformers)

    def run() -> ScanResult:
        return scan_sources(
            files, skipped, names, select=select, ignore=ignore, min_confidence=min_confidence, targets=targets
        )

    if cache is None:
        return run().on(releases)
    settings = {
        "rules": [rule.code for rule in select_rules(select, ignore)],
        "min_confidence": min_confidence.value,
        "targets": [profile.to_json() for profile in _profiles(targets)],
        "names": None if names is None else sorted(names),
        "skipped": [(entry.path, entry.reason.value, entry.detail) for entry in skipped],
    }
    # What is meant for a release is chosen after, from what holds for all.
    return cache.result(run, files, settings).on(releases)


def sources_of(paths: Sequence[Path]) -> Mapping[str, SourceFile]:
    """The files that a scan of `paths` learns from, read, by the names that its findings have; raises as it does."""
    if any(path.is_dir() for path in paths):
        return read_tree(paths).sources
    return select_files(paths, markers(all_rules())).tree.sources


def scan_sources(
    sources: Mapping[str, SourceFile | Listed],
    skipped: tuple[Skipped, ...] = (),
    names: frozenset[str] | None = None,
    *,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    min_confidence: Confidence = Confidence.LIKELY,
    targets: tuple[str, ...] = (),
    workers: int | None = None,
) -> ScanResult:
    """Scan texts in memory or listed files, by path; report on `names`, or on all. `skipped` goes into the result.

    A repository is examined as a whole, with one set of facts. A tree that is too large for that is examined folder
    by folder, by so many workers, or one for each core; that facts do not pass between its parts is in `limits`.
    """
    profiles = _profiles(targets)
    examiner = _Examiner(sources, frozenset(rule.code for rule in select_rules(select, ignore)), names)
    parts = divide({name: source.size for name, source in sources.items()})
    # Of a file named alone only its own part matters.
    wanted = [part for part in parts if names is None or not names.isdisjoint(part)] or parts[:1]
    limits: tuple[str, ...] = ()
    if len(wanted) == 1:
        examined = [examiner(wanted[0])]
    else:
        names_of_releases.load()
        pool: Workers[Examined] = Workers(examiner, workers or min(num_workers(), len(wanted)))
        pool.run(wanted)
        examined = [*pool.results, Examined((), tuple(pool.lost), 0)]
        limits += _halved(pool.num_halved)
    if len(parts) > 1:
        limits = (_divided(parts, sources), *limits)
    found = (finding for result in examined for finding in result.findings)
    sure = (finding for finding in found if RANK[finding.confidence] >= RANK[min_confidence])
    findings = sorted(on_targets(sure, profiles), key=lambda finding: finding.sort_key)
    left_out = {*skipped, *(entry for result in examined for entry in result.skipped)}
    if names is not None:
        left_out = {entry for entry in left_out if entry.path in names}
    num_scanned = sum(result.num_scanned for result in examined)
    return ScanResult(
        findings=tuple(finding for finding in findings if finding.suppressed is None),
        skipped=tuple(sorted(left_out)),
        num_scanned=num_scanned if names is None else len(names) - len({entry.path for entry in left_out}),
        limits=limits,
        suppressed=tuple(finding for finding in findings if finding.suppressed is not None),
    )


@dataclass(frozen=True)
class _Examiner:
    """Examines a part of these files; plain data, so that a worker can be handed it."""

    files: Mapping[str, SourceFile | Listed]
    codes: frozenset[str]
    names: frozenset[str] | None

    def __call__(self, part: Sequence[str], at: Callable[[str], None] = lambda name: None) -> Examined:
        return examine([self.files[name] for name in part], self.codes, self.names, at)


def _profiles(targets: tuple[str, ...]) -> tuple[Profile, ...]:
    return tuple(load_profile(name) for name in targets or (DEFAULT_TARGET,))


def _divided(parts: Sequence[Sequence[str]], files: Mapping[str, SourceFile | Listed]) -> str:
    size = sum(file.size for file in files.values()) / 1e6
    return (
        f"{len(files)} files with {size:.1f} MB are too many to examine as a whole (the limit is {MAX_WHOLE / 1e6:.0f} "
        f"MB): they were examined in {len(parts)} parts, neighbouring folders together, and what a file of one part "
        "says about another part is not known; scan a folder of its own for all that its files say"
    )


def _halved(num_halved: int) -> tuple[str, ...]:
    if not num_halved:
        return ()
    return (f"after the end of a worker {num_halved} parts were examined in halves, each with facts of its own",)
