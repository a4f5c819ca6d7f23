"""Where a new import line goes: below what sets the process up, beside its kind, above its first use."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, TypeAlias

from ddaudit.auditor.facts.scopes import FUNCTIONS
from ddaudit.auditor.finding import Edit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddaudit.auditor.sources.source import SourceFile

# Importing `ddaudit.runtime` imports these, so a line right after theirs sets nothing up too early.
RUNTIME_PACKAGES = ("torch", "transformers")

_ImportNode: TypeAlias = ast.Import | ast.ImportFrom


def insert_import(source: SourceFile, tree: ast.Module, line: str, names: set[str]) -> Edit:
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
    start, _ = line_bounds(source, first)
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
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)) or (isinstance(node, ast.If) and asks(node, "__name__")):
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


def asks(node: ast.If, name: str) -> bool:
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


def line_bounds(source: SourceFile, node: ast.stmt) -> tuple[int, int]:
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
