"""Import lines of a file under repair: the names that fixes need are bound, the names they left unused go."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from ddaudit.auditor.finding import Edit, Fix, Import
from ddaudit.auditor.scopes import FUNCTIONS, File, Scope, ScopeNode, index

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddaudit.auditor.source import SourceFile

MAX_LINE = 110
# Importing `ddaudit.runtime` imports these, so a line right after theirs sets nothing up too early.
RUNTIME_PACKAGES = ("torch", "transformers")

_ImportNode: TypeAlias = ast.Import | ast.ImportFrom


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
            parent = self.file.parents.get(node)
            while parent is not None and not (isinstance(parent, ast.If) and _asks(parent, "TYPE_CHECKING")):
                parent = self.file.parents.get(parent)
            if parent is None:
                return True
        return False

    def _scope_at(self, offset: int) -> Scope:
        """The innermost scope around an offset."""
        around = [scope for scope in self._scopes if _holds(self.source, scope.node, offset)]
        return max(around, key=lambda scope: self.source.offset(*_start(scope.node)), default=self.file.scope)

    @cached_property
    def _scopes(self) -> list[Scope]:
        return [scope for scope in set(self.file.scopes.values()) if scope is not self.file.scope]

    @cached_property
    def _unbound(self) -> set[str]:
        reads = (node for node in self.file.nodes if isinstance(node, ast.Name))
        return {node.id for node in reads if self.file.scopes[node].find(node.id) is None}


def add_imports(source: SourceFile, needed: set[Import]) -> tuple[Edit, ...]:
    """Edits that bind every name of `needed` at the top level of `source`, one line a module."""
    tree = source.parse()
    edits = []
    for module in sorted({item.module for item in needed}):
        names = {item.name for item in needed if item.module == module}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
                edits.append(_extended(source, node, names))
                break
        else:
            edits.append(_inserted(source, tree, _import_line(module, names), names))
    return tuple(edit for edit in edits if edit is not None)


def drop_unused(before: SourceFile, after: SourceFile, others: Iterable[SourceFile] = ()) -> tuple[Edit, ...]:
    """Edits of `after` that remove the top-level imports which `before` used and `after` no longer does.

    Kept: a package's `__init__.py`, names in `__all__` or in any other string that is an expression, names that
    `others`, the repository's other files, take from this one, aliases to the same name, and lines with a comment.
    """
    if after.path.rpartition("/")[2] == "__init__.py":
        return ()
    used, tree = _uses(before.parse()), after.parse()
    gone = used - _uses(tree)
    edits: list[Edit] = []
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) or after.has_comment(*_line_bounds(after, node)):
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


def _inserted(source: SourceFile, tree: ast.Module, line: str, names: set[str]) -> Edit:
    """A new line: below what sets the process up, with the imports it belongs to, above its first use."""
    body = tree.body[: _first_use(tree, names)]
    last_import = max((i for i, node in enumerate(body) if isinstance(node, ast.Import | ast.ImportFrom)), default=0)
    floor, gap = -1, ""
    for i, node in enumerate(body):
        if _is_set_up(node) or (i < last_import and _is_bare_call(node)):
            floor, gap = i, ""
        elif _stays_first(node, i):
            floor, gap = i, "\n"
    anchor = _anchor(body[floor + 1 :])
    if anchor is not None:
        text = source.line(anchor.lineno)
        indent = text[: len(text) - len(text.lstrip())]
        return _below(source, _same_line_end(tree, anchor), ("\n" if _is_standard(anchor) else "") + indent + line)
    if floor >= 0:
        return _below(source, _same_line_end(tree, body[floor]), gap + line)
    if not tree.body:
        return _below(source, None, line)
    first = tree.body[0]
    start, _ = _line_bounds(source, first)
    return Edit(start, start, line + ("\n\n\n" if isinstance(first, (*FUNCTIONS, ast.ClassDef)) else "\n\n"))


def _first_use(tree: ast.Module, names: set[str]) -> int:
    """Position of the first top-level statement that reads one of `names` while the module is imported, itself or
    through a function or class of the module."""
    names = set(names)
    definitions = [node for node in tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    grown = True
    while grown:
        more = {node.name for node in definitions if _reads(ast.walk(node), names)} - names
        names |= more
        grown = bool(more)
    return next((i for i, node in enumerate(tree.body) if _reads(_run_at_import(node), names)), len(tree.body))


def _reads(nodes: Iterable[ast.AST], names: set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in nodes)


def _stays_first(node: ast.stmt, position: int) -> bool:
    """Docstring and `__future__`: the language wants them first."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _anchor(body: Sequence[ast.stmt]) -> _ImportNode | None:
    """The import that a new one goes below: of those before the first definition the last of the runtime's packages,
    else the last that is neither relative nor of the standard library, else the last."""
    plain: list[_ImportNode] = []
    tried: list[_ImportNode] = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            plain.append(node)
        elif isinstance(node, ast.Try):
            tried += [inner for inner in node.body if isinstance(inner, ast.Import | ast.ImportFrom)]
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            break
    ours = [node for node in plain if _package(node) in RUNTIME_PACKAGES]
    ours = ours or [node for node in tried if _package(node) in RUNTIME_PACKAGES]
    others = [node for node in plain if _package(node) and not _is_standard(node)]
    return next((group[-1] for group in (ours, others, plain) if group), None)


