"""Finds a repository's entry points by reading: functions that make a target model generate from input ids."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.decoding_loop import annotation, is_decoding_loop
from ddaudit.auditor.record import Entry, Parameter
from ddaudit.auditor.sources.source import read_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ddaudit.auditor.facts.decoding_loop import Function
    from ddaudit.auditor.sources.source import SourceFile


def find_entries(folder: Path) -> tuple[Entry, ...]:
    """Entry points of the repository in `folder`, by path and line. Nothing is imported.

    Raises as `read_tree` does.
    """
    return entries_of(read_tree([folder]).sources)


def entries_of(sources: Mapping[str, SourceFile]) -> tuple[Entry, ...]:
    """Entry points of sources in memory, by path and line. A file that does not parse has none."""
    trees: dict[str, ast.Module] = {}
    for path, source in sorted(sources.items()):
        try:
            trees[path] = source.tree()
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    callees = _callees(trees.values())
    entries = []
    for path, tree in trees.items():
        for qualname, node in _functions(tree):
            if is_decoding_loop(node, callees):
                entries.append(Entry(_module(path, sources), qualname, path, node.lineno, _parameters(node)))
    return tuple(sorted(entries, key=lambda entry: (entry.path, entry.line)))


def _module(path: str, sources: Mapping[str, SourceFile]) -> str:
    """Name under which the repository imports a file from its root, or from `src` where that is not a package."""
    parts = path.removesuffix(".py").split("/")
    if parts[0] == "src" and len(parts) > 1 and "src/__init__.py" not in sources:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{method.name}", method


def _callees(trees: Iterable[ast.Module]) -> dict[str, list[Function]]:
    """Functions and methods of the repository by bare name."""
    callees: dict[str, list[Function]] = defaultdict(list)
    for tree in trees:
        for qualname, node in _functions(tree):
            callees[qualname.rpartition(".")[2]].append(node)
    return callees


def _parameters(node: Function) -> tuple[Parameter, ...]:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    found = [Parameter(arg.arg, annotation(arg), i >= required) for i, arg in enumerate(positional)]
    if args.vararg:
        found.append(Parameter(f"*{args.vararg.arg}", annotation(args.vararg), True))
    found += [
        Parameter(arg.arg, annotation(arg), default is not None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        found.append(Parameter(f"**{args.kwarg.arg}", annotation(args.kwarg), True))
    return tuple(found)
