"""A stock cache that has the right layers still cannot take back what recurrent layers have seen.

`DynamicCache(config=model.config)` runs on a hybrid model, and that is where many ports stop. As soon as rejected
tokens have to go, by `crop` after a chain round or by compaction after a tree round, its linear-attention layers
either refuse or, after `activate_past_recording()`, go back in their convolution states alone: the text runs on and is
silently wrong. `make_cache(model)` of `ddaudit.runtime` makes a cache that can go back exactly.

On: every release; hybrid models, silently once past recording is on.
Seen: huggingface/transformers#47720; 15 of 15 speculative runs differed from greedy decoding so (measured).
Fix: safe: the same cache on full attention.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind, replace
from ddaudit.auditor.finding import Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._make_cache import make_cache_fix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.finding import Finding


class StockCacheRollback(Rule):
    code = "DDA106"
    kind = "stock-cache-rollback"
    severity = Severity.SILENT
    message = (
        "this cache is cut back or verifies a tree, and a stock cache never takes a token back out of a recurrent "
        "state; build it with `make_cache(model)`"
    )
    nodes = (ast.Call,)
    markers = ("DynamicCache",)
    EXAMPLES = (
        Good("""
            from transformers import DynamicCache, PreTrainedModel

            def prefill(model: PreTrainedModel, ids):
                cache = DynamicCache(config=model.config)
                return model(ids, cache=cache)
        """),
        Good("""
            from ddaudit.runtime import crop_cache
            from torch import nn
            from transformers import DynamicCache

            class Drafter(nn.Module):
                def forward(self, ids, past_key_values=None):
                    return ids

            def draft(drafter: Drafter, ids, start):
                cache = DynamicCache(config=drafter.config)
                drafter(ids, past_key_values=cache)
                crop_cache(cache, start)
        """),
        Bad(
            """
            from ddaudit.runtime import crop_cache
            from transformers import DynamicCache, PreTrainedModel

            def verify(target: PreTrainedModel, block, start):
                cache: DynamicCache = DynamicCache(config=target.config)
                out = target(block, cache=cache)
                crop_cache(cache, start)
                return out
            """,
            """
            from ddaudit.runtime import crop_cache, make_cache
            from transformers import DynamicCache, PreTrainedModel

            def verify(target: PreTrainedModel, block, start):
                cache: DynamicCache = make_cache(target)
                out = target(block, cache=cache)
                crop_cache(cache, start)
                return out
            """,
        ),
        Bad("""
            from ddaudit.runtime import crop_cache
            from transformers import DynamicCache, PreTrainedModel

            def verify(target: PreTrainedModel, block, start):
                cache = DynamicCache(config=target.config, offloading=True)
                out = target(block, cache=cache)
                crop_cache(cache, start)
                return out
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        made = file.holds(node, Kind.CACHE)
        if made is None:
            return
        names = {name.rpartition(".")[2] for name in file.qualified_names(node.func)}
        if "DynamicCache" not in names or not any(word.arg == "config" for word in node.keywords):
            return
        use = file.cache_use(made)
        if use.models and (use.goes_back or use.is_tree_masked):
            by = max((use.by for use in use.models), key=lambda value: value.rank)
            weakest = min(made, by, key=lambda value: value.rank).confidence
            because = replace(made, confidence=weakest, evidence=made.evidence + by.evidence)
            yield self.report(file, node, because, fix=_fix(node, made, file), claim=Claim(Ask.ROLLBACK))


def _fix(call: ast.Call, cache: Value, file: FileFacts) -> Fix | str:
    model = file.model_for(cache, call)
    if model is None:
        return "no single name of the model has its value where the cache is made"
    given = [f"{word.arg}={file.text(word.value)}" for word in call.keywords]
    if call.args or given not in ([f"config={model}.config"], [f"config={model}.config.get_text_config()"]):
        return "the cache is made with other arguments"
    return make_cache_fix(call, cache, model, file)
