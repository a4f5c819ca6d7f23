"""Cutting a cache back with `crop` depends on the release and forgets nothing that a recurrent layer has seen.

Up to Transformers 5.12 `crop(n)` kept the first n tokens, in 5.17 a positive n warns, and from 5.24 it raises:
only a count of tokens to remove, zero or negative, is taken. On a hybrid model linear-attention layers raise, and
after `activate_past_recording()` they go on without an error while the rejected tokens stay in their state, so the
text is silently wrong. `crop_cache(cache, length)` of `ddaudit.runtime` keeps the first `length` tokens on every
layer kind and release.

On: a length raises from 5.24 on every model; what a recurrent layer keeps is silent on every release.
Seen: huggingface/transformers#49036, huggingface/transformers#47720; liranringel/ddtree and z-lab/dflash crop so.
Fix: safe: the same tokens are kept on full attention. Not made where the length is not understood or rows are moved
  by hand.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

MOVED_BY_HAND = "rows of this cache are moved by hand in a way that is not understood"
NEGATIVE = (
    "a negative `crop` leaves the rejected tokens in the state of recurrent layers, without an error once past "
    "recording is on; cut back with `crop_cache(cache, length)`"
)


class CacheCrop(Rule):
    code = "DDA102"
    kind = "cache-crop"
    severity = Severity.ERROR
    message = (
        "`crop` no longer takes a length (raises from Transformers 5.24) and never undoes a recurrent state; "
        "use `crop_cache(cache, length)`"
    )
    since = "5.24"
    nodes = (Named(ast.Call, frozenset({"crop"})),)
    markers = (".crop(",)
    EXAMPLES = (
        Good("""
            def centre(image, left, top, size):
                return image.crop((left, top, left + size, top + size))
        """),
        Good("""
            from transformers import DynamicCache

            def rewind(cache: DynamicCache, length):
                if hasattr(cache, "key_cache"):
                    cache.crop(length)
        """),
        Good("""
            from transformers import DynamicCache

            def drop_last(cache: DynamicCache):
                if cache.is_croppable:
                    cache.crop(-1)
        """),
        Bad(
            """
            from transformers import DynamicCache

            def rewind(cache: DynamicCache, start):
                cache.crop(start + 1)
            """,
            """
            from transformers import DynamicCache
            from ddaudit.runtime import crop_cache

            def rewind(cache: DynamicCache, start):
                crop_cache(cache, start + 1)
            """,
        ),
        Bad(
            """
            from transformers import PreTrainedModel

            def step(target: PreTrainedModel, ids, cache, start):
                out = target(ids, cache=cache)
                cache.crop(start - cache.get_seq_length())
                return out
            """,
            """
            from transformers import PreTrainedModel
            from ddaudit.runtime import crop_cache

            def step(target: PreTrainedModel, ids, cache, start):
                out = target(ids, cache=cache)
                crop_cache(cache, start)
                return out
            """,
        ),
        Bad("""
            from transformers import DynamicCache

            def rewind(cache: DynamicCache, start):
                cache.crop(
                    start  # the accepted prefix
                )
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Call(func=ast.Attribute(value=receiver, attr="crop"), args=[length], keywords=[]):
                pass
            case ast.Call(
                func=ast.Attribute(value=receiver, attr="crop"),
                args=[],
                keywords=[ast.keyword(arg="max_length" | "tokens_to_remove", value=length)],
            ):
                pass
            case _:
                return
        cache = file.holds(receiver, Kind.CACHE)
        if cache is None or isinstance(length, ast.Tuple | ast.Starred) or file.is_legacy_branch(node):
            return
        if file.defines(receiver, "crop"):
            return
        if not _counts(length, file):
            fix = _fix(node, receiver, length, file)
            yield self.report(file, node, cache, fix=fix, claim=Claim(Ask.CROP_LENGTH))
        elif not _is_guarded(node, file) and not _is_drafters(file, receiver):
            fix = _fix(node, receiver, length, file)
            claim = Claim(Ask.ROLLBACK)
            yield self.report(
                file, node, cache, fix=fix, severity=Severity.SILENT, message=NEGATIVE, claim=claim, since=""
            )


