"""What an expression of the repository can hold, from what its parts hold."""

from __future__ import annotations

import ast
import builtins
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.scopes import Class, File, Function, Scope
from ddaudit.auditor.facts.values import Kind, Value, fact_at, made, place, replace
from ddaudit.auditor.finding import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddaudit.auditor.facts.flow import Flow

BUILTINS = frozenset(dir(builtins))
# Nothing is known of what these are made of.
BARE = frozenset({Kind.OTHER, Kind.TENSOR, Kind.FUNCTION, Kind.METHOD})
MAX_DEPTH = 60
MAX_DOTS = 8
# Expressions of other types hold nothing that facts are about.
HOLDING = frozenset(
    {
        ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Await, ast.Starred,
        ast.BinOp, ast.UnaryOp,
    }
)  # fmt: skip


def evaluate(flow: Flow, expr: ast.expr, scope: Scope, depth: int = 0) -> list[Value]:
    if depth > MAX_DEPTH:
        return []
    depth += 1
    # What most expressions are, before patterns, which take several times longer.
    if isinstance(expr, ast.Name):
        return _name(flow, expr.id, scope)
    if isinstance(expr, ast.Attribute):
        return accessed(flow, expr, evaluate(flow, expr.value, scope, depth), scope)
    if isinstance(expr, ast.Call):
        return flow.read(("call", expr, None))
    if type(expr) not in HOLDING:
        return []
    match expr:
        case ast.Subscript(value=base, slice=key):
            return _subscript(flow, base, key, scope, expr, depth)
        case ast.IfExp(body=left, orelse=right):
            return evaluate(flow, left, scope, depth) + evaluate(flow, right, scope, depth)
        case ast.BoolOp(values=operands):
            return [value for operand in operands for value in evaluate(flow, operand, scope, depth)]
        case ast.NamedExpr(value=inner) | ast.Await(value=inner) | ast.Starred(value=inner):
            return evaluate(flow, inner, scope, depth)
        case ast.BinOp(left=left, right=right):
            both = evaluate(flow, left, scope, depth) + evaluate(flow, right, scope, depth)
            return [value for value in both if value.kind is Kind.TREE_MASK]
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return [value for value in evaluate(flow, inner, scope, depth) if value.kind is Kind.TREE_MASK]
    return []


def accessed(flow: Flow, expr: ast.Attribute, held: list[Value], scope: Scope) -> list[Value]:
    """What an attribute holds, `held` being what it is taken from."""
    base, attr = expr.value, expr.attr
    if not held and attr == "past_key_values" and _is_named_output(base):
        fact = fact_at(expr, scope.file, f"`{ast.unparse(base)}` is named like a model's output")
        return [Value(Kind.CACHE, place(expr, scope.file), Confidence.LIKELY, (fact,))]
    return [found for value in held for found in attribute(flow, value, attr)]


