"""What happens to each cache anywhere in a repository: who takes it, and whether it has to go back."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.compaction import find_moves
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value

if TYPE_CHECKING:
    from ddaudit.auditor.facts.flow import Flow
    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.scopes import File, Scope

STORED = Named(ast.Attribute, frozenset({"keys", "values"}))
CROPS = Named(ast.Attribute, frozenset({"crop"}))
GOING_BACK = frozenset({"ddaudit.runtime.crop_cache", "ddaudit.runtime.keep_in_cache"})


@dataclass(frozen=True)
class Use:
    """A call that takes a cache."""

    call: ast.Call
    callee: ast.expr
    scope: Scope
    by: Value
    """What is called: the model, or the repository's own module."""


@dataclass
class CacheUse:
    """What happens to one cache anywhere in the repository."""

    models: list[Use] = field(default_factory=list)
    """Calls of Transformers models that take it."""
    owners: list[Use] = field(default_factory=list)
    """Calls of the repository's own modules that take it."""
    goes_back: bool = False
    """It is cropped or compacted somewhere."""
    is_moved_by_hand: bool = False
    """Keys or values of its layers are moved, other than by a compaction that is understood."""
    is_tree_masked: bool = False
    """A model verifies with it under a mask of four dimensions."""
    outputs: set[str] = field(default_factory=set)
    """Origins of what the models that took it returned: the cache read off an output is this one."""


def cache_uses(flow: Flow) -> dict[str, CacheUse]:
    """Uses of each cache, by the origin of its value."""
    uses: dict[str, CacheUse] = defaultdict(CacheUse)
    for file in flow.files.values():
        with flow.reading(file):
            _note_file(file, flow, uses)
    for use in list(uses.values()):
        use.goes_back |= any(uses[output].goes_back for output in use.outputs if output in uses)
    return uses


def _note_file(file: File, flow: Flow, uses: dict[str, CacheUse]) -> None:
    for node in file.of(CROPS):
        # Called there or later: `back = cache.crop`.
        assert isinstance(node, ast.Attribute)
        for use in _caches(node.value, file.scope_of(node), flow, uses):
            use.goes_back = True
    # Whatever they are called here: `from ddaudit.runtime import crop_cache as crop`.
    for call in file.calls if "ddaudit" in flow.packages else ():
        _note_going_back(call, file.scope_of(call), flow, uses)
    for call in file.calls_giving(*library.CACHE_KEYWORDS):
        _note_call(call, file.scope_of(call), flow, uses)
    for node in file.of(STORED):
        # `layer.keys[...] = …` and `layer.keys = …`
        assert isinstance(node, ast.Attribute)
        above = file.parent(node)
        stored = above if isinstance(above, ast.Subscript) and above.value is node else node
        if isinstance(stored.ctx, ast.Store):
            for value in flow.values(node.value, file.scope_of(node)):
                if value.kind is Kind.CACHE_LAYER:
                    uses[value.origin].goes_back = True


def note_moves(views: list[FileFacts], uses: dict[str, CacheUse]) -> None:
    """Mark the caches whose rows are moved outside a compaction that is understood."""
    for file in views:
        with file.facts.flow.reading(file.file):
            understood = {move for compaction in file.compactions if compaction.arguments for move in compaction.moves}
            for move in find_moves(file.file.of(STORED), file):
                for value in file.values(move.value) if move not in understood else ():
                    if value.kind is Kind.CACHE_LAYER:
                        uses[value.origin].is_moved_by_hand = True


def _caches(expr: ast.expr, scope: Scope, flow: Flow, uses: dict[str, CacheUse]) -> list[CacheUse]:
    return [uses[value.origin] for value in flow.values(expr, scope) if value.kind is Kind.CACHE]


def _note_going_back(call: ast.Call, scope: Scope, flow: Flow, uses: dict[str, CacheUse]) -> None:
    match call:
        case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[first, _, *_]):
            if any(value.kind is Kind.LIBRARY and value.origin in GOING_BACK for value in flow.values(function, scope)):
                for use in _caches(first, scope, flow, uses):
                    use.goes_back = True


def _note_call(call: ast.Call, scope: Scope, flow: Flow, uses: dict[str, CacheUse]) -> None:
    callee = call.func
    if isinstance(callee, ast.Attribute) and callee.attr == "forward":
        callee = callee.value
    masked = any(
        keyword.arg == "attention_mask"
        and any(value.kind is Kind.TREE_MASK for value in flow.values(keyword.value, scope))
        for keyword in call.keywords
    )
    model = next((v for v in flow.values(callee, scope) if v.kind in (Kind.MODEL, Kind.BACKBONE)), None)
    owner = next((v for v in flow.values(callee, scope) if v.kind is Kind.OWN), None)
    for keyword in call.keywords:
        if keyword.arg in library.CACHE_KEYWORDS:
            for use in _caches(keyword.value, scope, flow, uses):
                if owner is not None:
                    use.owners.append(Use(call, callee, scope, owner))
                elif model is not None:
                    use.models.append(Use(call, callee, scope, model))
                    use.outputs |= {value.origin for value in flow.values(call, scope) if value.kind is Kind.OUTPUT}
                    use.is_tree_masked |= masked