def _counts(length: ast.expr, file: FileFacts) -> bool:
    """Whether the argument is a count of tokens to remove, which is negative, and not a length."""
    match file.made_from(length) or length:
        case ast.UnaryOp(op=ast.USub()):
            return True
        case ast.BinOp(op=ast.Sub(), right=ast.Call(func=ast.Attribute(attr="get_seq_length"))):
            return True
    return False


def _kept(length: ast.expr, receiver: ast.expr, file: FileFacts) -> str | None:
    """Text of the length that is left; None where it is not known whether the argument is one or a count."""
    if not _counts(length, file):
        return None if _has_minus(length) else file.argument(length)
    # The cache is written twice, or only once instead of twice.
    if not _is_path(receiver):
        return None
    match length:
        case ast.UnaryOp(op=ast.USub(), operand=count):
            number = file.text(count) if isinstance(count, ast.Constant) else file.operand(count)
            return f"{file.operand(receiver)}.get_seq_length() - {number}"
        case ast.BinOp(left=kept, op=ast.Sub(), right=ast.Call(func=ast.Attribute(value=asked), args=[])):
            return file.argument(kept) if ast.dump(asked) == ast.dump(receiver) else None
    return None


def _has_minus(length: ast.expr) -> bool:
    """A sign somewhere in the sum or choice that it is."""
    match length:
        case ast.UnaryOp(op=ast.USub()):
            return True
        case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
            return _has_minus(left) or _has_minus(right)
        case ast.BoolOp(values=values):
            return any(_has_minus(value) for value in values)
        case ast.NamedExpr(value=value):
            return _has_minus(value)
    return False


def _is_path(expr: ast.expr) -> bool:
    """A dotted name, which may be written twice."""
    while isinstance(expr, ast.Attribute):
        expr = expr.value
    return isinstance(expr, ast.Name)


def _may_be_count(length: ast.expr) -> bool:
    """A difference of two unknown numbers, which old releases took either way."""
    match length:
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return not isinstance(right, ast.Constant) and "get_seq_length" not in ast.dump(left)
    return False


def _is_guarded(node: ast.AST, file: FileFacts) -> bool:
    return any(isinstance(above, ast.If) and "is_croppable" in ast.dump(above.test) for above in file.ancestors(node))


def _is_drafters(file: FileFacts, receiver: ast.expr) -> bool:
    """Whether only the repository's own full-attention modules are known to take the cache."""
    uses = [file.cache_use(value) for value in file.values(receiver) if value.kind is Kind.CACHE]
    return any(use.owners for use in uses) and not any(use.models for use in uses)


def _fix(node: ast.AST, receiver: ast.expr, length: ast.expr, file: FileFacts) -> Fix | str:
    for compaction in file.compactions:
        if compaction.crop is not None and compaction.crop is file.statement(node):
            return compaction.fix(file)
    if any(file.cache_use(value).is_moved_by_hand for value in file.values(receiver) if value.kind is Kind.CACHE):
        return MOVED_BY_HAND
    if (kept := _kept(length, receiver, file)) is None:
        return "it is not clear which length is left"
    if (runtime := file.runtime_call("crop_cache", node)) is None:
        return "the names `crop_cache` and `runtime` mean something else here"
    edit = file.edit(node, f"{runtime[0]}({file.argument(receiver)}, {kept})")
    if not _counts(length, file) and _may_be_count(length):
        reason = "right if the difference is the length to keep, not minus the count to remove"
        return Fix((edit,), Applicability.UNSAFE, reason, (runtime[1],))
    reason = "keeps the first tokens exactly, on every layer kind and release"
    return Fix((edit,), Applicability.SAFE, reason, (runtime[1],))
