"""What a call returns, and what an annotation promises; a call's arguments flow into the repository's own functions."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.expressions import BUILTINS, accessed, attribute, evaluate
from ddaudit.auditor.facts.patching import hook
from ddaudit.auditor.facts.scopes import Class, Function, Scope, Source
from ddaudit.auditor.facts.values import Kind, Value, fact_at, made, place, replace
from ddaudit.auditor.finding import Confidence

if TYPE_CHECKING:
    from ddaudit.auditor.facts.flow import Flow


# Builtins that make nothing of what they are given.
PLAIN = BUILTINS - {"getattr", "list", "tuple"}


def call_result(flow: Flow, call: ast.Call, scope: Scope) -> list[Value]:
    found: list[Value] = []
    called: list[Value] = []
    name = call.func.id if isinstance(call.func, ast.Name) and not scope.file.stars else ""
    if name in PLAIN and scope.find(name) is None:
        return found
    match call.func:
        case ast.Name(id="getattr") if len(call.args) >= 2 and scope.find("getattr") is None:
            match call.args[1]:
                case ast.Constant(value=str(attr)):
                    found = [
                        item for value in evaluate(flow, call.args[0], scope) for item in attribute(flow, value, attr)
                    ]
            return found + [value for extra in call.args[2:] for value in evaluate(flow, extra, scope)]
        case ast.Attribute(value=base, attr=attr) as function:
            held = evaluate(flow, base, scope)
            for value in held:
                found += _method_call(flow, value, attr, call, scope)
            if attr == "unsqueeze" and _is_unsqueeze(base):
                fact = "two dimensions are added by `unsqueeze`"
                found.append(made(Kind.TREE_MASK, call, scope.file, fact))
            if attr in ("unwrap_model", "prepare", "prepare_model") and call.args:
                found += evaluate(flow, call.args[0], scope)
            called = accessed(flow, function, held, scope)
        case ast.Name(id="list" | "tuple" as name) if call.args and scope.find(name) is None:
            kinds = (Kind.LAYERS, Kind.HIDDEN_STATES)
            found = [value for value in evaluate(flow, call.args[0], scope) if value.kind in kinds]
        case function:
            called = evaluate(flow, function, scope)
    hook(flow, call, scope)
    for value in called:
        found += _called(flow, value, call, scope)
    return found


def passes_on(call: ast.Call) -> bool:
    """Whether a call hands on what its own function was given, as in a module that is put around another."""
    unpacked = any(isinstance(arg, ast.Starred) for arg in call.args) or any(k.arg is None for k in call.keywords)
    return unpacked and not any(keyword.arg for keyword in call.keywords)


def _method_call(flow: Flow, value: Value, attr: str, call: ast.Call, scope: Scope) -> list[Value]:
    match value.kind:
        case Kind.MODEL | Kind.BACKBONE | Kind.DECODER | Kind.OWN if attr in library.CHAINABLE:
            return [value]
        case Kind.EMBEDDING_WEIGHT if attr in ("t", "transpose", "to", "float", "detach"):
            return [value]
        case Kind.MODEL | Kind.BACKBONE | Kind.DECODER:
            kind = {
                "get_decoder": Kind.DECODER, "get_base_model": Kind.MODEL, "forward": Kind.OUTPUT,
                "get_input_embeddings": Kind.EMBEDDING, "get_output_embeddings": Kind.HEAD,
            }.get(attr)  # fmt: skip
            if kind is Kind.OUTPUT:
                return [made(kind, call, scope.file, "the model's output", value)]
            return [replace(value, kind=kind)] if kind else []
        case Kind.CONFIG | Kind.TEXT_CONFIG if attr == "get_text_config":
            return [replace(value, kind=Kind.TEXT_CONFIG)]
        case Kind.TREE_MASK if attr in library.TENSOR_METHODS_KEEPING_SHAPE:
            return [value]
        case Kind.OWN_CLASS if attr in library.MAKERS:
            owner = flow.definitions[value.origin]
            if isinstance(owner, Class) and flow.method(owner, attr) is None:
                return instances(flow, value, owner)
    return []


def _called(flow: Flow, value: Value, call: ast.Call, scope: Scope) -> list[Value]:
    """What a call of this value returns; arguments flow into the repository's own functions."""
    target = flow.definitions.get(value.origin)
    match value.kind:
        case Kind.MODEL | Kind.BACKBONE | Kind.DECODER:
            return [made(Kind.OUTPUT, call, scope.file, "the model's output", value)]
        case Kind.LAYER:
            flow.layer_calls.add(call)
            if passes_on(call):
                return [made(Kind.LAYER_OUTPUT, call, scope.file, "the layer's output", value)]
        case Kind.FUNCTION | Kind.METHOD if isinstance(target, Function):
            _pass(flow, call, scope, target, skip=int(value.kind is Kind.METHOD))
            return flow.read(("return", target, None))
        case Kind.OWN_CLASS if isinstance(target, Class):
            if (init := flow.method(target, "__init__")) is not None:
                _pass(flow, call, scope, init, skip=1)
            else:
                for keyword in call.keywords:
                    if keyword.arg:
                        source = Source("value", scope, keyword.value)
                        flow.add_source(("attribute", target, keyword.arg), source)
            return instances(flow, value, target)
        case Kind.OWN if isinstance(target, Class):
            forward = flow.method(target, "forward") or flow.method(target, "__call__")
            if forward is not None:
                _pass(flow, call, scope, forward, skip=1)
                return flow.read(("return", forward, None))
        case Kind.LIBRARY:
            return [_no_surer(result, value) for result in _library_call(flow, value.origin, call, scope)]
    return []


