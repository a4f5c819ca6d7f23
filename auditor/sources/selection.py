"""Files named one by one, as a hook does: they are reported on, and the repository around them gives the facts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddaudit.auditor.sources.source import MACHINERY, Skipped, SkipReason, Tree, is_excluded, read_tree, shared_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Selection:
    """The named files in their repository, paths relative to its top."""

    tree: Tree
    names: frozenset[str]
    links: frozenset[str]
    """Those named through a link: they are read, and stay as they are."""


def select_files(files: Sequence[Path], markers: Iterable[str]) -> Selection:
    """Read `files`, and where one of them has a marker also the repository around them.

    Raises FileNotFoundError for a file that does not exist.
    """
    root = _repository(files)
    wanted: list[Path] = []
    links: set[str] = set()
    left_out: dict[str, Skipped] = {}
    for file in files:
        named = file.parent.resolve() / file.name
        name = Path(os.path.relpath(named, root)).as_posix()
        real = named.resolve()
        if not real.is_relative_to(root):
            left_out[name] = Skipped(name, SkipReason.SYMLINK, "it leaves the repository")
        elif any(folder.name in MACHINERY or is_excluded(folder) for folder in _between(root, named)):
            left_out[name] = Skipped(name, SkipReason.EXCLUDED, "not the repository's own source")
        elif file.suffix == ".ipynb":
            left_out[name] = Skipped(name, SkipReason.EXCLUDED, "notebooks are not read")
        else:
            wanted.append(file)
            if named.is_symlink():
                links.add(real.relative_to(root).as_posix())
    tree = read_tree(wanted, root) if wanted else Tree(root, {}, ())
    names = frozenset({*tree.sources, *(item.path for item in tree.skipped), *left_out})
    if any(marker in source.text for source in tree.sources.values() for marker in markers):
        tree = read_tree([root, *wanted], root)
    skipped = {item.path: item for item in tree.skipped} | left_out
    return Selection(Tree(root, tree.sources, tuple(sorted(skipped.values()))), names, frozenset(links))


def _repository(files: Sequence[Path]) -> Path:
    """Top of the git checkout around the files; without one the working folder, or what the files share."""
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist")
    shared = Path(os.path.commonpath([file.parent.resolve() for file in files]))
    return next((folder for folder in (shared, *shared.parents) if (folder / ".git").exists()), shared_root(files))


def _between(root: Path, file: Path) -> list[Path]:
    """The folders from the root down to a file, both left out."""
    return [folder for folder in file.parents if folder != root and folder.is_relative_to(root)]
