"""What is below a node of a syntax tree: what facts and rules can be about, without operators and contexts."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Fields that hold no node, or one that says nothing on its own: an operator, a context.
BARE_FIELDS = frozenset(
    {
        "ctx", "op", "ops", "id", "attr", "kind", "type_comment", "level", "simple", "conversion", "is_async",
        "module", "asname", "lineno", "type_ignores", "kwd_attrs",
    }
)  # fmt: skip
# What they have is a name, or names, or a constant.
LEAVES = frozenset(
    {ast.Name, ast.Constant, ast.alias, ast.Global, ast.Nonlocal, ast.Pass, ast.Break, ast.Continue, ast.MatchSingleton}
)
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}


def node_fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """Fields of a node of this type that can hold nodes, in the order of the text."""
    if kind not in _FIELDS:
        fields = () if kind in LEAVES else kind._fields
        _FIELDS[kind] = tuple(name for name in fields if name not in BARE_FIELDS)
    return _FIELDS[kind]


def children(node: ast.AST) -> list[Any]:
    """Nodes directly below, in the order of the text."""
    found: list[Any] = []
    for name in node_fields(type(node)):
        value = getattr(node, name, None)
        if value.__class__ is list:
            # Only arguments and dictionaries have lists with gaps.
            found += [item for item in value if item is not None]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, parents first, in the order of the text; without recursion."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(children(node))
