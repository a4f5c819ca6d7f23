"""Import lines of a file under repair: the names that fixes need are bound, the names they left unused go."""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.indexing import index
from ddaudit.auditor.facts.walking import walk
from ddaudit.auditor.finding import Edit, Fix, Import
from ddaudit.auditor.fixing.import_place import asks, insert_import, line_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddaudit.auditor.facts.scopes import File, Scope, ScopeNode
    from ddaudit.auditor.sources.source import SourceFile

MAX_LINE = 110


@dataclass
class ImportNeeds:
    """What the fixes of one pass need imported, and which of them cannot have it."""

    source: SourceFile
    missing: set[Import] = field(default_factory=set)

    @cached_property
    def file(self) -> File:
        return index(self.source, self.source.parse())

    def obstacle(self, fix: Fix) -> str:
        """Why a name that `fix` needs would mean something else where the fix uses it; empty where it would not."""
        for needed in fix.imports:
            for edit in fix.edits:
                if re.search(rf"\b{needed.name}\b", edit.replacement):
                    scope = self._scope_at(edit.start).find(needed.name)
                    if scope is not None and not _is_bound_by(scope, needed):
                        return f"`{needed.name}` already names something else here"
            if needed.name in self._unbound and (needed.module, 0) not in self.file.stars:
                return f"`{needed.name}` comes from a star import or is a builtin here"
        return ""

    def add(self, fix: Fix) -> None:
        for needed in fix.imports:
            homes = [self._scope_at(edit.start).find(needed.name) for edit in fix.edits]
            if not all(home and self._is_bound_at_run_time(home, needed.name) for home in homes):
                self.missing.add(needed)

    def edits(self, source: SourceFile) -> tuple[Edit, ...]:
        """Edits that import what is missing into `source`, the text with the fixes applied."""
        return add_imports(source, self.missing) if self.missing else ()

    def _is_bound_at_run_time(self, scope: Scope, name: str) -> bool:
        """Whether a binding of the name stands outside `if TYPE_CHECKING:`."""
        for node in scope.names[name]:
            parent = self.file.parent(node)
            while parent is not None and not (isinstance(parent, ast.If) and asks(parent, "TYPE_CHECKING")):
                parent = self.file.parent(parent)
            if parent is None:
                return True
        return False

    def _scope_at(self, offset: int) -> Scope:
        """The innermost scope around an offset."""
        around = [scope for scope in self._scopes if _holds(self.source, scope.node, offset)]
        return max(around, key=lambda scope: self.source.offset(*_start(scope.node)), default=self.file.scope)

    @cached_property
    def _scopes(self) -> list[Scope]:
        return self.file.scopes[1:]

    @cached_property
    def _unbound(self) -> set[str]:
        reads = (node for node in self.file.of(ast.Name) if isinstance(node, ast.Name))
        return {node.id for node in reads if self.file.scope_of(node).find(node.id) is None}


def add_imports(source: SourceFile, needed: set[Import]) -> tuple[Edit, ...]:
    """Edits that bind every name of `needed` at the top level of `source`, one line a module."""
    tree = source.tree()
    edits = []
    for module in sorted({item.module for item in needed}):
        names = {item.name for item in needed if item.module == module}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
                edits.append(_extended(source, node, names))
                break
        else:
            edits.append(insert_import(source, tree, _import_line(module, names), names))
    return tuple(edit for edit in edits if edit is not None)


def drop_unused(before: SourceFile, after: SourceFile, others: Iterable[SourceFile] = ()) -> tuple[Edit, ...]:
    """Edits of `after` that remove the top-level imports which `before` used and `after` no longer does.

    Kept: a package's `__init__.py`, names in `__all__` or in any other string that is an expression, names that
    `others`, the repository's other files, take from this one, aliases to the same name, and lines with a comment.
    """
    if after.path.rpartition("/")[2] == "__init__.py":
        return ()
    tree = after.tree()
    unread = {_bound_name(alias) for alias in _imported(tree)} - _uses(tree)
    gone = unread & _uses(before.tree()) if unread else unread
    edits: list[Edit] = []
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) or after.has_comment(*line_bounds(after, node)):
            continue
        unused = [
            alias
            for alias in node.names
            if (name := _bound_name(alias)) in gone
            and alias.asname != alias.name
            and not _is_named_in_string(tree, name)
            and not any(_takes_from(other, after.path, name) for other in others)
        ]
        if unused:
            edits += _removed(after, tree, node, unused)
    return tuple(edits)