def _is_named_output(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and library.OUTPUT_NAMES.match(base.id) is not None


def _name(flow: Flow, name: str, scope: Scope) -> list[Value]:
    home = scope.find(name)
    if home is not None:
        held = flow.read(("name", home, name))
        if len(home.names[name]) == 1:
            return held
        return [
            replace(value, confidence=Confidence.LIKELY)
            if value.kind is Kind.LIBRARY and flow.has_rival(name, home, value.origin.partition(".")[0])
            else value
            for value in held
        ]
    found = []
    for module, level in scope.file.stars:
        if (file := flow.modules.resolve(module, level, scope.file)) is not None:
            found += flow.read(("name", file.scope, name))
        elif not level and name not in BUILTINS and module.partition(".")[0] == "transformers":
            found.append(Value(Kind.LIBRARY, f"{module}.{name}"))
    return found


def attribute(flow: Flow, value: Value, attr: str) -> list[Value]:
    """What `attr` of one value holds."""
    if value.kind in BARE:
        return []
    match value.kind:
        case Kind.LIBRARY:
            if value.origin.count(".") < MAX_DOTS:
                return [replace(value, origin=f"{value.origin}.{attr}")]
        case Kind.MODULE:
            file = flow.definitions[value.origin]
            assert isinstance(file, File)
            return _member(flow, file, attr)
        case Kind.OWN | Kind.OWN_CLASS:
            return _own_attribute(flow, value, attr)
        case Kind.MODEL | Kind.BACKBONE | Kind.DECODER:
            return _model_attribute(value, attr)
        case Kind.LAYER if attr in library.ATTENTION_NAMES:
            return [replace(value, kind=Kind.ATTENTION)]
        case Kind.LAYER if attr == "output":
            # What a tracer such as nnsight gives for it.
            return [replace(value, kind=Kind.LAYER_OUTPUT)]
        case Kind.COMPILED if attr == "_orig_mod":
            return [replace(value, kind=Kind.MODEL)]
        case Kind.EMBEDDING if attr == "weight":
            return [replace(value, kind=Kind.EMBEDDING_WEIGHT)]
        case Kind.EMBEDDING_WEIGHT if attr in ("T", "mT"):
            return [value]
        case Kind.CONFIG if attr in ("text_config", "llm_config"):
            return [replace(value, kind=Kind.TEXT_CONFIG)]
        case Kind.OUTPUT:
            kinds = {
                "hidden_states": Kind.HIDDEN_STATES, "attentions": Kind.ATTENTIONS, "logits": Kind.TENSOR,
                "past_key_values": Kind.CACHE, "cache": Kind.CACHE, "last_hidden_state": Kind.TENSOR,
            }  # fmt: skip
            if attr in kinds:
                return [replace(value, kind=kinds[attr])]
        case Kind.CACHE if attr == "layers":
            return [replace(value, kind=Kind.CACHE_LAYERS)]
        case Kind.CACHE if attr in ("self_attention_cache", "cross_attention_cache"):
            return [value]
    return []


def _model_attribute(value: Value, attr: str) -> list[Value]:
    kind: Kind | None = None
    if attr in library.WRAPPER_NAMES:
        kind = value.kind
    elif attr == "base_model":
        # Below a head it is the backbone; on a PEFT wrapper its `model` is the model again.
        kind = Kind.MODEL
    elif attr == "config":
        kind = Kind.TEXT_CONFIG if value.kind is Kind.DECODER else Kind.CONFIG
    elif attr in library.INNER_NAMES:
        kind = Kind.BACKBONE
    elif attr in library.HEAD_NAMES:
        kind = Kind.HEAD
    elif attr in library.EMBEDDING_NAMES:
        kind = Kind.EMBEDDING
    elif attr in library.LAYERS_NAMES:
        kind = Kind.LAYERS
    elif attr in library.NORM_NAMES:
        kind = Kind.NORM
    return [replace(value, kind=kind)] if kind else []


def _own_attribute(flow: Flow, value: Value, attr: str) -> list[Value]:
    owner = flow.definitions[value.origin]
    assert isinstance(owner, Class)
    if (method := flow.method(owner, attr)) is not None:
        if "property" in method.decorators or "cached_property" in method.decorators:
            return flow.read(("return", method, None))
        bound = value.kind is Kind.OWN or "classmethod" in method.decorators
        kind = Kind.METHOD if bound and method.takes_self else Kind.FUNCTION
        methods = [method, *flow.overrides(owner, attr)] if method.is_abstract else [method]
        return [flow.defined(kind, item, item.node, item.scope.file) for item in methods]
    found = flow.read(("attribute", owner, attr))
    for base in flow.bases(owner):
        if isinstance(base, Class):
            found += flow.read(("attribute", base, attr))
    if not found and attr in library.WRAPPER_NAMES:
        return [value]
    return found


def _subscript(flow: Flow, base: ast.expr, key: ast.expr, scope: Scope, node: ast.expr, depth: int) -> list[Value]:
    keys = key.elts if isinstance(key, ast.Tuple) else [key]
    num_new = sum(isinstance(item, ast.Constant) and item.value is None for item in keys)
    if num_new >= 2:
        fact = f"`{ast.unparse(node)[:60]}` adds {num_new} dimensions"
        return [made(Kind.TREE_MASK, node, scope.file, fact)]
    found = []
    for value in evaluate(flow, base, scope, depth):
        element = {
            Kind.LAYERS: Kind.LAYER, Kind.HIDDEN_STATES: Kind.TENSOR, Kind.CACHE_LAYERS: Kind.CACHE_LAYER,
            Kind.ATTENTIONS: Kind.TENSOR,
        }.get(value.kind)  # fmt: skip
        if value.kind is Kind.HIDDEN_STATES and _cuts_last(key):
            continue
        if element is not None:
            found.append(value if isinstance(key, ast.Slice) else replace(value, kind=element))
        elif value.kind is Kind.OUTPUT and isinstance(key, ast.Constant) and isinstance(key.value, str):
            found += attribute(flow, value, key.value)
        elif value.kind is Kind.TREE_MASK and all(isinstance(item, ast.Slice) for item in keys):
            found.append(value)
    return found


def item(flow: Flow, expr: ast.expr, i: int, scope: Scope) -> list[Value]:
    """Element `i` of what `expr` holds."""
    match expr:
        case ast.Tuple(elts=elements) | ast.List(elts=elements) if i < len(elements):
            return evaluate(flow, elements[i], scope)
        case ast.Call():
            found = []
            for value in evaluate(flow, expr.func, scope):
                target = flow.definitions.get(value.origin)
                if value.kind in (Kind.FUNCTION, Kind.METHOD) and isinstance(target, Function):
                    found += flow.read(("return", target, i))
                elif value.kind is Kind.OWN and isinstance(target, Class):
                    forward = flow.method(target, "forward") or flow.method(target, "__call__")
                    found += flow.read(("return", forward, i)) if forward else []
            return found
        case ast.IfExp(body=left, orelse=right):
            return item(flow, left, i, scope) + item(flow, right, i, scope)
    return _elements(evaluate(flow, expr, scope))


def _cuts_last(key: ast.expr) -> bool:
    """`[:-1]`: without the last entry, which alone is taken after the final norm, they are like any list."""
    match key:
        case ast.Slice(upper=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1))):
            return True
    return False