def _package(node: _ImportNode) -> str:
    """Top-level package of an import, empty for a relative one."""
    if isinstance(node, ast.Import):
        return node.names[-1].name.partition(".")[0]
    return "" if node.level else (node.module or "").partition(".")[0]


def _is_standard(node: _ImportNode) -> bool:
    return _package(node) in sys.stdlib_module_names


def _is_set_up(node: ast.stmt) -> bool:
    """Whether a top-level statement writes what later imports read: the environment or the module search."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)) or (isinstance(node, ast.If) and _asks(node, "__name__")):
        return False
    for part in _run_at_import(node):
        match part:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                if any(_is_process_state(target) for target in targets):
                    return True
            case ast.AugAssign(target=target) if _is_process_state(target):
                return True
            case ast.Expr(value=ast.Call(func=function)) if _is_process_state(function):
                return True
    return False


def _is_process_state(node: ast.expr) -> bool:
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if name in ("environ", "putenv", "unsetenv", "chdir", "addsitedir", "load_dotenv"):
            return True
        if name in ("path", "meta_path", "path_hooks", "modules") and ast.unparse(part).startswith("sys."):
            return True
    return False


def _is_bare_call(node: ast.stmt) -> bool:
    """A call made for its effect: among imports, one that they may wait for."""
    if isinstance(node, ast.If | ast.With | ast.For):
        return any(_is_bare_call(child) for child in node.body)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _asks(node: ast.If, name: str) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id == name) or (isinstance(part, ast.Attribute) and part.attr == name)
        for part in ast.walk(node.test)
    )


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that run when it does: not the bodies of the functions it defines."""
    pending = [node]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, FUNCTIONS):
            outer = [] if isinstance(part, ast.Lambda) else part.decorator_list
            pending += [*outer, *part.args.defaults, *filter(None, part.args.kw_defaults)]
        else:
            pending += ast.iter_child_nodes(part)


def _node_bounds(source: SourceFile, node: ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return source.offset(node.lineno, node.col_offset), source.offset(node.end_lineno, node.end_col_offset)


def _line_bounds(source: SourceFile, node: ast.stmt) -> tuple[int, int]:
    """From the start of the statement's first line to the end of its last, newline included."""
    first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", ()))])
    starts, last = source.line_starts, node.end_lineno or node.lineno
    return starts[first - 1], starts[last] if last < len(starts) else len(source.text)


def _same_line_end(tree: ast.Module, node: ast.stmt) -> int:
    """Last line of a statement and of those that share its lines through `;`."""
    last = node.end_lineno or node.lineno
    for other in ast.walk(tree):
        if isinstance(other, ast.stmt) and other.lineno == last:
            last = max(last, other.end_lineno or last)
    return last


def _below(source: SourceFile, last_line: int | None, line: str) -> Edit:
    starts = source.line_starts
    end = len(source.text)
    if last_line is not None and last_line < len(starts):
        return Edit(starts[last_line], starts[last_line], line + "\n")
    if not source.text or source.text[-1] in "\r\n":
        return Edit(end, end, line + "\n")
    return Edit(end, end, "\n" + line)


def _removed(source: SourceFile, tree: ast.Module, node: _ImportNode, unused: list[ast.alias]) -> list[Edit]:
    if len(unused) == len(node.names):
        start, end = _line_bounds(source, node)
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
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


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
        tree = other.parse()
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
