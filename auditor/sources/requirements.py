"""Which releases of Transformers a repository asks for, by its own metadata: read as text, never executed."""

from __future__ import annotations

import ast
import configparser
import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAX_BYTES = 16 * 1024 * 1024
"""A lock file of a large project has a few megabytes."""
# `transformers[torch]>=4.40,<5; python_version > "3.9"  # why`, without what comes after the releases.
REQUIREMENT = re.compile(r"^\s*transformers\s*(?:\[[^\]]*\])?\s*\(?([~^=!<>][^;#)]*)", re.IGNORECASE)
TAG = re.compile(r"^\s*transformers\s*(?:\[[^\]]*\])?\s*@\s*git\+\S+@v?(\d+(?:\.\d+)+)\b", re.IGNORECASE)
LOCKED = re.compile(r"""^name = "transformers"\s*\nversion = "([^"]+)\"""", re.MULTILINE)


@dataclass(frozen=True)
class Requirement:
    """What a repository says of Transformers, and where."""

    releases: str
    """As it is written, such as `>=4.40,<5` or `^4.40`; a lock file's release as `==4.57.1`."""
    path: str
    line: int

    def __str__(self) -> str:
        return f"transformers{self.releases} in {self.path}:{self.line}"


def read_requirement(root: Path) -> Requirement | None:
    """The first that names releases: of a project's own metadata, then lists of requirements, then lock files.

    A bare `transformers` names none, and a file that cannot be read says nothing.
    """
    for pattern, read in READERS:
        for path in sorted(root.glob(pattern)):
            text = _text(root, path)
            releases = next(read(text), "") if text else ""
            if releases:
                name = path.relative_to(root).as_posix()
                return Requirement("".join(releases.split()), name, _line(text, releases))
    return None


def _text(root: Path, path: Path) -> str:
    """Empty where it is no file of the repository, or too large."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES or not path.resolve().is_relative_to(root.resolve()):
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _line(text: str, releases: str) -> int:
    """The line that names the package and these releases, or, in a lock file, the releases after the package."""
    bare = releases.removeprefix("==").strip()
    lines = text.splitlines()
    near = [n for n, line in enumerate(lines, 1) if bare in line and re.search(r"\btransformers\b", line)]
    if near:
        return near[0]
    named = next((n for n, line in enumerate(lines, 1) if re.search(r"\btransformers\b", line)), 1)
    return next((n for n, line in enumerate(lines, 1) if n >= named and bare in line), named)


def _named(requirement: object) -> Iterator[str]:
    """Releases in one requirement such as `transformers>=4.40`."""
    text = requirement if isinstance(requirement, str) else ""
    if found := REQUIREMENT.match(text):
        yield found[1].strip().rstrip("\\").strip()
    elif tagged := TAG.match(text):
        yield f"=={tagged[1]}"


def _strings(value: object) -> Iterator[str]:
    """Every requirement in nested lists and tables of them."""
    if isinstance(value, dict):
        value = list(value.values())
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict | list):
            yield from _strings(each)
        else:
            yield from _named(each)


def _pyproject(text: str) -> Iterator[str]:
    data = _toml(text)
    project = _table(data, "project")
    for requirements in (
        project.get("dependencies"),
        project.get("optional-dependencies"),
        data.get("dependency-groups"),
    ):
        yield from _strings(requirements)
    poetry = _table(data, "tool", "poetry")
    groups = [_table(group, "dependencies") for group in _table(poetry, "group").values()]
    for table in (_table(poetry, "dependencies"), _table(poetry, "dev-dependencies"), *groups):
        yield from _entry(table)


def _pipfile(text: str) -> Iterator[str]:
    data = _toml(text)
    for name in ("packages", "dev-packages"):
        yield from _entry(_table(data, name))


def _entry(table: dict[str, Any]) -> Iterator[str]:
    """`transformers = "^4.40"`, or the same as `{ version = "^4.40" }`."""
    entry = table.get("transformers")
    for each in entry if isinstance(entry, list) else [entry]:
        wanted = each.get("version") if isinstance(each, dict) else each
        if isinstance(wanted, str) and any(digit in wanted for digit in "0123456789"):
            yield wanted if wanted[0] in "^~=<>!" else f"=={wanted}"


def _toml(text: str) -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
    return data


def _table(data: object, *names: str) -> dict[str, Any]:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _setup_cfg(text: str) -> Iterator[str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    for section in parser.sections():
        if section.startswith("options"):
            for value in parser[section].values():
                for line in (value or "").splitlines():
                    yield from _named(line)


def _setup_py(text: str) -> Iterator[str]:
    """Strings of the file that are such a requirement; nothing of it is run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            yield from _named(node.value)


def _lines(text: str) -> Iterator[str]:
    """A list of requirements, one a line."""
    for line in text.splitlines():
        yield from _named(line)


def _conda(text: str) -> Iterator[str]:
    """`- transformers=4.40`, and pip's requirements among them."""
    for line in text.splitlines():
        item = line.strip().removeprefix("- ").strip("'\" ").rpartition("::")[2]
        for releases in _named(item):
            single = re.match(r"=\s*(\d[\w.]*)", releases)
            yield f"=={single[1]}.*" if single else releases


def _lock(text: str) -> Iterator[str]:
    for found in LOCKED.finditer(text):
        yield f"=={found[1]}"


def _pipfile_lock(text: str) -> Iterator[str]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return
    for name in ("default", "develop"):
        yield from _entry(_table(data, name))


READERS: tuple[tuple[str, Callable[[str], Iterator[str]]], ...] = (
    ("pyproject.toml", _pyproject),
    ("setup.cfg", _setup_cfg),
    ("setup.py", _setup_py),
    ("requirements.txt", _lines),
    ("requirements*.txt", _lines),
    ("requirements*.in", _lines),
    ("requirements/*.txt", _lines),
    ("environment*.y*ml", _conda),
    ("Pipfile", _pipfile),
    ("uv.lock", _lock),
    ("poetry.lock", _lock),
    ("pdm.lock", _lock),
    ("Pipfile.lock", _pipfile_lock),
)
