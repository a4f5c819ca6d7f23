"""Which file of the repository an import means."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddaudit.auditor.facts.scopes import File


class Modules:
    """The repository's files by dotted name."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self._files = {_module_name(path): file for path, file in files.items()}
        self._resolved: dict[tuple[str, int, str], File | None] = {}

    def resolve(self, name: str, level: int, importer: File) -> File | None:
        """The file that an import means: next to the importer, or below any folder above it."""
        key = (name, level, importer.source.path.rpartition("/")[0])
        if key not in self._resolved:
            self._resolved[key] = self._find(name, level, PurePosixPath(key[2]))
        return self._resolved[key]

    def _find(self, name: str, level: int, folder: PurePosixPath) -> File | None:
        if level:
            for _ in range(level - 1):
                folder = folder.parent
            return self._files.get(".".join(filter(None, (_dotted(folder), name))))
        for above in (folder, *folder.parents):
            for prefix in (_dotted(above), ".".join(filter(None, (_dotted(above), "src")))):
                if (file := self._files.get(".".join(filter(None, (prefix, name))))) is not None:
                    return file
        # A checkout can be a package by its own name, `Project.engine.model`; what is read does not know that name.
        _, _, rest = name.partition(".")
        return self._files.get(rest) if rest.count(".") else None

    def below(self, package: File, name: str) -> File | None:
        """The file `name` of a package, given by its `__init__.py`."""
        path = PurePosixPath(package.source.path)
        if path.name != "__init__.py":
            return None
        return self._files.get(".".join(filter(None, (_dotted(path.parent), name))))


def _module_name(path: str) -> str:
    pure = PurePosixPath(path)
    return _dotted(pure.parent if pure.name == "__init__.py" else pure.with_suffix(""))


def _dotted(path: PurePosixPath) -> str:
    return ".".join(part for part in path.parts if part != ".")
