"""Dropping the mask token from the output drops real tokens too.

A buffer filled with the mask token and stripped of it at the end, `out[:, out[0] != mask_token_id]`, loses every
place where the model really said that token. The mask token of a drafter is an ordinary entry of the vocabulary
(248070 for the DFlash drafter of Qwen3.6-27B). The loop knows how much it has written: cut there.

On: every release and target, silently.
Seen: liranringel/ddtree; 248070 is a real token of Qwen3.6-27B.
Fix: safe where the loop's own count is known.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Confidence, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class MaskTokenFilter(Rule):
    code = "DDA301"
    kind = "mask-token-filter"
    severity = Severity.SILENT
    message = "every real token equal to the mask token is dropped too; cut the output at the length that was written"
    nodes = (ast.Subscript,)
    markers = ("mask",)
    EXAMPLES = (
        Good("""
            def masked(ids, mask_token_id):
                return (ids != mask_token_id).sum()
        """),
        Good("""
            def losses(loss, labels, ignore_index):
                return loss[labels != ignore_index]
        """),
        Bad(
            """
            import torch

            def decode(step, limit, mask_token_id):
                out = torch.full((1, limit + 8), mask_token_id)
                start = 1
                while start < limit:
                    tokens, bonus = step(out, start)
                    count = len(tokens)
                    out[:, start : start + count] = tokens
                    out[:, start + count] = bonus
                    start += count
                out = out[:, :limit]
                out = out[:, out[0] != mask_token_id]
                return out
            """,
            """
            import torch

            def decode(step, limit, mask_token_id):
                out = torch.full((1, limit + 8), mask_token_id)
                start = 1
                while start < limit:
                    tokens, bonus = step(out, start)
                    count = len(tokens)
                    out[:, start : start + count] = tokens
                    out[:, start + count] = bonus
                    start += count
                out = out[:, :limit]
                out = out[:, : start + 1]
                return out
            """,
        ),
        Bad("""
            def strip(out, mask_id):
                return out[out != mask_id]
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Subscript)
        compare = _filter(node, file)
        if compare is None or not isinstance(node.ctx, ast.Load):
            return
        mask = compare.comparators[0]
        filled = _filled_with(node.value, mask, file)
        place = f"{file.source.path}:{node.lineno}"
        fact = f"{place}: `{file.text(node.value)}` is filtered by `{file.text(mask)}`"
        evidence = (fact,) if filled is None else (f"{file.source.path}:{filled.lineno}: it fills the buffer", fact)
        confidence = Confidence.LIKELY if filled is None else Confidence.PROVEN
        because = Value(Kind.TENSOR, place, confidence, evidence)
        yield self.report(file, node, because, fix=_fix(node, file), claim=Claim(Ask.MASK_TOKEN))


def _filter(node: ast.Subscript, file: FileFacts) -> ast.Compare | None:
    """The comparison with a mask token that selects the elements."""
    keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for key in keys:
        match key:
            case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[ast.Name() | ast.Attribute() as mask]):
                name = mask.attr if isinstance(mask, ast.Attribute) else mask.id
                words = name.lower().split("_")
                base = left.value if isinstance(left, ast.Subscript) else left
                names_token = "mask" in words and ("id" in words or "token" in words)
                if names_token and ast.dump(base) == ast.dump(node.value):
                    assert isinstance(key, ast.Compare)
                    return key
    return None


def _filled_with(buffer: ast.expr, mask: ast.expr, file: FileFacts) -> ast.Call | None:
    """The call that fills the buffer with the mask token."""
    for made in file.all_made_from(buffer):
        match made:
            case ast.Call(func=ast.Attribute(attr="full" | "full_like" | "new_full"), args=[_, fill, *_]):
                if ast.dump(fill) == ast.dump(mask):
                    assert isinstance(made, ast.Call)
                    return made
    return None


def _fix(node: ast.Subscript, file: FileFacts) -> Fix | str:
    unknown = "the length that was written does not follow from the loop's last write"
    match node.slice:
        case ast.Tuple(elts=[ast.Slice(lower=None, upper=None, step=None), ast.Compare()]):
            pass
        case _:
            return unknown
    loop = _loop_before(node, file)
    if loop is None or loop.orelse or file.scope(loop) is not file.scope(node):
        return unknown
    if (step := _step_after_last_write(loop, ast.dump(node.value))) is None or not _is_last_word(
        step, loop, node, file
    ):
        return unknown
    start = ast.unparse(step.target)
    reason = "the loop's last write stands one past the new start, so that is the length"
    edit = file.edit(node, f"{file.text(node.value)}[:, : {start} + 1]")
    return Fix((edit,), Applicability.SAFE, reason)