def instances(flow: Flow, value: Value, owner: Class) -> list[Value]:
    made = [replace(value, kind=Kind.OWN)]
    name = owner.node.name
    if library.is_language_model(name) and flow.is_of_transformers(owner):
        # Whoever holds one from outside walks into it as into the stock model that it copies.
        fact = fact_at(owner.node, owner.outer.file, f"`{name}` is a causal language model of the repository")
        made.append(Value(Kind.MODEL, value.origin, Confidence.LIKELY, (fact,)))
    init = next(iter(owner.methods.values()), None)
    return made + (flow.instance(init)[1:] if init is not None and init.takes_self else [])


def _pass(flow: Flow, call: ast.Call, scope: Scope, function: Function, skip: int) -> None:
    """Let the call's arguments flow into the function's parameters."""
    names = function.positional[skip:]
    for name, arg in zip(names, call.args, strict=False):
        if isinstance(arg, ast.Starred):
            break
        flow.add_source(("name", function.scope, name), Source("value", scope, arg))
    known = {*names, *(arg.arg for arg in function.node.args.kwonlyargs)}
    for keyword in call.keywords:
        if keyword.arg in known:
            flow.add_source(("name", function.scope, keyword.arg), Source("value", scope, keyword.value))


def _library_call(flow: Flow, name: str, call: ast.Call, scope: Scope) -> list[Value]:
    owner, _, last = name.rpartition(".")
    if name == "torch.compile":
        if not call.args:
            return []
        models = evaluate(flow, call.args[0], scope)
        return models + [replace(value, kind=Kind.COMPILED) for value in models if value.kind is Kind.MODEL]
    if name in library.TRANSPARENT_CALLS:
        position = 1 if name == "typing.cast" else 0
        return evaluate(flow, call.args[position], scope) if len(call.args) > position else []
    if library.FOUR_D_MASK_MAKERS.search(name):
        return [made(Kind.TREE_MASK, call, scope.file, f"`{last}` returns a mask with four dimensions")]
    if owner == "torch" and last in library.TENSOR_MAKERS and _num_dimensions(call, last) == 4:
        return [made(Kind.TREE_MASK, call, scope.file, f"`{name}` makes four dimensions")]
    if name in ("torch.where", "torch.masked_fill"):
        return [v for arg in call.args for v in evaluate(flow, arg, scope) if v.kind is Kind.TREE_MASK]
    if name == "ddaudit.runtime.make_cache":
        flow.managed.add(place(call, scope.file))
        return [made(Kind.CACHE, call, scope.file, "`make_cache` makes a cache that can go back")]
    if name.startswith("ddaudit.runtime."):
        kind = {"decoder_layers": Kind.LAYERS, "final_norm": Kind.NORM, "text_config": Kind.TEXT_CONFIG}.get(last)
        return [made(kind, call, scope.file, f"`{last}` of the runtime")] if kind else []
    if kind := library.instance_kind(name):
        return [made(kind, call, scope.file, f"`{last}` makes a {kind.value}")]
    kind = Kind.CONFIG if library.FAMILY_CONFIG.match(owner) else library.instance_kind(owner)
    if kind is Kind.CACHE or (kind is not None and last in library.MAKERS):
        trusts_code = any(keyword.arg == "trust_remote_code" for keyword in call.keywords)
        if not (kind is Kind.BACKBONE and trusts_code):
            called = ".".join(name.split(".")[-2:])
            return [made(kind, call, scope.file, f"`{called}` returns a {kind.value}")]
    return [Value(Kind.OTHER, name)]


def annotated(flow: Flow, expr: ast.expr, scope: Scope, written: ast.expr, depth: int = 0) -> list[Value]:
    """What a parameter of this annotation holds; `written` is the annotation in the text."""
    if depth > 8:
        return []
    match expr:
        case ast.Constant(value=str(text)):
            try:
                return annotated(flow, ast.parse(text.strip(), mode="eval").body, scope, written, depth + 1)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return []
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return annotated(flow, left, scope, written, depth + 1) + annotated(flow, right, scope, written, depth + 1)
        case ast.Subscript(value=base, slice=inner):
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            if name in ("Optional", "Union", "Annotated", "Final", "ClassVar"):
                items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                items = items[:1] if name == "Annotated" else items
                return [value for item in items for value in annotated(flow, item, scope, written, depth + 1)]
            return []
    found = []
    for value in evaluate(flow, expr, scope):
        if value.kind is Kind.OWN_CLASS and isinstance(owner := flow.definitions[value.origin], Class):
            found += instances(flow, value, owner)
        elif value.kind is Kind.LIBRARY and (kind := library.instance_kind(value.origin)):
            last = value.origin.rpartition(".")[2]
            found.append(_no_surer(made(kind, written, scope.file, f"the annotation is `{last}`"), value))
    return found


def _no_surer(result: Value, by: Value) -> Value:
    """The value, no surer than the one that made it."""
    return result if result.rank <= by.rank else replace(result, confidence=by.confidence)


def _num_dimensions(call: ast.Call, maker: str) -> int:
    """Dimensions of a tensor maker's size argument; 0 where it is not written out."""
    sizes = call.args[:1] if maker == "full" else call.args
    if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
        sizes = sizes[0].elts
    return 0 if any(isinstance(size, ast.Starred) for size in sizes) else len(sizes)


def _is_unsqueeze(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze"
