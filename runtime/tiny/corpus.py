"""Text that ships with every Python: the sources of its standard library, whole modules of it held out."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddaudit.runtime.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "_bundled"}
_GENERATED = ("encodings/", "pydoc_data/", "_sysconfigdata", "config-")
"""Character tables, documentation as string literals, the build settings of one machine."""
_LARGEST = 300_000
"""Bytes. What is larger is data, too."""
_HELD_OUT_OF_256 = 16
_DEFINITION = re.compile(r"^[ ]*(?:class|def) ", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One file of the library."""

    path: str
    """Below the library's folder, with forward slashes."""
    text: str

    @property
    def module(self) -> str:
        return module_of(self.path)


@dataclass(frozen=True)
class Corpus:
    """The library's files, each text once, split by module."""

    training: tuple[Source, ...]
    held_out: tuple[Source, ...]
    """Without their tests: those use the words of the module's own documentation."""

    @cached_property
    def held_out_modules(self) -> tuple[str, ...]:
        return tuple(sorted({source.module for source in self.held_out}))


def read_corpus(library: Path | None = None) -> Corpus:
    """The corpus of `library`, by default the standard library of the Python that runs.

    Raises:
        RunError: where that holds no sources, as in some small installations.
    """
    folder = library or Path(sysconfig.get_path("stdlib"))
    held_out = read_held_out(folder)
    # A training file with a text that is held out elsewhere goes.
    seen = {source.text for source in held_out}
    training = []
    for source in _sources(folder, lambda path: not is_held_out(module_of(path))):
        if source.text not in seen:
            seen.add(source.text)
            training.append(source)
    if not training:
        raise _no_sources(folder)
    return Corpus(tuple(training), held_out)


def read_held_out(library: Path | None = None) -> tuple[Source, ...]:
    """The held-out files alone, which is quick."""
    folder = library or Path(sysconfig.get_path("stdlib"))
    found = _sources(folder, lambda path: is_held_out(module_of(path)) and not _is_test(path))
    by_text = {source.text: source for source in reversed(found)}
    if not by_text:
        raise _no_sources(folder)
    return tuple(sorted(by_text.values(), key=lambda source: source.path))


def module_of(path: str) -> str:
    """The top-level module that a file belongs to. A test belongs to what it tests: `test/test_json/` to `json`."""
    parts = path.split("/")
    name = parts[1] if parts[0] in ("test", "tests") and len(parts) > 1 else parts[0]
    return name.removesuffix(".py").removeprefix("test_").strip("_")


def is_held_out(module: str) -> bool:
    """One module in sixteen, by its name alone: the same ones in every release of Python."""
    return hashlib.sha256(module.encode()).digest()[0] < _HELD_OUT_OF_256


def digest(sources: tuple[Source, ...]) -> str:
    """SHA-256 over the paths and texts, in order."""
    total = hashlib.sha256()
    for source in sources:
        total.update(f"{source.path}\0{source.text}\0".encode())
    return total.hexdigest()


def excerpts(sources: Sequence[Source], count: int, num_chars: int) -> list[tuple[Source, str]]:
    """`count` pieces of at least `num_chars` characters, spread evenly, each from the start of a definition on."""
    starts = [
        (source, match.start())
        for source in sources
        for match in _DEFINITION.finditer(source.text)
        if len(source.text) - match.start() >= num_chars
    ]
    if not starts:
        raise ValueError(f"no definition in {len(sources)} files has {num_chars} characters after it")
    chosen = [starts[(2 * index + 1) * len(starts) // (2 * count)] for index in range(count)]
    return [(source, source.text[start:]) for source, start in chosen]


def _is_test(path: str) -> bool:
    return path.partition("/")[0] in ("test", "tests")


def _sources(folder: Path, is_wanted: Callable[[str], bool]) -> list[Source]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if _NOT_SOURCES & set(name.split("/")) or name.startswith(_GENERATED) or not is_wanted(name):
            continue
        if path.stat().st_size > _LARGEST:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # tests of the parser are written in other encodings
            continue
        if text.strip():
            found.append(Source(name, text))
    return found


def _no_sources(folder: Path) -> RunError:
    return RunError(
        f"`{folder}` holds no sources of Python's standard library to take text from",
        "use a Python that comes with its sources, as most do, or give the prompts: `--prompt TEXT`",
    )
