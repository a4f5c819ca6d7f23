"""The fix that rules about target caches share: a cache that can go back, where nothing forbids it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddaudit.auditor.finding import Applicability, Fix

if TYPE_CHECKING:
    import ast

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value


def make_cache_fix(call: ast.Call, cache: Value, model: str, file: FileFacts) -> Fix | str:
    """Make the cache with `make_cache(model)` instead of `call`, or why that cannot be done."""
    if file.cache_use(cache).is_moved_by_hand:
        # A cache that goes back tokens at a time would go on, silently wrong, where a stock one raises.
        return "rows of this cache are moved by hand in a way that is not understood"
    if (runtime := file.runtime_call("make_cache", call)) is None:
        return "the names `make_cache` and `runtime` mean something else here"
    reason = "the same cache on full attention, and on every other layer kind one that can go back exactly"
    edit = file.edit(call, f"{runtime[0]}({model})")
    return Fix((edit,), Applicability.SAFE, reason, (runtime[1],))
