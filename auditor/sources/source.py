"""Python files as text: found once, decoded without losing a byte, and the files that were not read, each with why."""

from __future__ import annotations

import ast
import bisect
import codecs
import gc
import os
import re
import stat
import tokenize
import warnings
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_BYTES = 4 * 1024 * 1024
NEWLINE = re.compile(r"\r\n|\r|\n")
# Never source: nothing in them is worth a line in the report.
MACHINERY = frozenset({".git", ".hg", ".svn", "__pycache__"}) | {
    f".{tool}_cache" for tool in ("mypy", "pytest", "ruff")
}
EXCLUDED = frozenset(
    {".eggs", ".ipynb_checkpoints", ".nox", ".tox", ".venv", "build", "dist", "env", "node_modules"}
    | {"site-packages", "venv"}
)


class SkipReason(str, Enum):
    """Why a file was not examined."""

    SYNTAX = "syntax"
    ENCODING = "encoding"
    TOO_LARGE = "too large"
    SYMLINK = "symlink"
    EXCLUDED = "excluded"
    UNREADABLE = "unreadable"
    TIMEOUT = "timeout"
    CRASH = "worker crash"


@dataclass(frozen=True, order=True)
class Skipped:
    """A file or folder that was not examined."""

    path: str
    reason: SkipReason
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """False only for what was left out by choice."""
        return self.reason is not SkipReason.EXCLUDED


@dataclass(frozen=True)
class SourceFile:
    """One file's decoded text: newlines as they stand, without the byte-order mark, which is kept beside it."""

    path: str
    """Relative to the root, with forward slashes."""
    text: str
    encoding: str = "utf-8"
    bom: bool = False

    @property
    def size(self) -> int:
        """Characters, as good as bytes."""
        return len(self.text)

    def encode(self) -> bytes:
        return (codecs.BOM_UTF8 if self.bom else b"") + self.text.encode(self.encoding)

    def with_text(self, text: str) -> SourceFile:
        return replace(self, text=text)

    @cached_property
    def line_starts(self) -> list[int]:
        """Code-point offset of each line's first character, as the parser counts lines."""
        return [0] + [match.end() for match in NEWLINE.finditer(self.text)]

    @property
    def num_lines(self) -> int:
        """Lines as an editor numbers them: what ends with a newline has none after it."""
        return len(self.line_starts) - (self.line_starts[-1] == len(self.text))

    @cached_property
    def newline(self) -> str:
        """The newline of most lines."""
        counts = Counter(NEWLINE.findall(self.text))
        return counts.most_common(1)[0][0] if counts else "\n"

    @cached_property
    def _is_ascii(self) -> bool:
        return self.text.isascii()

    def line(self, number: int) -> str:
        """Text of a line, counted from 1, with its newline."""
        starts = self.line_starts
        return self.text[starts[number - 1] : starts[number] if number < len(starts) else None]

    def offset(self, line: int, byte_column: int) -> int:
        """Code-point offset of the parser's position: a line from 1 and a column in UTF-8 bytes from 0."""
        if self._is_ascii or (text := self.line(line)).isascii():
            return self.line_starts[line - 1] + byte_column
        return self.line_starts[line - 1] + len(text.encode()[:byte_column].decode())

    def span(self, start: int, end: int) -> Span:
        line, end_line = (bisect.bisect_right(self.line_starts, offset) for offset in (start, end))
        starts = self.line_starts
        return Span(start, end, line, start - starts[line - 1] + 1, end_line, end - starts[end_line - 1] + 1)

    def parse(self) -> ast.Module:
        """Syntax tree; raises SyntaxError, ValueError, RecursionError or MemoryError as the parser does."""
        return _parse(self.text)

    def tree(self) -> ast.Module:
        """Syntax tree to be read only: the last few texts are not parsed again. Raises as `parse` does."""
        return _parsed(self.text)

    def tokens(self) -> Iterator[tokenize.TokenInfo]:
        """Python's tokens, by the parser's lines; raises tokenize.TokenError or SyntaxError on the way."""
        lines = (NEWLINE.sub("\n", self.line(n + 1)) for n in range(len(self.line_starts)))
        return tokenize.generate_tokens(lambda: next(lines, ""))

    @cached_property
    def comments(self) -> list[int]:
        """Offsets of the comments' `#`, in order."""
        found = []
        try:
            for token in self.tokens():
                if token.type == tokenize.COMMENT:
                    found.append(self.line_starts[token.start[0] - 1] + token.start[1])
        except (tokenize.TokenError, SyntaxError):
            # The parser took the file; a tokenizer that does not must not lose a comment.
            return [match.start() for match in re.finditer("#", self.text)]
        return found

    def has_comment(self, start: int, end: int) -> bool:
        if "#" not in self.text[start:end]:
            return False
        at = bisect.bisect_left(self.comments, start)
        return at < len(self.comments) and self.comments[at] < end


@contextmanager
def not_collecting() -> Iterator[None]:
    """Leave garbage alone for a while."""
    # Syntax trees are millions of live objects: collecting garbage among them takes longer than the scan.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings(), not_collecting():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(text)


# A pass of fixes reads a file as it was, as the fixes leave it and as the imports do, each several times.
_parsed = lru_cache(maxsize=2)(_parse)


