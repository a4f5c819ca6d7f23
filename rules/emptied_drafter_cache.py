"""A drafter's cache that is made anew each round.

A drafter such as DFlash reads the target's context features through keys and values that it keeps from round to
round. Made anew, or emptied, inside the decoding loop, its cache holds the last round's tokens only: every draft is
made almost without context, nothing fails, and the acceptance length falls towards one. Make the cache before the
loop, and cut it back to the accepted length after each round.

On: every release and target, silently.
Seen: seen in ports of z-lab/dflash, whose own loop keeps the cache.
Fix: none: where the cache has to live is for a person to say.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class EmptiedDrafterCache(Rule):
    code = "DDA303"
    kind = "emptied-drafter-cache"
    severity = Severity.SILENT
    message = "the drafter's cache is emptied each round, so it drafts without context; make it before the loop"
    nodes = (ast.While,)
    markers = ("Cache",)
    EXAMPLES = (
        Good("""
            from torch import nn
            from transformers import DynamicCache

            class Drafter(nn.Module):
                def forward(self, ids, past_key_values=None):
                    return ids

            def decode(drafter: Drafter, ids, limit):
                cache = DynamicCache()
                while ids.shape[1] < limit:
                    ids = drafter(ids, past_key_values=cache)
                return ids
        """),
        Good("""
            from torch import nn
            from transformers import DynamicCache

            class Drafter(nn.Module):
                def forward(self, ids, past_key_values=None):
                    return ids

            def decode(drafter: Drafter, prompts, limit):
                for ids in prompts:
                    cache = DynamicCache()
                    while ids.shape[1] < limit:
                        ids = drafter(ids, past_key_values=cache)
        """),
        Bad("""
            from torch import nn
            from transformers import DynamicCache

            class Drafter(nn.Module):
                def forward(self, ids, past_key_values=None):
                    return ids

            def decode(drafter: Drafter, ids, limit):
                while ids.shape[1] < limit:
                    cache = DynamicCache()
                    ids = drafter(ids, past_key_values=cache)
                return ids
        """),
        Bad("""
            from torch import nn
            from transformers import DynamicCache

            class Drafter(nn.Module):
                def forward(self, ids, past_key_values=None):
                    return ids

            def decode(drafter: Drafter, ids, limit):
                cache = DynamicCache()
                while ids.shape[1] < limit:
                    ids = drafter(ids, past_key_values=cache)
                    cache.reset()
                return ids
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.While)
        for statement in node.body:
            match statement:
                case ast.Assign(targets=[ast.Name()], value=ast.Call() as emptied):
                    cache = file.holds(emptied, Kind.CACHE)
                    made_here = cache is not None and cache.origin.startswith(f"{file.source.path}:{emptied.lineno}:")
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=held, attr="reset")) as emptied):
                    cache, made_here = file.holds(held, Kind.CACHE), True
                case _:
                    continue
            if cache is None or not made_here:
                continue
            use = file.cache_use(cache)
            inside = set(ast.walk(node))
            if not use.models and any(owner.call in inside for owner in use.owners):
                yield self.report(file, emptied, cache, fix="where the loop begins has to be seen")
