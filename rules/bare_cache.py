"""A cache built without a configuration has one kind of layer.

`DynamicCache()` makes a full-attention layer for every index it meets. A hybrid model asks its cache for
linear-attention layers and raises IndexError in the first of them (Qwen3.5 and Qwen3-Next; QwenLM/Qwen3.8#37,
huggingface/transformers#44950); a sliding-window model keeps everything at full length. `DynamicCache(config=…)`
has the right layers. A cache that is later cut back, compacted or used to verify a tree must also be able to go
back, which no stock cache with recurrent layers can: `make_cache(model)` of `ddaudit.runtime` can.

A bare cache for the repository's own full-attention drafter is fine.

On: every release; hybrid models (Qwen3.5, Qwen3-Next, Jamba, LFM2), and Gemma 3 where memory counts.
Seen: QwenLM/Qwen3.8#37, huggingface/transformers#44950; raises on 5.24 (measured).
Fix: safe: on full attention `config=` gives the same layers. Not made where other arguments or an unknown model stand
  there.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, replace
from ddaudit.auditor.finding import Applicability, Confidence, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._make_cache import make_cache_fix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.finding import Finding

CLAIM = Claim(Ask.BARE_CACHE)
CROPPED = Named(ast.Attribute, frozenset({"crop"}))
LAYERS = Named(ast.Attribute, frozenset({"layers"}))
# The release from which `DynamicCache` takes a config.
WITH_CONFIG = "4.56"


class BareCache(Rule):
    code = "DDA101"
    kind = "bare-cache"
    severity = Severity.ERROR
    message = (
        "`{name}()` has no linear-attention layers: hybrid models raise in their first one; "
        "build it from the model's config, or with `make_cache(model)` where it must go back"
    )
    nodes = (ast.Call,)
    markers = ("DynamicCache",)
    EXAMPLES = (
        Good("""
            from transformers import DynamicCache

            def split(cache, low, high):
                part = DynamicCache()
                part.layers = list(cache.layers[low:high])
                return part
        """),
        Good("""
            from torch import nn
            from transformers import DynamicCache

            class Drafter(nn.Module):
                def forward(self, ids, past_key_values=None):
                    return ids

            def draft(drafter: Drafter, ids):
                cache = DynamicCache()
                return drafter(ids, past_key_values=cache)
        """),
        Good("""
            from transformers import DynamicCache, PreTrainedModel

            def prefill(model: PreTrainedModel, ids):
                cache = DynamicCache(config=model.config)
                return model(ids, cache=cache)
        """),
        Good("""
            from kvstore import DynamicCache

            cache = DynamicCache()
        """),
        Good("""
            from transformers import DynamicCache

            def build(DynamicCache):
                return DynamicCache()
        """),
        Bad(
            """
            from transformers import DynamicCache, PreTrainedModel

            def prefill(model: PreTrainedModel, ids):
                cache = DynamicCache()
                return model(ids, cache=cache)
            """,
            """
            from transformers import DynamicCache, PreTrainedModel

            def prefill(model: PreTrainedModel, ids):
                cache = DynamicCache(config=model.config)
                return model(ids, cache=cache)
            """,
        ),
        Bad(
            """
            from ddaudit.runtime import crop_cache
            from transformers import DynamicCache, PreTrainedModel

            def verify(target: PreTrainedModel, block, start):
                cache = DynamicCache()
                out = target(block, cache=cache)
                crop_cache(cache, start)
                return out
            """,
            """
            from ddaudit.runtime import crop_cache, make_cache
            from transformers import PreTrainedModel

            def verify(target: PreTrainedModel, block, start):
                cache = make_cache(target)
                out = target(block, cache=cache)
                crop_cache(cache, start)
                return out
            """,
        ),
        Bad(
            """
            from ddaudit.runtime import crop_cache
            from transformers import DynamicCache, PreTrainedModel

            def verify(target: PreTrainedModel, block, start):
                cache = DynamicCache()
                out = target(block, cache=cache)
                crop_cache(out.cache, start)
                return out
            """,
            """
            from ddaudit.runtime import crop_cache, make_cache
            from transformers import PreTrainedModel

            def verify(target: PreTrainedModel, block, start):
                cache = make_cache(target)
                out = target(block, cache=cache)
                crop_cache(out.cache, start)
                return out
            """,
        ),
        Bad(
            """
            from transformers import DynamicCache, PreTrainedModel

            def verify(target: PreTrainedModel, block, state):
                cache = DynamicCache()
                out = target(block, cache=cache)
                state["cache"] = cache
                state["cache"].crop(-1)
                return out
            """,
            """
            from transformers import PreTrainedModel
            from ddaudit.runtime import make_cache

            def verify(target: PreTrainedModel, block, state):
                cache = make_cache(target)
                out = target(block, cache=cache)
                state["cache"] = cache
                state["cache"].crop(-1)
                return out
            """,
        ),
        Bad("""
            from transformers import DynamicCache

            def new_cache():
                return DynamicCache(offloading=True)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        made = file.holds(node, Kind.CACHE)
        if made is None:
            return
        names = {name.rpartition(".")[2] for name in file.qualified_names(node.func)}
        if "DynamicCache" not in names or _has_layers(node, file) or file.is_legacy_branch(node):
            return
        use = file.cache_use(made)
        if use.models:
            by = max((use.by for use in use.models), key=lambda value: value.rank)
            weakest = min(made, by, key=lambda value: value.rank).confidence
            because = replace(made, confidence=weakest, evidence=made.evidence + by.evidence)
            yield self.report(file, node, because, fix=_fix(node, made, file), claim=CLAIM, name="DynamicCache")
        elif not use.owners:
            because = replace(made, confidence=Confidence.LIKELY)
            reason = "it is not clear which model the cache is for"
            yield self.report(file, node, because, fix=reason, claim=CLAIM, name="DynamicCache")


def _has_layers(call: ast.Call, file: FileFacts) -> bool:
    """Whether the cache is made with layers, or is given some where it is made."""
    match file.parent(call):
        case ast.Assign(targets=[ast.Name(id=name)]):
            home = file.scope(call)
            for target in file.file.of(LAYERS):
                match target:
                    case ast.Attribute(value=ast.Name(id=owner), ctx=ast.Store()) if owner == name:
                        if file.scope(target) is home:
                            return True
    return bool(call.args) or any(keyword.arg in (None, "config", "ddp_cache_data") for keyword in call.keywords)


def _fix(call: ast.Call, cache: Value, file: FileFacts) -> Fix | str:
    model = file.model_for(cache, call)
    if model is None:
        return "no single name of the model has its value where the cache is made"
    if call.keywords:
        return "the cache is made with other arguments"
    use = file.cache_use(cache)
    if not (use.goes_back or use.is_tree_masked or _crops_something(file)):
        edit = file.edit(call, f"{file.text(call.func)}(config={model}.config)")
        reason = "the config gives each layer the kind the model asks for; the same layers on full attention"
        return Fix((edit,), Applicability.SAFE, reason, since=WITH_CONFIG)
    return make_cache_fix(call, cache, model, file)


def _crops_something(file: FileFacts) -> bool:
    """Whether the file cuts back what nobody knows: it may be any cache."""
    return any(isinstance(node, ast.Attribute) and not file.values(node.value) for node in file.file.of(CROPPED))