def shown(path: str) -> str:
    """A path as it may be printed: a name can hold line breaks, commands to the terminal and bytes of no encoding."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in path)


def decode(path: str, data: bytes) -> SourceFile:
    """Text of a file's bytes; raises SyntaxError or ValueError where they are not what the file declares."""
    # By universal newlines: a lone CR ends the line that may declare the encoding.
    lines = iter(data.splitlines(keepends=True))
    declared, _ = tokenize.detect_encoding(lambda: next(lines, b""))
    bom = data.startswith(codecs.BOM_UTF8)
    encoding = "utf-8" if bom else declared
    text = data[len(codecs.BOM_UTF8) if bom else 0 :].decode(encoding)
    source = SourceFile(path, text, encoding, bom)
    if source.encode() != data:
        raise ValueError(f"bytes are not restored by the declared encoding {encoding}")
    return source


@dataclass(frozen=True)
class Listed:
    """A file that is there to be read."""

    name: str
    """Relative to the root, with forward slashes."""
    file: Path
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Listing:
    """Every Python file below the given paths, not read yet, by name; what cannot be is left out with the reason."""

    root: Path
    files: dict[str, Listed]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Tree:
    """Every Python file below the given paths, read once."""

    root: Path
    sources: dict[str, SourceFile]
    skipped: tuple[Skipped, ...]


def list_tree(paths: Sequence[Path], root: Path | None = None) -> Listing:
    """Files at or below `paths`. Names are relative to `root`: the one folder given, or what the paths share.

    Raises FileNotFoundError for a path that does not exist and ValueError where no Python file is found.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
    root = root or shared_root(paths)
    files: dict[str, Listed] = {}
    skipped: dict[str, Skipped] = {}
    for file in _discover(paths, root, skipped):
        name = _relative(file, root)
        if name in files or name in skipped:
            continue
        try:
            status = file.stat()
        except OSError as error:
            skipped[name] = _unreadable(name, error)
            continue
        if not stat.S_ISREG(status.st_mode):
            # Reading a pipe waits for its writer, a device may never end.
            skipped[name] = Skipped(name, SkipReason.UNREADABLE, "it is no regular file")
        elif status.st_size > MAX_BYTES:
            skipped[name] = Skipped(name, SkipReason.TOO_LARGE, f"{status.st_size} bytes, the limit is {MAX_BYTES}")
        else:
            files[name] = Listed(name, file, status.st_size)
    if not files and not any(entry.is_failure for entry in skipped.values()):
        raise ValueError(f"no Python file in {', '.join(map(str, paths))}")
    return Listing(root, dict(sorted(files.items())), tuple(sorted(skipped.values())))


def read_listed(listed: Listed) -> SourceFile | Skipped:
    """The file's text, or why it cannot be read."""
    try:
        return decode(listed.name, listed.file.read_bytes())
    except OSError as error:
        return _unreadable(listed.name, error)
    except (SyntaxError, ValueError, LookupError) as error:
        return Skipped(listed.name, SkipReason.ENCODING, str(error))


def read_tree(paths: Sequence[Path], root: Path | None = None) -> Tree:
    """The files of `list_tree`, read; raises as it does."""
    listing = list_tree(paths, root)
    sources: dict[str, SourceFile] = {}
    skipped = list(listing.skipped)
    for name, listed in listing.files.items():
        found = read_listed(listed)
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            sources[name] = found
    return Tree(listing.root, sources, tuple(sorted(skipped)))


def _unreadable(name: str, error: OSError) -> Skipped:
    return Skipped(name, SkipReason.UNREADABLE, error.strerror or str(error))


def shared_root(paths: Sequence[Path]) -> Path:
    """The one folder among `paths`, else the working folder where all lie below it, else the folder they share."""
    if len(paths) == 1 and paths[0].is_dir():
        return paths[0].resolve()
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in paths]
    here = Path.cwd().resolve()
    if all(folder.is_relative_to(here) for folder in folders):
        return here
    return Path(os.path.commonpath(folders))


def _relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _discover(paths: Sequence[Path], root: Path, skipped: dict[str, Skipped]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in paths:
        # A link named by the caller is wanted; one met on the way must stay below the root.
        pending = deque([path.resolve()])
        while pending:
            entry = pending.pop()
            try:
                real = entry.resolve()
            except (OSError, RuntimeError):
                # Before Python 3.13 a link to itself raises.
                skipped[_relative(entry, root)] = Skipped(
                    _relative(entry, root), SkipReason.UNREADABLE, "a loop of links"
                )
                continue
            # By `os.path`, which says no where a folder may not be entered; pathlib raises.
            if os.path.islink(entry) and not real.is_relative_to(root):
                if entry.suffix == ".py" or os.path.isdir(real):
                    name = _relative(entry, root)
                    skipped[name] = Skipped(name, SkipReason.SYMLINK, "it leaves the scanned folder")
                continue
            if real in seen:
                continue
            if os.path.isdir(entry):
                seen.add(real)
                try:
                    for child in _children(entry, root, skipped):
                        # Links last of all, so that a file counts under its own name.
                        if child.is_symlink():
                            pending.appendleft(child)
                        else:
                            pending.append(child)
                except OSError as error:
                    name = _relative(entry, root)
                    skipped[name] = Skipped(name, SkipReason.UNREADABLE, error.strerror or str(error))
            elif entry.suffix == ".py" or entry == path.resolve():
                seen.add(real)
                yield entry


def is_excluded(folder: Path) -> bool:
    return folder.name in EXCLUDED or folder.name.endswith(".egg-info") or os.path.exists(folder / "pyvenv.cfg")


def _children(folder: Path, root: Path, skipped: dict[str, Skipped]) -> Iterator[Path]:
    for child in sorted(folder.iterdir(), reverse=True):
        if child.name in MACHINERY:
            continue
        if is_excluded(child) and os.path.isdir(child):
            name = _relative(child, root)
            skipped[name] = Skipped(name, SkipReason.EXCLUDED, "not the repository's own source")
        else:
            yield child
