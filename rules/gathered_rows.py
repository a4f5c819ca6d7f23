"""Accepted rows of the keys and values moved to the front by hand.

`kept = past_key_values_data[..., indices, :]` followed by a copy into the window is how a tree round is committed on
storage of the repository's own. It moves keys and values of full-attention layers; recurrent layers have already
folded the rejected tokens into their state and cannot be cut so. `keep_in_cache(cache, past_length, indices)` of
`ddaudit.runtime` keeps the accepted nodes exactly on every layer kind.

On: every release; hybrid models, silently.
Seen: the commit of FasterDecoding/Medusa and its successors, read in the source.
Fix: none: the storage has to become a Transformers cache.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

STORAGE = re.compile(
    r"(^|_)(past_key_values?|past_kv|kv|kv_cache|k_cache|v_cache|key_cache|value_cache|pkv)(_data|_buffer)?$"
)


class GatheredRows(Rule):
    code = "DDA108"
    kind = "cache-crop"
    severity = Severity.SILENT
    message = (
        "gathering rows takes rejected tokens out of keys and values only, never out of a recurrent state; "
        "use `keep_in_cache(cache, past_length, indices)`"
    )
    nodes = (ast.Subscript, ast.Call)
    markers = ("past", "kv", "cache")
    EXAMPLES = (
        Good("""
            def row(past_key_values_data, start, stop):
                return past_key_values_data[..., start:stop, :]
        """),
        Good("""
            def pick(hidden, indices):
                return hidden[..., indices, :]
        """),
        Bad("""
            def commit(past_key_values_data, indices, start):
                kept = past_key_values_data[..., indices, :]
                window = past_key_values_data[..., start : start + kept.shape[-2], :]
                window.copy_(kept)
        """),
        Bad("""
            def commit(past_key_values, batch, indices, start, end):
                for layer in past_key_values:
                    for part in layer:
                        kept = part[batch, :, indices, :]
                        part[:, :, start:end, :].copy_(kept.permute(0, 2, 1, 3))
        """),
        Bad("""
            def commit(kv_cache, indices, start):
                kept = kv_cache.index_select(-2, indices)
                kv_cache[..., start : start + len(indices), :].copy_(kept)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Subscript(value=storage, slice=ast.Tuple(elts=keys), ctx=ast.Load()) if len(keys) > 1:
                # One index of rows, or one of the batch and one of rows.
                picks = [key for key in keys if not _is_slice(key)]
                if len(picks) not in (1, 2) or not isinstance(keys[-1], ast.Slice):
                    return
                if not all(_is_index_tensor(pick, node, file) for pick in picks):
                    return
            case ast.Call(func=ast.Attribute(value=storage, attr="index_select"), args=[_, _]):
                pass
            case _:
                return
        name = _name(storage, file)
        function = file.function(node)
        if STORAGE.search(name) and function is not None and _copies_back(function.node):
            fact = f"{file.source.path}:{file.lineno(node)}: `{name}` is named like keys and values"
            because = Value(Kind.CACHE, fact, Confidence.LIKELY, (fact,))
            reason = "the storage has to become a Transformers cache"
            yield self.report(file, node, because, fix=reason, claim=Claim(Ask.ROLLBACK))


def _name(storage: ast.expr, file: FileFacts, depth: int = 3) -> str:
    """Its last name, or, for a loop's variable, that of what the loop goes over."""
    name = file.text(storage).rpartition(".")[2]
    if STORAGE.search(name) or not isinstance(storage, ast.Name) or not depth:
        return name
    for above in file.ancestors(storage):
        match above:
            case ast.For(target=ast.Name(id=storage.id), iter=ast.Name() | ast.Attribute() as stores):
                return _name(stores, file, depth - 1)
    return name


def _is_slice(key: ast.expr) -> bool:
    return isinstance(key, ast.Slice) or (isinstance(key, ast.Constant) and key.value in (..., None))


def _is_index_tensor(key: ast.expr, node: ast.AST, file: FileFacts) -> bool:
    """Many rows, not one: a name that is no loop counter, or a call such as `indices.to(device)`."""
    if isinstance(key, ast.Call):
        return True
    if not isinstance(key, ast.Name):
        return False
    return not any(
        isinstance(above, ast.For) and any(isinstance(n, ast.Name) and n.id == key.id for n in ast.walk(above.target))
        for above in file.ancestors(node)
    )


def _copies_back(function: ast.AST) -> bool:
    return any(isinstance(item, ast.Attribute) and item.attr == "copy_" for item in ast.walk(function))