def unpacks_pair(each: ast.expr | None, loop: ast.AST, file: File) -> bool:
    """Whether a loop takes each thing for a pair: `for k, v in …`, `k, v = each`, `each[0]`."""
    if isinstance(each, ast.Tuple):
        return True
    body = loop if isinstance(loop, ast.For) else file.parent(loop)
    if not isinstance(each, ast.Name) or body is None:
        return False
    for part in ast.walk(body):
        match part:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0 | 1)) if name == each.id:
                return True
            case ast.Assign(targets=[ast.Tuple(elts=[_, _])], value=ast.Name(id=name)) if name == each.id:
                return True
    return False


def iterate(flow: Flow, expr: ast.expr, scope: Scope) -> list[Value]:
    match expr:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [value for element in elements for value in evaluate(flow, element, scope)]
        case ast.Call(func=ast.Name(id="reversed" | "list" | "tuple" | "sorted" | "tqdm"), args=[inner, *_]):
            return iterate(flow, inner, scope)
    return _elements(evaluate(flow, expr, scope))


def iterate_item(flow: Flow, expr: ast.expr, i: int, scope: Scope) -> list[Value]:
    match expr:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]) if i == 1:
            return iterate(flow, inner, scope)
        case ast.Call(func=ast.Name(id="zip"), args=inners) if i < len(inners):
            return iterate(flow, inners[i], scope)
    return []


def _elements(values: Iterable[Value]) -> list[Value]:
    element = {
        Kind.LAYERS: Kind.LAYER, Kind.HIDDEN_STATES: Kind.TENSOR, Kind.CACHE_LAYERS: Kind.CACHE_LAYER,
        Kind.OTHER: Kind.OTHER,
    }  # fmt: skip
    return [replace(value, kind=element[value.kind]) for value in values if value.kind in element]


def imported(flow: Flow, module: str, name: str, level: int, importer: File) -> list[Value]:
    """What an import binds: a file of the repository, a name in one, or a name of another package."""
    file = flow.modules.resolve(module, level, importer)
    if not name:
        return [_module(flow, file)] if file else [Value(Kind.LIBRARY, module)]
    inner = flow.modules.resolve(".".join(filter(None, (module, name))), level, importer)
    if file is not None and name in file.scope.names and file is not importer:
        return flow.read(("name", file.scope, name))
    if inner is not None:
        return [_module(flow, inner)]
    if file is not None and file is not importer:
        return _member(flow, file, name)
    return [Value(Kind.LIBRARY, f"{module}.{name}")] if not level else []


def _member(flow: Flow, file: File, name: str) -> list[Value]:
    found = flow.read(("name", file.scope, name)) or _name(flow, name, file.scope)
    inner = None if found else flow.modules.below(file, name)
    return [_module(flow, inner)] if inner else found


def _module(flow: Flow, file: File) -> Value:
    flow.definitions[file.source.path] = file
    return Value(Kind.MODULE, file.source.path)