def _loop_before(node: ast.Subscript, file: FileFacts) -> ast.While | ast.For | None:
    """The last loop that surely ran before and writes into the buffer."""
    buffer = ast.dump(node.value)
    for item in (node, *file.ancestors(node)):
        if not isinstance(item, ast.stmt):
            continue
        block = file.block(item)
        for statement in reversed([*_in_turn(block[: block.index(item)])]):
            if isinstance(statement, ast.While | ast.For) and any(
                _writes(part, buffer) for part in ast.walk(statement)
            ):
                return statement
    return None


def _in_turn(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run one after the other, those inside a `with` too."""
    for statement in block:
        if isinstance(statement, ast.With):
            yield from _in_turn(statement.body)
        else:
            yield statement


def _writes(node: ast.AST, buffer: str) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and ast.dump(node.value) == buffer


def _step_after_last_write(loop: ast.While | ast.For, buffer: str) -> ast.AugAssign | None:
    """`start += n` of a loop whose last write into the buffer, each round, is at `start + n`, and none goes beyond."""
    index: Counter[str] | None = None
    for statement in _in_turn(loop.body):
        match statement:
            case ast.Assign(targets=[ast.Subscript(slice=ast.Tuple(elts=[ast.Slice(), at])) as target]):
                if _writes(target, buffer) and not isinstance(at, ast.Slice):
                    index, last = _terms(at), statement.lineno
                    continue
            case ast.AugAssign(target=ast.Name(id=start), op=ast.Add(), value=step) if index is not None:
                if index == _terms(step) + Counter([ast.dump(ast.Name(start, ast.Load()))]):
                    break
    else:
        return None
    assert index is not None and isinstance(statement, ast.AugAssign)
    read = {name.id for name in ast.walk(statement) if isinstance(name, ast.Name)}
    for node in ast.walk(loop):
        match node:
            case ast.Break() | ast.Continue() if last < node.lineno < statement.lineno:
                return None
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if node is not statement.target:
                # Another start, another buffer, or another step than the one that was written by.
                is_changed = name in read and last <= node.lineno <= statement.lineno
                if is_changed or name == start or ast.dump(ast.Name(name, ast.Load())) == buffer:
                    return None
            case ast.Subscript(slice=ast.Tuple(elts=[_, at])) if _writes(node, buffer) and node.lineno != last:
                if node.lineno > last or (isinstance(at, ast.Slice) and (not at.upper or _terms(at.upper) != index)):
                    return None
    return statement


def _is_last_word(step: ast.AugAssign, loop: ast.stmt, node: ast.Subscript, file: FileFacts) -> bool:
    """Whether neither the start nor the buffer changes between the loop and the filter; cutting its end is fine."""
    buffer = ast.dump(node.value)
    here = file.statement(node)
    for other in file.nodes:
        if not (loop.end_lineno or 0) < file.lineno(other) < here.lineno or file.scope(other) is not file.scope(loop):
            continue
        if _writes(other, buffer):
            return False
        if isinstance(other, ast.Name) and not isinstance(other.ctx, ast.Load):
            if other.id == ast.unparse(step.target):
                return False
            if ast.dump(ast.Name(other.id, ast.Load())) == buffer and not _cuts_end(file.statement(other), buffer):
                return False
    return True


def _cuts_end(statement: ast.stmt, buffer: str) -> bool:
    """`out = out[:, :n]`"""
    match statement:
        case ast.Assign(
            targets=[ast.Name()],
            value=ast.Subscript(
                value=held, slice=ast.Tuple(elts=[ast.Slice(lower=None), ast.Slice(lower=None, step=None)])
            ),
        ):
            return ast.dump(held) == buffer
    return False


def _terms(expr: ast.expr) -> Counter[str]:
    """The summands of an expression."""
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
        return _terms(expr.left) + _terms(expr.right)
    return Counter([ast.dump(expr)])
