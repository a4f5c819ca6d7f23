"""Cutting a cache back with `crop` depends on the release and forgets nothing that a recurrent layer has seen.

Up to Transformers 5.12 `crop(n)` kept the first n tokens, in 5.17 a positive n warns, and from 5.24 it raises:
only a count of tokens to remove, zero or negative, is taken. On a hybrid model linear-attention layers raise, and
after `activate_past_recording()` they go on without an error while the rejected tokens stay in their state, so the
text is silently wrong. `crop_cache(cache, length)` of `ddaudit.runtime` keeps the first `length` tokens on every
layer kind and release.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.auditor.values import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts import FileFacts
    from ddaudit.auditor.finding import Finding

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
    nodes = (ast.Call,)
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
        kept = _kept_length(length, file.text(receiver), file)
        if kept is None:
            yield self.report(file, node, cache, fix=_fix(node, receiver, file.text(length), file))
        elif not _is_guarded(node, file) and not _is_drafters(file, receiver):
            fix = _fix(node, receiver, kept, file)
            yield self.report(file, node, cache, fix=fix, severity=Severity.SILENT, message=NEGATIVE)


def _kept_length(length: ast.expr, cache: str, file: FileFacts) -> str | None:
    """The length that a count of tokens to remove leaves; None where the argument is a length itself."""
    match length:
        case ast.UnaryOp(op=ast.USub(), operand=count):
            return f"{cache}.get_seq_length() - {_atom(count, file)}"
        case ast.BinOp(left=kept, op=ast.Sub(), right=ast.Call(func=ast.Attribute(attr="get_seq_length"))):
            return file.text(kept)
    return None


def _atom(expr: ast.expr, file: FileFacts) -> str:
    text = file.text(expr)
    return f"({text})" if isinstance(expr, ast.BinOp | ast.IfExp | ast.BoolOp | ast.Compare) else text


def _is_guarded(node: ast.AST, file: FileFacts) -> bool:
    return any(isinstance(above, ast.If) and "is_croppable" in ast.dump(above.test) for above in file.ancestors(node))


def _is_drafters(file: FileFacts, receiver: ast.expr) -> bool:
    """Whether only the repository's own full-attention modules are known to take the cache."""
    uses = [file.cache_use(value) for value in file.values(receiver) if value.kind is Kind.CACHE]
    return any(use.owners for use in uses) and not any(use.models for use in uses)


def _fix(node: ast.AST, receiver: ast.expr, length: str, file: FileFacts) -> Fix | str:
    for compaction in file.compactions:
        if compaction.crop is not None and compaction.crop is file.statement(node):
            return compaction.fix(file)
    if (runtime := file.runtime_call("crop_cache", node)) is None:
        return "the names `crop_cache` and `runtime` mean something else here"
    reason = "keeps the first tokens exactly, on every layer kind and release"
    edit = file.edit(node, f"{runtime[0]}({file.text(receiver)}, {length})")
    return Fix((edit,), Applicability.SAFE, reason, (runtime[1],))
