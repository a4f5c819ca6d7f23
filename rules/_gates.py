"""What a test of a model's family decides for the families that it does not name."""

from __future__ import annotations

import ast
import re
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddaudit.auditor.facts.repository import FileFacts

LOGGING = frozenset({"print", "warn", "warning", "info", "debug", "error", "warning_once", "print_rank0"})
FAMILY_CLASS = re.compile(r"^(?!Auto)[A-Z]\w*(ForCausalLM|ForConditionalGeneration|LMHeadModel)\w*$")
EXITS = frozenset({"exit", "quit", "_exit"})


class Outcome(Enum):
    """What happens to families that are not named."""

    REFUSED = "an error is raised"
    PASSED_OVER = "nothing is done for them"
    MISTAKEN = "they are taken for another family"
    SERVED = "other code serves them"
    UNKNOWN = "the test's result goes elsewhere"


def outcome(test: ast.expr, file: FileFacts) -> Outcome:
    """What happens where a comparison, or a call of `isinstance`, is false."""
    negated = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn | ast.NotEq | ast.IsNot)
    part, above = test, file.parent(test)
    while isinstance(above, ast.BoolOp | ast.UnaryOp):
        negated ^= isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not)
        part, above = above, file.parent(above)
    match above:
        case ast.Assert():
            return Outcome.REFUSED
        case ast.IfExp(test=tested) if tested is part:
            return Outcome.SERVED
        case ast.If(test=tested) if tested is part:
            return _where_false(above, negated, file)
        case ast.comprehension():
            return Outcome.PASSED_OVER
        case ast.Assign(targets=[ast.Name() as flag]):
            return _where_tested(flag, file)
    return Outcome.UNKNOWN


def refuses(body: Sequence[ast.stmt]) -> bool:
    """Whether a block ends the run, or raises."""
    for statement in body:
        match statement:
            case ast.Raise() | ast.Assert(test=ast.Constant(value=False)):
                return True
            case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if name in EXITS:
                return True
    return False


def _where_false(node: ast.If, negated: bool, file: FileFacts) -> Outcome:
    if negated:
        if refuses(node.body):
            return Outcome.REFUSED
        leaves = all(isinstance(item, ast.Continue | ast.Pass | ast.Return | ast.Break) for item in node.body)
        return Outcome.PASSED_OVER if leaves else Outcome.SERVED
    last = node
    while len(last.orelse) == 1 and isinstance(last.orelse[0], ast.If):
        last = last.orelse[0]
    if last.orelse:
        if refuses(last.orelse):
            return Outcome.REFUSED
        if all(map(_does_nothing, last.orelse)):
            return Outcome.PASSED_OVER
        return Outcome.MISTAKEN if any(map(_names_family, last.orelse)) else Outcome.SERVED
    head = node
    while isinstance(above := file.parent(head), ast.If) and above.orelse == [head]:
        head = above
    block = file.block(head)
    after = block[block.index(head) + 1 :] if head in block else []
    if refuses(node.body):
        return Outcome.SERVED
    if after and isinstance(node.body[-1], ast.Return):
        return Outcome.REFUSED if refuses(after) else Outcome.SERVED
    return Outcome.PASSED_OVER


def _names_family(statement: ast.stmt) -> bool:
    """Whether a class of one family is called."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    parts = (part for call in calls for part in ast.walk(call))
    names = (part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in parts)
    return any(FAMILY_CLASS.match(name) is not None for name in names)


def _does_nothing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Continue():
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in LOGGING
    return False


def _where_tested(flag: ast.Name, file: FileFacts) -> Outcome:
    """What the first `if` or `assert` on a flag decides."""
    home = file.scope(flag)
    for node in file.nodes:
        match node:
            case ast.Name(id=flag.id, ctx=ast.Load()) if file.scope(node) is home:
                if (found := outcome(node, file)) is not Outcome.UNKNOWN:
                    return found
    return Outcome.UNKNOWN
