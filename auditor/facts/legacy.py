"""Code that a test for an attribute or class of old releases keeps from running on new ones."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddaudit.auditor.facts.repository import FileFacts

LEGACY_ATTRIBUTES = frozenset({"key_cache", "value_cache", "to_legacy_cache", "seen_tokens", "_seen_tokens"})


def legacy_parts(file: FileFacts) -> set[ast.AST]:
    """Tests for old releases, and what runs only where they hold."""
    parts: set[ast.AST] = set()
    for node in file.file.of(ast.If, ast.IfExp):
        assert isinstance(node, ast.If | ast.IfExp)
        match node.test:
            case ast.Compare(left=ast.Name() as asked, ops=[op], comparators=[ast.Constant(value=None)]):
                negated, is_legacy = isinstance(op, ast.Is), _gets_legacy(file.made_from(asked))
            case ast.Name() as asked:
                negated, is_legacy = False, _gets_legacy(file.made_from(asked))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                negated, is_legacy = True, _tests_legacy(operand)
            case test:
                negated, is_legacy = False, _tests_legacy(test)
        if _asks_new(node.test):
            parts.update(_without(file, node))
        if is_legacy:
            runs = node.orelse if negated else node.body
            parts.add(node.test)
            parts.update(runs if isinstance(runs, list) else [runs])
    return parts


def _without(file: FileFacts, node: ast.If | ast.IfExp) -> list[ast.AST]:
    """What runs where the test is false: the other branch, and what follows one that leaves."""
    if isinstance(node, ast.IfExp):
        return [node.orelse]
    found: list[ast.AST] = list(node.orelse)
    if not node.orelse and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
        body = getattr(file.parent(node), "body", [])
        found += body[body.index(node) + 1 :] if node in body else []
    return found


def _asks_new(test: ast.expr) -> bool:
    """`hasattr(cache, "layers")`, which only a cache of an old release, or a tuple, has not."""
    match test:
        case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value="layers" | "crop")]):
            return True
        case ast.BoolOp(op=ast.And(), values=[first, *_]):
            return _asks_new(first)
    return False


def _gets_legacy(made: ast.expr | None) -> bool:
    """`getattr(cache, "key_cache", None)`, which is None on new releases."""
    match made:
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), ast.Constant(value=None)]):
            return name in LEGACY_ATTRIBUTES
    return False


def _tests_legacy(test: ast.expr) -> bool:
    for node in ast.walk(test):
        match node:
            case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value=str(name))]):
                if name in LEGACY_ATTRIBUTES:
                    return True
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id="tuple" | "list")]):
                return True
    return False
