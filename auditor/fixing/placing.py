"""Puts a planned fork on disk, whole or not at all, or its edits into the repository itself."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from ddaudit.auditor.fixing.fork import MANIFEST, PATCH, Plan, digest, digest_file, manifest, read_manifest
from ddaudit.auditor.sources.source import MACHINERY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CACHES = MACHINERY | {".hypothesis", ".nox", ".tox"}
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True)
class Placed:
    """What writing a fork came to."""

    target: Path
    is_new: bool
    """False where the fork was there already, the same to the byte."""
    not_copied: dict[str, str]
    """Files of the source that are missing from the fork, and why."""
    links: dict[str, str]
    """What symbolic links hold in the fork that would have led elsewhere from there."""
    kept_as: Path | None = None
    """Where the fork before lies that had been changed by hand."""

    def has(self, path: str) -> bool:
        """Whether something of that path is in the fork."""
        return os.path.lexists(self.target / path)


def check_target(source: Path, target: Path) -> None:
    """Raise ValueError, with the remedy, where a fork of `source` may not be written to `target`."""
    source, target = source.resolve(), target.resolve()
    if source == target:
        if read_manifest(source) is None:
            raise ValueError(f"{target} is the source itself: name another folder, or ask for `--in-place`")
        return
    if target.is_relative_to(source):
        raise ValueError(f"{target} lies inside the source {source}: name a folder outside it with `--output`")
    if source.is_relative_to(target):
        raise ValueError(f"the source {source} lies inside {target}: name another folder with `--output`")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file: name a folder with `--output`")
    if target.exists() and any(target.iterdir()) and read_manifest(target) is None:
        raise ValueError(f"{target} is not empty and not a fork made by ddaudit: name another folder with `--output`")


def write_fork(plan: Plan, target: Path) -> Placed:
    """Write the fork to `target`, absent, empty or a fork before: built beside it, then put in its place at once.

    Raises ValueError as `check_target` does, and OSError where the disk does not take it; `target` is then as before.
    """
    check_target(plan.root, target)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = _free_name(target)
    built = work / target.name
    try:
        work.mkdir(mode=0o700)
        not_copied, links = _build(plan, built, target)
        if target.is_dir() and _contents(target) == _contents(built):
            return Placed(target, False, not_copied, links)
        changed_by_hand = target.is_dir() and _is_changed(target)
        _put(built, target)
        kept_as = _keep(built, target) if changed_by_hand else None
        return Placed(target, True, not_copied, links, kept_as)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_in_place(plan: Plan) -> None:
    """Put the edits into the repository itself: each file is replaced at once, and all go back if one cannot be.

    Raises OSError; the repository is then as before.
    """
    ready: list[tuple[Path, Path, bytes]] = []
    replaced: list[tuple[Path, bytes]] = []
    try:
        for path, (before, after) in plan.changes.items():
            file = plan.root / path
            new = _free_name(file)
            ready.append((new, file, before))
            _write(new, after, file)
        for new, file, before in ready:
            os.replace(new, file)
            replaced.append((file, before))
    except BaseException:
        for file, before in replaced:
            new = _free_name(file)
            _write(new, before, file)
            os.replace(new, file)
        raise
    finally:
        for new, _, _ in ready:
            new.unlink(missing_ok=True)


def _free_name(path: Path) -> Path:
    """A hidden neighbour that is not there yet. It is known before it is made, so that an interrupt between the two
    leaves nothing behind."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _write(new: Path, data: bytes, like: Path) -> None:
    """Write a new file with the mode of another one."""
    with new.open("xb") as stream:
        stream.write(data)
    shutil.copymode(like, new)


