"""A tree mask reaches full-attention layers only.

Verifying a draft tree in one forward takes a mask with four dimensions, `[B, 1, T, P + T]`. Transformers gives a
linear-attention layer no such mask (`create_recurrent_attention_mask` returns None for anything that is not
two-dimensional), so siblings leak into each other through the recurrent state, without an error; sliding-window
layers get it in place of their own mask. On a small random Qwen3.5 a tree of 24 nodes had 4 argmaxes of 24 right.
A cache made by `make_cache(model)` reads the tree from the mask and verifies it exactly on every layer kind.

On: every release; hybrid models, and sliding-window layers of Gemma 3.
Seen: huggingface/transformers#29525, ml-explore/mlx-lm#1111; 4 of 24 argmaxes right on 5.24 (measured).
Fix: none of its own: a cache from `make_cache` makes the mask right, which DDA101 and DDA106 put in.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import CACHE_KEYWORDS
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import RANK, Kind
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.finding import Finding


class TreeMask(Rule):
    code = "DDA105"
    kind = "tree-mask"
    severity = Severity.SILENT
    message = (
        "a mask with four dimensions never reaches linear-attention layers, so branches leak into each other "
        "through their state; verify with a cache from `make_cache(model)`"
    )
    nodes = (Named(ast.keyword, frozenset({"attention_mask"})), ast.BinOp)
    markers = ("attention_mask", "_4d_")
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def score(model: PreTrainedModel, ids, padding):
                return model(ids, attention_mask=padding).logits
        """),
        Good("""
            from ddaudit.runtime import make_cache
            from transformers import PreTrainedModel

            def score(model: PreTrainedModel, ids, allowed):
                cache = make_cache(model)
                return model(ids, cache=cache, attention_mask=allowed[None, None]).logits
        """),
        Good("""
            from torch import nn

            class Drafter(nn.Module):
                def forward(self, ids, attention_mask):
                    return ids

            def score(drafter: Drafter, ids, allowed):
                return drafter(ids, attention_mask=allowed[None, None])
        """),
        Bad("""
            from transformers import PreTrainedModel

            def score(model: PreTrainedModel, ids, allowed, cache):
                return model(ids, cache=cache, attention_mask=allowed[None, None]).logits
        """),
        Bad("""
            import torch
            from transformers import PreTrainedModel

            def new_mask(count, length):
                return torch.zeros(1, 1, count, length)

            def score(model: PreTrainedModel, ids, cache, length):
                mask = new_mask(ids.shape[1], length)[:, :, :8]
                return model(ids, cache=cache, attention_mask=mask).logits
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        if isinstance(node, ast.BinOp):
            for side in (node.left, node.right):
                if (mask := _made_by_transformers(side, file)) is not None:
                    yield self.report(file, node, mask, fix="the mask is made by a function that is gone")
            return
        call = file.parent(node)
        if not isinstance(node, ast.keyword) or not isinstance(call, ast.Call):
            return
        given = {keyword.arg: keyword for keyword in call.keywords}
        model = file.holds(call.func, Kind.MODEL, Kind.BACKBONE, Kind.DECODER)
        if model is None or not file.is_stock(call.func):
            return
        mask = file.holds(node.value, Kind.TREE_MASK)
        caches = [
            value
            for name in CACHE_KEYWORDS
            if name in given
            for value in file.values(given[name].value)
            if value.kind is Kind.CACHE
        ]
        managed = [file.is_managed(cache) for cache in caches if file.cache_use(cache).models]
        if mask is None or (managed and any(managed)):
            return
        because = min(model, mask, key=lambda value: RANK[value.confidence])
        reason = "which branches there are is known to the code that builds the tree; the cache has to know them"
        yield self.report(file, node, because, fix=reason, claim=Claim(Ask.TREE_MASK))


def _made_by_transformers(side: ast.expr, file: FileFacts) -> Value | None:
    """A mask with four dimensions that a function of Transformers made."""
    match file.made_from(side):
        case ast.Call(func=function) if any(n.startswith("transformers.") for n in file.qualified_names(function)):
            return file.holds(side, Kind.TREE_MASK)
    return None
