"""Functions that the repository puts in place of others' methods, or hooks onto a model, and what they are handed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.expressions import evaluate
from ddaudit.auditor.facts.names import attention_classes
from ddaudit.auditor.facts.scopes import Function, Scope
from ddaudit.auditor.facts.values import Kind, Value, fact_at
from ddaudit.auditor.finding import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddaudit.auditor.facts.flow import Flow


def install(flow: Flow, target: ast.Attribute, expr: ast.expr, scope: Scope) -> None:
    """`module.forward = function`: the function's `self` is the module."""
    classes = [value.origin for value in evaluate(flow, target.value, scope) if value.kind is Kind.LIBRARY]
    model = next((name for name in classes if name.startswith("transformers.") and library.is_model_class(name)), None)
    model = model or next((name for name in classes if library.instance_kind(name) is Kind.CACHE), None)
    if target.attr != "forward" and model is None:
        return
    for function in functions(flow, expr, scope):
        if function.owner is None and function.positional and model is not None:
            fact = fact_at(target, scope.file, f"`{target.attr}` of `{model}` is replaced")
            value = Value(library.instance_kind(model) or Kind.MODEL, model, Confidence.LIKELY, (fact,))
            if target.attr in ("forward", "prepare_inputs_for_generation") or target.attr.startswith("_"):
                flow.copies.add(function)
            flow.seed(("name", function.scope, function.positional[0]), value)
            continue
        if function.owner is None and function.positional:
            for value in patched(flow, target, scope, function):
                flow.seed(("name", function.scope, function.positional[0]), value)
                flow.patches.setdefault(function, value)


def functions(flow: Flow, expr: ast.expr, scope: Scope) -> Iterator[Function]:
    """The repository's functions that `expr` is, bound or not."""
    match expr:
        case ast.Call(func=func, args=[inner, *_]):
            if {value.origin for value in evaluate(flow, func, scope)} & {"types.MethodType", "functools.partial"}:
                yield from functions(flow, inner, scope)
                return
        case ast.Call(func=ast.Attribute(value=inner, attr="__get__")):
            yield from functions(flow, inner, scope)
            return
    for value in evaluate(flow, expr, scope):
        function = flow.definitions.get(value.origin)
        if value.kind in (Kind.FUNCTION, Kind.METHOD) and isinstance(function, Function):
            yield function


def patched(flow: Flow, target: ast.Attribute, scope: Scope, by: Function | None = None) -> list[Value]:
    """Whose method `target` is: an attention module or a layer, where need be by the test around it."""
    held = evaluate(flow, target.value, scope)
    found = [value for value in held if value.kind in (Kind.ATTENTION, Kind.LAYER)]
    classes = [value.origin for value in held if value.kind is Kind.LIBRARY]
    tests = [above.test for above in scope.file.above(target) if isinstance(above, ast.If)]
    parts = [part for test in tests for part in ast.walk(test)]
    for part in parts:
        match part:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, named]):
                items = named.elts if isinstance(named, ast.Tuple) else [named]
                classes += [value.origin for item in items for value in evaluate(flow, item, scope)]
    confidence = Confidence.PROVEN
    if not classes and not found and any(library.is_attention_name(part) for part in parts):
        modules = by.scope.file.modules if by is not None else scope.file.modules
        families = sorted(module for module in modules if library.MODELLING.match(module))
        classes = [name for module in families for name in attention_classes(module)]
        confidence = Confidence.LIKELY
    evidence = (fact_at(target, scope.file, "its forward is replaced"),)
    return found + [Value(Kind.ATTENTION, name, confidence, evidence) for name in _attention(classes)]


def _attention(classes: Iterable[str]) -> list[str]:
    return [name for name in classes if library.ATTENTION_CLASS.match(name)]


def hook(flow: Flow, call: ast.Call, scope: Scope) -> None:
    """A function hooked onto a decoder layer, or that edits what one returns, is handed the layer's output."""
    match call:
        case ast.Call(func=ast.Attribute(value=module, attr="register_forward_hook"), args=[given, *_]):
            position = 2
        case _:
            if not call.keywords:
                return
            edits = next((keyword.value for keyword in call.keywords if keyword.arg == "edit_output"), None)
            layer = next((k.value for k in call.keywords if k.arg in ("layer", "layers")), None)
            if edits is None or layer is None:
                return
            module, given, position = layer, edits, 0
    value = hooked_layer(flow, module, scope)
    for function in functions(flow, given, scope) if value else ():
        assert value is not None
        names = function.positional[int(function.takes_self) :]
        if len(names) > position:
            flow.seed(("name", function.scope, names[position]), value)


def hooked_layer(flow: Flow, module: ast.expr, scope: Scope) -> Value | None:
    """The output of the decoder layer that `module` is, or is written like."""
    held = evaluate(flow, module, scope)
    for value in held:
        if value.kind is Kind.LAYER:
            return Value(Kind.LAYER_OUTPUT, value.origin, value.confidence, value.evidence)
    if any(value.kind not in (Kind.OTHER, Kind.LIBRARY) for value in held):
        return None
    for part in module.elts if isinstance(module, ast.List | ast.Tuple) else [module]:
        if library.LAYER_TEXT.search(ast.unparse(part)):
            fact = fact_at(part, scope.file, f"`{ast.unparse(part)[:60]}` is written like a decoder layer")
            return Value(Kind.LAYER_OUTPUT, fact, Confidence.LIKELY, (fact,))
    return None