def _build(plan: Plan, folder: Path, target: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Write every file of the source, changed or not, then patch and manifest, into `folder`, which becomes `target`.

    Returns what could not be copied, and the links that hold another path than in the source.
    """
    folder.mkdir()
    files: dict[str, dict[str, str]] = {}
    not_copied: dict[str, str] = {}
    links: dict[str, str] = {}
    modes = [(folder, plan.root)]
    carried = not plan.changes and read_manifest(plan.root) is not None
    for path, entry in _walk(plan.root, not_copied):
        if path in (MANIFEST, PATCH):
            continue
        place = folder / path
        if entry.is_symlink():
            files[path] = {"link": os.readlink(entry)}
            if _leaves(entry, plan.root):
                links[path] = _from_fork(entry, plan.root, target)
                # Where to depends on where the fork lies, and the manifest does not.
                files[path] |= {"leaves": "rewritten to reach the same place"}
            place.symlink_to(links.get(path, os.readlink(entry)))
        elif entry.is_dir():
            place.mkdir()
            modes.append((place, entry))
        elif path in plan.changes:
            before, after = plan.changes[path]
            place.write_bytes(after)
            shutil.copymode(entry, place)
            files[path] = {"before": digest(before), "after": digest(after)}
        elif not entry.is_file():
            not_copied[path] = "not a file, a folder or a link"
        else:
            try:
                unchanged = digest_file(entry)
            except OSError as error:
                not_copied[path] = error.strerror or str(error)
                continue
            shutil.copyfile(entry, place)
            shutil.copymode(entry, place)
            files[path] = {"before": unchanged, "after": unchanged}
    if carried:
        # Fixing a fork that is in order gives that fork, with the record of what was done to its source.
        for name in (MANIFEST, PATCH):
            if (plan.root / name).is_file():
                shutil.copyfile(plan.root / name, folder / name)
    else:
        (folder / PATCH).write_bytes(plan.patch)
        (folder / MANIFEST).write_bytes(manifest(plan, files))
    # Last and innermost first: a folder that is read-only takes no more files.
    for place, original in reversed(modes):
        shutil.copymode(original, place)
    return not_copied, links


def _leaves(link: Path, root: Path) -> bool:
    """Whether a relative link leads out of the repository by steps of its own, so that a copy would lead elsewhere."""
    place = link.parent
    held = os.readlink(link)
    for part in () if os.path.isabs(held) else PurePath(held).parts:
        place = place.parent if part == ".." else place / part
        if place.is_symlink():
            # That one is copied too, and from there the way is the same where it leads out.
            place = Path(os.path.realpath(place))
            if not place.is_relative_to(root):
                return False
        if not place.is_relative_to(root):
            return True
    return False


def _from_fork(link: Path, root: Path, target: Path) -> str:
    """What the link has to hold in the fork: the way to the same place, or to the fork's own copy of it."""
    at = os.path.join(link.parent, os.readlink(link))
    folder, name = os.path.split(at.rstrip("/"))
    # A link at the end stays one: what it leads to may change.
    aim = os.path.realpath(at) if name in ("", ".", "..") else os.path.join(os.path.realpath(folder), name)
    home = target / link.parent.relative_to(root)
    in_fork = os.path.relpath(aim, root)
    inside = in_fork != ".." and not in_fork.startswith("../")
    return os.path.relpath(target / in_fork if inside else aim, home)


def _walk(root: Path, unread: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Everything below `root` but caches and virtual environments, a folder before what it holds. No link is followed.

    A folder that cannot be listed goes into `unread`.
    """
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            children = sorted(folder.iterdir())
        except OSError as error:
            unread[folder.relative_to(root).as_posix()] = error.strerror or str(error)
            continue
        for child in children:
            name = child.relative_to(root).as_posix()
            try:
                # A folder that may be listed and not entered has names and no files.
                info = child.lstat()
            except OSError as error:
                unread[name] = error.strerror or str(error)
                continue
            if child.name in CACHES or _is_environment(child):
                continue
            yield name, child
            if stat.S_ISDIR(info.st_mode):
                pending.append(child)


def _is_environment(folder: Path) -> bool:
    # By `os.path`, which says no where a folder may not be entered; pathlib raises.
    return os.path.isfile(folder / "pyvenv.cfg") or os.path.isdir(folder / "conda-meta")


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Mode, and hash or link target, of everything in a folder by path."""
    contents = {}
    for path, entry in _walk(folder, {}):
        info = entry.lstat()
        if stat.S_ISLNK(info.st_mode):
            contents[path] = (0, os.readlink(entry))
        else:
            data = digest_file(entry) if stat.S_ISREG(info.st_mode) else ""
            contents[path] = (stat.S_IMODE(info.st_mode), data)
    return contents


def _is_changed(fork: Path) -> bool:
    """Whether a fork's files are not those of its own manifest: somebody worked in it."""
    record = read_manifest(fork)
    if record is None:
        return False
    files = record["files"].items()
    # What a link out of the repository holds depends on where the fork was written.
    rewritten = {path for path, entry in files if "leaves" in entry and (fork / path).is_symlink()}
    recorded = {path: _recorded(entry) for path, entry in files if path not in rewritten}
    ours = {MANIFEST, PATCH, *rewritten}
    found = {path: value for path, (_, value) in _contents(fork).items() if value and path not in ours}
    return found != recorded


def _recorded(entry: Mapping[str, str]) -> str | None:
    return entry.get("after", entry.get("link"))


def _put(built: Path, target: Path) -> None:
    """Rename `built` to `target`; what was there is at `built` afterwards. At no time is there half of either."""
    if not target.exists():
        os.rename(built, target)
    elif not _exchange(built, target):
        aside = built.with_name(built.name + ".before")
        os.rename(target, aside)
        try:
            os.rename(built, target)
        except BaseException:
            os.rename(aside, target)
            raise
        os.rename(aside, built)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step where the system can: Linux, on most of its file systems."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(
        renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0
    )


def _keep(old: Path, target: Path) -> Path:
    """Move a fork that somebody worked in to a free name beside the new one."""
    number = 1
    while (kept := target.with_name(f"{target.name}.changed-{number}")).exists():
        number += 1
    os.rename(old, kept)
    return kept
