"""Dropping the mask token from the output drops real tokens too.

A buffer filled with the mask token and stripped of it at the end, `out[:, out[0] != mask_token_id]`, loses every
place where the model really said that token. The mask token of a drafter is an ordinary entry of the vocabulary
(248070 for the DFlash drafter of Qwen3.6-27B). The loop knows how much it has written: cut there.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability, Confidence, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.auditor.values import Kind, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts import FileFacts
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
        yield self.report(file, node, because, fix=_fix(node, file))


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
    scope = file.scope(node)
    writes: list[tuple[ast.stmt, Counter[str]]] = []
    for other in file.nodes:
        if file.lineno(other) >= node.lineno:
            continue
        match other:
            case ast.Assign(targets=[ast.Subscript(value=buffer, slice=ast.Tuple(elts=[ast.Slice(), index]))]):
                in_loop = any(isinstance(above, ast.While | ast.For) for above in file.ancestors(other))
                same = ast.dump(buffer) == ast.dump(node.value) and file.scope(other) is scope
                if same and in_loop and not isinstance(index, ast.Slice):
                    assert isinstance(other, ast.Assign)
                    writes.append((other, _terms(index)))
    for write, terms in reversed(writes):
        for other in file.nodes:
            match other:
                case ast.AugAssign(target=ast.Name(id=start), op=ast.Add(), value=step):
                    after = write.lineno < other.lineno < node.lineno and file.scope(other) is scope
                    start_term = ast.dump(ast.Name(start, ast.Load()))
                    if after and terms == _terms(step) + Counter([start_term]):
                        reason = "the loop's last write stands one past the new start, so that is the length"
                        edit = file.edit(node, f"{file.text(node.value)}[:, : {start} + 1]")
                        return Fix((edit,), Applicability.SAFE, reason)
    return unknown


def _terms(expr: ast.expr) -> Counter[str]:
    """The summands of an expression."""
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
        return _terms(expr.left) + _terms(expr.right)
    return Counter([ast.dump(expr)])
