"""What is known of the names on one line: why a rule speaks there, or is silent."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.repository import learn
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.sources.selection import select_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.sources.source import SourceFile


@dataclass(frozen=True)
class Known:
    """One expression of the line."""

    text: str
    values: tuple[Value, ...]
    """What it can hold, the surest first; empty where nothing is known."""
    steps: tuple[str, ...]
    """How the first of them came here."""
    is_legacy: bool
    """In a branch that runs on old releases only."""


def learn_about(path: Path, words: Iterable[str]) -> FileFacts:
    """The facts about one file; if it has one of the words, with those of the repository around it.

    Raises FileNotFoundError for a missing file, ValueError for one that cannot be read.
    """
    selection = select_files([path], words)
    trees: dict[str, tuple[SourceFile, ast.Module]] = {}
    for name, source in selection.tree.sources.items():
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            trees[name] = (source, source.parse())
    for file in learn(trees):
        if file.source.path in selection.names:
            return file
    raise ValueError(f"{path} is no Python file that can be read")


def known_at(file: FileFacts, line: int) -> Iterator[Known]:
    """Names, dotted names and calls that begin on the line, in the order of the text; each once."""
    seen: set[str] = set()
    for node in file.nodes:
        match node:
            case ast.Name() | ast.Attribute() | ast.Call() if node.lineno == line:
                text = " ".join(file.text(node).split())
                above = file.parent(node)
                is_part = isinstance(above, ast.Attribute | ast.Call) and not file.values(node)
                if text not in seen and not (is_part and isinstance(node, ast.Call)):
                    seen.add(text)
                    values = tuple(value for value in file.values(node) if value.kind is not Kind.OTHER)
                    steps = file.steps(node, values[0]) if values else ()
                    yield Known(text, values, steps, file.is_legacy_branch(node))