def _is_bound_by(scope: Scope, needed: Import) -> bool:
    """Whether every binding of the name in that scope is the import itself, at run time."""
    nodes = scope.names[needed.name]
    return all(
        isinstance(node, ast.ImportFrom)
        and node.module == needed.module
        and any(alias.name == needed.name and _bound_name(alias) == needed.name for alias in node.names)
        for node in nodes
    )


def _bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _start(node: ScopeNode) -> tuple[int, int]:
    return (1, 0) if isinstance(node, ast.Module) else (node.lineno, node.col_offset)


def _holds(source: SourceFile, node: ScopeNode, offset: int) -> bool:
    if isinstance(node, ast.Module):
        return True
    assert node.end_lineno is not None and node.end_col_offset is not None
    return source.offset(*_start(node)) <= offset < source.offset(node.end_lineno, node.end_col_offset)


def _import_line(module: str, names: set[str]) -> str:
    line = f"from {module} import {', '.join(sorted(names))}"
    if len(line) <= MAX_LINE:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"


def _extended(source: SourceFile, node: ast.ImportFrom, names: set[str]) -> Edit | None:
    """The line that imports from the module already, with `names` in it."""
    present = {alias.name for alias in node.names if alias.asname in (None, alias.name)}
    if "*" in present or names <= present:
        return None
    start, end = _node_bounds(source, node)
    written = [f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in node.names]
    if written != sorted(written) or node.lineno != node.end_lineno or source.has_comment(start, end):
        at = _alias_bounds(source, node.names[-1])[1]
        return Edit(at, at, "".join(f", {name}" for name in sorted(names - present)))
    return Edit(start, end, _import_line(node.module or "", {*written, *names}))


def _node_bounds(source: SourceFile, node: ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return source.offset(node.lineno, node.col_offset), source.offset(node.end_lineno, node.end_col_offset)


def _removed(
    source: SourceFile, tree: ast.Module, node: ast.Import | ast.ImportFrom, unused: list[ast.alias]
) -> list[Edit]:
    if len(unused) == len(node.names):
        start, end = line_bounds(source, node)
        shares = any(other is not node and _same_lines(other, node) for other in tree.body)
        if shares or source.text[start:end].rstrip() != source.text[slice(*_node_bounds(source, node))]:
            return []
        return [Edit(start, end, "")]
    edits = []
    kept = [alias for alias in node.names if alias not in unused]
    spans = {alias: _alias_bounds(source, alias) for alias in node.names}
    for position, alias in enumerate(node.names):
        if alias in kept:
            continue
        # With the comma before it, or the one after it where nothing that stays comes before.
        if any(other in kept for other in node.names[:position]):
            edits.append(Edit(spans[node.names[position - 1]][1], spans[alias][1], ""))
        else:
            edits.append(Edit(spans[alias][0], spans[node.names[position + 1]][0], ""))
    return edits


def _same_lines(one: ast.stmt, other: ast.stmt) -> bool:
    return one.lineno <= (other.end_lineno or 0) and other.lineno <= (one.end_lineno or 0)


def _alias_bounds(source: SourceFile, alias: ast.alias) -> tuple[int, int]:
    assert alias.end_lineno is not None and alias.end_col_offset is not None
    return source.offset(alias.lineno, alias.col_offset), source.offset(alias.end_lineno, alias.end_col_offset)


def _uses(tree: ast.Module) -> set[str]:
    """Names that are read or deleted anywhere, in whatever scope."""
    return {node.id for node in walk(tree) if isinstance(node, ast.Name)}


def _imported(tree: ast.Module) -> Iterator[ast.alias]:
    return (alias for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names)


def _is_named_in_string(tree: ast.Module, name: str) -> bool:
    """Whether a string that is an expression, such as an annotation or an item of `__all__`, reads the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name in node.value:
            with contextlib.suppress(SyntaxError, ValueError):
                expression = ast.parse(node.value.strip(), mode="eval")
                if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(expression)):
                    return True
    return False


def _takes_from(other: SourceFile, path: str, name: str) -> bool:
    """Whether another file imports `name`, or everything, from the module at `path`, or reads it as an attribute."""
    module = path.removesuffix(".py").rpartition("/")[2]
    if other.path == path or module not in other.text:
        return False
    try:
        tree = other.tree()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Nothing can be said about it but that it has both words.
        return name in other.text
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(origin), names=aliases) if origin.rpartition(".")[2] == module:
                if any(alias.name in (name, "*") for alias in aliases):
                    return True
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=attr):
                if (owner, attr) == (module, name):
                    return True
    return False
