"""Moving a cache's keys and values by hand keeps the accepted path in full-attention layers only.

After a tree round the accepted nodes' rows are gathered to the front of the window and the rest is cropped away. A
recurrent layer has no rows: its state has folded every node in, rejected branches and siblings too, and stays wrong
without an error. `keep_in_cache(cache, past_length, indices)` of `ddaudit.runtime` keeps the accepted nodes of the
last window, exactly, on every layer kind.

On: every release; hybrid models, silently.
Seen: liranringel/ddtree; on a tiny Qwen3.5, 15 of 15 runs differed from greedy decoding with this left in (measured).
Fix: safe where loop, rows and crop are understood as one compaction; otherwise none.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class HandCompaction(Rule):
    code = "DDA103"
    kind = "cache-internals"
    severity = Severity.SILENT
    message = (
        "keys and values are moved by hand, so recurrent layers keep the rejected tokens in their state; "
        "use `keep_in_cache(cache, past_length, indices)`"
    )
    nodes = (ast.For,)
    markers = (".layers",)
    EXAMPLES = (
        Good("""
            from ddaudit.runtime import keep_in_cache
            from transformers import DynamicCache

            def keep(cache: DynamicCache, past, path):
                keep_in_cache(cache, past, path)
        """),
        Good("""
            from transformers import DynamicCache

            def sizes(cache: DynamicCache):
                for layer in cache.layers:
                    print(type(layer))
        """),
        Bad(
            """
            from transformers import DynamicCache

            def keep(cache: DynamicCache, past, path):
                for layer in cache.layers:
                    rows = path + past
                    layer.keys[:, :, past : past + len(path)] = layer.keys[:, :, rows]
                    layer.values[:, :, past : past + len(path)] = layer.values[:, :, rows]
                cache.crop(past + len(path))
            """,
            """
            from transformers import DynamicCache
            from ddaudit.runtime import keep_in_cache

            def keep(cache: DynamicCache, past, path):
                keep_in_cache(cache, past, path)
            """,
            findings=3,
        ),
        Bad(
            """
            from transformers import DynamicCache

            def keep(cache: DynamicCache, rows):
                for layer in cache.layers:
                    layer.keys = layer.keys[:, :, rows]
                    layer.values = layer.values[:, :, rows]
                cache.crop(len(rows))
            """,
            findings=3,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        for compaction in file.compactions:
            if compaction.loop is node:
                fix = compaction.fix(file)
                for place in (compaction.loop.iter, *compaction.moves):
                    yield self.report(file, place, compaction.cache, fix=fix, claim=Claim(Ask.ROLLBACK))
