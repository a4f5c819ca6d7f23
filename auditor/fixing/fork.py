"""Plans a fork of a repository: what its files become, the patch, and the manifest that says what was done and why."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.facts.entries import entries_of
from ddaudit.auditor.fixing.patch import patch
from ddaudit.auditor.fixing.settling import Settled, settle
from ddaudit.auditor.reports.scan_report import tool_version
from ddaudit.auditor.rule import select_rules
from ddaudit.auditor.scanning.examining import markers
from ddaudit.auditor.sources.selection import select_files
from ddaudit.auditor.sources.source import Skipped, read_tree
from ddaudit.auditor.targets.releases import choose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ddaudit.auditor.finding import Finding
    from ddaudit.auditor.record import Entry
    from ddaudit.auditor.rule import Rule
    from ddaudit.auditor.sources.source import SourceFile, Tree
    from ddaudit.auditor.targets.releases import Releases

MANIFEST = "ddaudit.json"
PATCH = "ddaudit.patch"


@dataclass(frozen=True)
class Plan:
    """All that fixing a repository comes to, before anything is written."""

    root: Path
    settled: Settled
    skipped: tuple[Skipped, ...]
    changes: dict[str, tuple[bytes, bytes]]
    """Bytes before and after, of the files that change."""
    entries: tuple[Entry, ...]
    unsafe: bool
    rules: tuple[Rule, ...]
    """Those that were looked for."""
    releases: Releases
    """The release of Transformers that the fixes are for."""
    suppressed: tuple[Finding, ...] = ()
    """Findings that a comment keeps: no fix of theirs was made."""

    @property
    def failed(self) -> tuple[Skipped, ...]:
        return tuple(item for item in self.skipped if item.is_failure)

    @property
    def patch(self) -> bytes:
        return patch(self.changes)

    @property
    def exit_code(self) -> int:
        """2 where something was not examined or not fixed soundly, 1 where findings stay, else 0."""
        return 2 if self.failed or self.settled.errors else 1 if self.settled.left else 0


def plan_fix(
    root: Path,
    *,
    unsafe: bool = False,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    transformers: str = "",
) -> Plan:
    """Read the repository at `root` and settle its fixes. Nothing is written, imported or executed.

    They are for the release `transformers`; without one it is chosen by the repository or what is installed.

    Raises FileNotFoundError or NotADirectoryError for a `root` that is no folder, ValueError where it has no Python
    file or a rule is unknown.
    """
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(f"{root} is not a folder: `fix` takes a repository's root folder")
    tree = read_tree([root])
    # Written through, a link could change what lies elsewhere.
    links = frozenset(path for path in tree.sources if _is_behind_link(tree.root, path))
    return _plan(tree, links, None, unsafe, select, ignore, transformers)


def plan_fix_files(
    files: Sequence[Path],
    *,
    unsafe: bool = False,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    transformers: str = "",
) -> Plan:
    """Settle the fixes of these files and no others, with the facts of the repository that they lie in.

    Raises FileNotFoundError for a file that does not exist, ValueError where a rule is unknown.
    """
    selection = select_files(files, markers(select_rules(select, ignore)))
    return _plan(selection.tree, selection.links, selection.names, unsafe, select, ignore, transformers)


def _plan(
    tree: Tree,
    links: frozenset[str],
    only: frozenset[str] | None,
    unsafe: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    transformers: str,
) -> Plan:
    skipped: tuple[Skipped, ...] = tree.skipped
    suppressed: tuple[Finding, ...] = ()
    releases = choose(tree.root, transformers)

    def scan(sources: Mapping[str, SourceFile]) -> tuple[Finding, ...]:
        nonlocal skipped, suppressed
        result = scan_sources(sources, tree.skipped, names=only, select=select, ignore=ignore).on(releases)
        skipped, suppressed = result.skipped, result.suppressed
        return result.findings

    locked = dict.fromkeys(links, "it is reached through a link")
    settled = settle(tree.sources, scan, unsafe=unsafe, locked=locked)
    changes = {
        path: (tree.sources[path].encode(), source.encode())
        for path, source in settled.sources.items()
        if source.text != tree.sources[path].text
    }
    entries = entries_of(settled.sources) if only is None else ()
    rules = select_rules(select, ignore)
    return Plan(tree.root, settled, skipped, changes, entries, unsafe, rules, releases, suppressed)


def manifest(plan: Plan, files: Mapping[str, Mapping[str, str]]) -> bytes:
    """The record that lies in a fork as `ddaudit.json`: the same for the same source, whenever and wherever made.

    `files` has the hashes of each file, or the target of each link, by path.
    """
    record = {
        "tool": {"name": "ddaudit", "version": tool_version()},
        "rules": {rule.code: rule.slug for rule in plan.rules},
        "source": {"name": plan.root.name, "commit": _commit(plan.root)},
        "transformers": plan.releases.to_json(),
        "unsafe": plan.unsafe,
        "entries": [{"name": entry.name, **asdict(entry)} for entry in plan.entries],
        "fixed": [{**item.finding.to_json(), "how": item.how} for item in plan.settled.fixed],
        "left": [{**item.finding.to_json(), "reason": item.reason} for item in plan.settled.left],
        "suppressed": [finding.to_json() for finding in plan.suppressed],
        "not_examined": [
            {"path": item.path, "reason": item.reason.value, "detail": item.detail} for item in plan.skipped
        ],
        "errors": plan.settled.errors,
        "verified_by_parser_only": sorted(plan.settled.parser_only),
        "files": dict(files),
    }
    return json.dumps(record, indent=2, sort_keys=True).encode("ascii") + b"\n"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a fork, None where `folder` is not one."""
    try:
        record = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    is_ours = (
        isinstance(record, dict) and isinstance(record.get("tool"), dict) and isinstance(record.get("files"), dict)
    )
    return record if is_ours and record["tool"].get("name") == "ddaudit" else None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Digest of a file's bytes; a checkpoint may be larger than memory."""
    total = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _is_behind_link(root: Path, path: str) -> bool:
    where = root
    for part in path.split("/"):
        where = where / part
        if where.is_symlink():
            return True
    return False


def _commit(root: Path) -> str | None:
    """Commit of a git checkout, read from its files: running git could run what its configuration names."""
    try:
        folder = root / ".git"
        if folder.is_file():
            folder = root / folder.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        shared = folder
        if (folder / "commondir").is_file():
            shared = folder / (folder / "commondir").read_text(encoding="utf-8").strip()
        for place in (folder, shared):
            if (place / name).is_file():
                return (place / name).read_text(encoding="ascii").strip()
        packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.split()[1:] == [name]), None)
    except (OSError, ValueError):
        return None
