"""What a cache is made of changed with Transformers 5, and hybrid models have layers without keys and values.

`key_cache`, `value_cache`, `seen_tokens`, `to_legacy_cache` and `from_legacy_cache` are gone; a cache is no tuple
any more, so `cache[0][0]` raises and `for k, v in cache` meets triples. States stand in `cache.layers`, and a
linear-attention layer there has no `keys`: ask `cache.get_seq_length()` for the length, and pass over layers for
which `cache.is_linear[i]` holds. Code under `hasattr(cache, "key_cache")` never runs on new releases and is fine.

On: Transformers 5 on every model; loops over `cache.layers` on hybrid models.
Seen: huggingface/peft#2821, xorbitsai/inference#5086, deepseek-ai/DeepSeek-Coder-V2#81, huggingface/trl#4248.
Fix: safe for the length that a field holds, unsafe for one read off a tensor; the rest depends on what the values are
  for.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.expressions import unpacks_pair
from ddaudit.auditor.facts.names import OLDEST
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Confidence, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

REMOVED = frozenset(
    {
        "key_cache", "value_cache", "seen_tokens", "_seen_tokens", "to_legacy_cache", "from_legacy_cache",
        "get_max_cache_shape", "get_usable_length",
    }
)  # fmt: skip
GONE_SINCE = {"to_legacy_cache": "5.0", "from_legacy_cache": "5.0", "get_max_cache_shape": "5.24"}
LAYERLESS = (
    "a linear-attention layer has no keys and values, so this raises on hybrid models; "
    "pass over layers that `cache.is_linear` marks"
)
TUPLE = "a cache is no tuple; use `get_seq_length()`, or `cache.layers[i]` where it has keys"
NO_LIMIT = (
    "a cache without a limit answers -1, never None, and a sliding one its window; only a static cache has a limit"
)
# What neither a legacy pair nor a layer of Transformers has, but a repository's own store.
OWN_PARTS = frozenset({"key", "value", "k", "v", "k_cache", "v_cache", "key_states", "value_states"})
REASON = "what replaces it depends on what the values are for"

PAIRS, KEYS = Claim(Ask.CACHE_PAIRS), Claim(Ask.LAYER_KEYS)


class CacheInternals(Rule):
    code = "DDA104"
    kind = "cache-internals"
    severity = Severity.ERROR
    message = "`{name}` of a cache is gone in Transformers 5: {remedy}"
    since = "5.0"
    nodes = (Named(ast.Attribute, REMOVED), ast.Subscript, ast.Assign, ast.For, ast.comprehension, ast.Compare)
    markers = ("past", "cache", "kv")
    EXAMPLES = (
        Good("""
            from transformers import Cache

            def cut(cache: Cache, length):
                if hasattr(cache, "layers"):
                    for layer in cache.layers:
                        if hasattr(layer, "keys"):
                            layer.keys = layer.keys[:, :, :length]
                    return
                cache.key_cache[0] = cache.key_cache[0][:, :, :length]
        """),
        Good("""
            from transformers import AutoModelForCausalLM

            def length(name, ids):
                model = AutoModelForCausalLM.from_pretrained(name)
                cache = model(ids).past_key_values
                return cache[0].key.shape[2]
        """),
        Good("""
            from transformers import Cache

            def cut(cache: Cache, length):
                keys = getattr(cache, "key_cache", None)
                if keys is not None:
                    cache.key_cache[0] = cache.key_cache[0][:, :, :length]
        """),
        Good("""
            from transformers import DynamicCache

            class Evicting(DynamicCache):
                def __init__(self):
                    super().__init__()
                    self.key_cache = []

                def __getitem__(self, i):
                    return self.key_cache[i]

                def first(self):
                    return self[0]
        """),
        Good("""
            from transformers import DynamicCache

            def length(cache: DynamicCache):
                return cache.get_seq_length()
        """),
        Good("""
            from transformers import DynamicCache

            def length(cache: DynamicCache):
                if hasattr(cache, "key_cache"):
                    return cache.key_cache[0].shape[-2]
                return cache.get_seq_length()
        """),
        Good("""
            from transformers import DynamicCache

            def norms(cache: DynamicCache):
                for i, layer in enumerate(cache.layers):
                    if cache.is_linear[i]:
                        continue
                    yield layer.keys.norm()
        """),
        Good("""
            from transformers import PreTrainedModel

            def embed(model: PreTrainedModel, ids, devices):
                emb_cache = [model.get_input_embeddings()(ids)]
                for i, device in enumerate(devices):
                    emb_cache[i][0] += emb_cache[i - 1][0].to(device)
                return emb_cache
        """),
        Bad(
            """
            from transformers import DynamicCache

            class Evicting(DynamicCache):
                def evict(self, i, end):
                    self.key_cache[i] = self.key_cache[i][:, :, :end]
        """,
            findings=2,
        ),
        Bad("""
            from transformers import DynamicCache

            def length(cache: DynamicCache):
                return cache.key_cache[0].shape[-2]
        """),
        Bad(
            """
            def length(past):
                return past[0][0].shape[2]
            """,
            """
            def length(past):
                return past.get_seq_length()
            """,
        ),
        Bad(
            """
            from transformers import DynamicCache

            def length(cache: DynamicCache):
                return cache.seen_tokens
            """,
            """
            from transformers import DynamicCache

            def length(cache: DynamicCache):
                return cache.get_seq_length()
            """,
        ),
        Bad("""
            def trim(past_key_values, length):
                return [(kv[0][:, :, :length], kv[1][:, :, :length]) for i, kv in enumerate(past_key_values)]
        """),
        Bad("""
            from transformers import DynamicCache

            def size(cache: DynamicCache):
                return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        for finding in self._decide(node, file):
            # A method of the repository's own module fills, as a rule, a cache of its own; a legacy one takes tuples.
            function = file.function(node)
            is_own = finding.confidence is not Confidence.PROVEN and (
                file.module_class(node) is not None or (function is not None and "legacy" in function.name)
            )
            is_own = is_own or _is_own_part(node, file) or _is_own_forward(node, file)
            if not is_own and not file.is_legacy_branch(node):
                yield finding

    def _decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=base) if (cache := file.holds(base, Kind.CACHE)) is not None:
                yield self.report(file, base, cache, fix=REASON, claim=PAIRS, name="k, v = cache", remedy=TUPLE)
            case ast.Attribute(value=base, attr=attr) if attr in REMOVED:
                cache = file.holds(base, Kind.CACHE)
                if cache is None and attr == "from_legacy_cache":
                    names = {name for name in file.qualified_names(base) if name.startswith("transformers.")}
                    cache = file.holds(base, Kind.LIBRARY) if names else None
                if cache is not None:
                    fix = _length(node, base, file) if attr in ("seen_tokens", "_seen_tokens") else REASON
                    claim = Claim(Ask.CACHE_NAME, attr)
                    since = GONE_SINCE.get(attr, OLDEST)
                    yield self.report(
                        file, node, cache, fix=fix, claim=claim, name=attr, remedy=_remedy(attr), since=since
                    )
            case ast.Subscript(value=base, slice=key) if (cache := file.holds(base, Kind.CACHE)) is not None:
                if isinstance(key, ast.JoinedStr) or isinstance(file.constant(key), str):
                    return
                above = file.parent(node)
                if isinstance(above, ast.Attribute) and above.attr in OWN_PARTS:
                    return
                length = _measured(node, file)
                fix = _length(length, base, file, Applicability.UNSAFE) if length is not None else REASON
                yield self.report(file, node, cache, fix=fix, claim=PAIRS, name="cache[i]", remedy=TUPLE)
            case ast.Subscript(value=base) if file.holds(base, Kind.CACHE_LAYERS) is not None:
                yield from self._one_layer(node, file)
            case ast.Compare(left=limit, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                yield from self._limit(node, limit, file)
            case ast.For(iter=iterable) | ast.comprehension(iter=iterable):
                yield from self._loop(node, iterable, file)

    def _limit(self, node: ast.Compare, limit: ast.expr, file: FileFacts) -> Iterator[Finding]:
        match file.made_from(limit):
            case ast.Call(func=ast.Attribute(value=base, attr="get_max_cache_shape" | "get_max_length")):
                if (cache := file.holds(base, Kind.CACHE)) is not None:
                    yield self.report(
                        file, node, cache, severity=Severity.SILENT, message=NO_LIMIT, fix=REASON, since=OLDEST
                    )

    def _one_layer(self, node: ast.Subscript, file: FileFacts) -> Iterator[Finding]:
        above = file.parent(node)
        cache = file.holds(node, Kind.CACHE_LAYER)
        reads = isinstance(above, ast.Attribute) and above.attr in ("keys", "values")
        if cache and above and reads and not any(_asks_kind(holder, file) for holder in file.ancestors(node)):
            yield self.report(file, above, cache, fix=REASON, message=LAYERLESS, claim=KEYS, since="")

    def _loop(self, node: ast.AST, iterable: ast.expr, file: FileFacts) -> Iterator[Finding]:
        target = node.target if isinstance(node, ast.For | ast.comprehension) else None
        inner, each = iterable, target
        match iterable, target:
            case ast.Call(func=ast.Name(id="enumerate"), args=[counted, *_]), ast.Tuple(elts=[_, named]):
                inner, each = counted, named
        cache = file.holds(inner, Kind.CACHE)
        if cache is not None and unpacks_pair(each, node, file.file):
            remedy = "iterating it gives triples, and nothing for linear layers; go through `cache.layers`"
            yield self.report(file, iterable, cache, fix=REASON, claim=PAIRS, name="for k, v in cache", remedy=remedy)
            return
        layers = file.holds(iterable, Kind.CACHE_LAYERS)
        if layers is None and isinstance(iterable, ast.Call) and iterable.args:
            layers = file.holds(iterable.args[-1], Kind.CACHE_LAYERS)
        if layers is None or any(compaction.loop is node for compaction in file.compactions):
            return
        body = node if isinstance(node, ast.For) else file.parent(node)
        assert body is not None
        inside = list(ast.walk(body))
        reads = any(
            isinstance(item, ast.Attribute)
            and item.attr in ("keys", "values")
            and file.holds(item.value, Kind.CACHE_LAYER)
            for item in inside
        )
        if reads and not any(_asks_kind(item, file) for item in inside):
            yield self.report(file, iterable, layers, fix=REASON, message=LAYERLESS, claim=KEYS, since="")


def _is_own_part(node: ast.AST, file: FileFacts) -> bool:
    """Of `self` in a cache of the repository: what it sets, or what it has a method for."""
    match node:
        case ast.Attribute(value=ast.Name(), attr=attr):
            return file.is_set_by_own_class(node) or file.defines(node.value, attr)
        case ast.Subscript(value=ast.Name() as base):
            return file.defines(base, "__getitem__")
        case ast.For(iter=ast.Name() as base) | ast.comprehension(iter=ast.Name() as base):
            return file.defines(base, "__iter__")
    return False


def _is_own_forward(node: ast.AST, file: FileFacts) -> bool:
    """In the forward of the repository's own module, which fills its own cache."""
    function = file.function(node)
    return function is not None and function.name == "forward" and file.module_class(node) is not None


def _asks_kind(node: ast.AST, file: FileFacts) -> bool:
    """A test of what a layer is, or whether it has keys."""
    if not isinstance(node, ast.If | ast.IfExp | ast.comprehension):
        return False
    tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
    words = ("is_linear", "hasattr", "isinstance", "getattr", "layer_types", "is_initialized")
    return any(word in file.text(test) for test in tests for word in words)


def _measured(first: ast.Subscript, file: FileFacts) -> ast.AST | None:
    """`cache[0][0].shape[2]`, of which `first` is `cache[0]`: the keys' length, which is the cache's."""
    second = file.parent(first)
    shape = file.parent(second) if second is not None else None
    length = file.parent(shape) if shape is not None else None
    match second, shape, length:
        case (
            ast.Subscript(slice=ast.Constant(value=0)),
            ast.Attribute(attr="shape"),
            ast.Subscript(slice=ast.Constant(value=2) | ast.UnaryOp(operand=ast.Constant(value=2))),
        ):
            return length if file.constant(first.slice) == 0 else None
    return None


def _length(
    node: ast.AST, cache: ast.expr, file: FileFacts, applicability: Applicability = Applicability.SAFE
) -> Fix | str:
    if not file.is_read(node):
        return "the length is assigned to"
    reason = "the number of tokens that the cache has taken"
    return Fix((file.edit(node, f"{file.text(cache)}.get_seq_length()"),), applicability, reason)


def _remedy(attr: str) -> str:
    return {
        "seen_tokens": "use `get_seq_length()`",
        "_seen_tokens": "use `get_seq_length()`",
        "get_usable_length": "use `get_seq_length()`",
        "to_legacy_cache": "copy the cache object itself instead",
        "from_legacy_cache": "copy the cache object itself instead",
        "get_max_cache_shape": "only a static cache has a limit, `get_max_length()`",
    }.get(attr, "states stand in `cache.layers`, and linear layers have no keys")
