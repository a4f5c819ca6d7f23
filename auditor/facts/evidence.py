"""Facts that no constructor or annotation states: how a name is used, and, last and least sure, what it is called."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.expressions import unpacks_pair
from ddaudit.auditor.facts.scopes import Class, File, Function, Named, Scope, Source, Variable
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.flow import Flow

Seed = tuple[Variable, Value]

# Their classes say nothing against a model.
NEUTRAL = frozenset({"transformers", "torch", "peft", "typing", "typing_extensions", "collections", "accelerate"})
PROJECTED = Named(ast.Attribute, library.PROJECTIONS)
FIELDS = Named(ast.Attribute, library.OUTPUT_FIELDS)
# First steps of paths below a model, and what a cache or a part of one is asked.
STEPS = Named(
    ast.Attribute, frozenset(path.partition(".")[0] for path in library.MODEL_PATHS) | library.NAMED_MODEL_PATHS
)
QUESTIONS = Named(ast.Attribute, library.CACHE_PATHS | {"crop", "shape", "size"})
# A file of tests, whose classes stand in for models.
TEST = re.compile(r"(^|/)(tests?/|test_\w+\.py|conftest\.py)|_test\.py")


def add_evidence(flow: Flow) -> None:
    """Seed what calls prove, then what paths and names suggest, each only where nothing surer is known."""
    for stage in (
        _written_as_attention,
        _passed_as_configs,
        _called_as_models,
        _compiled_models,
        _passed_as_caches,
        _walked_as_models,
        _used_as_caches,
        _named_models,
    ):
        surest: dict[Variable, Value] = {}
        for file in flow.files.values():
            with flow.reading(file):
                for variable, value in stage(file, flow):
                    if variable not in surest or value.rank > surest[variable].rank:
                        surest[variable] = value
        for variable, value in surest.items():
            flow.seed(variable, value)
        flow.solve()


def _is_open(flow: Flow, variable: Variable) -> bool:
    """Whether nothing is known of what the variable holds."""
    return not _is_foreign(flow, variable) and all(
        value.kind is Kind.OTHER
        and not value.origin.startswith("torch.nn.")
        and not (value.origin.startswith("transformers.") and library.NO_DECODER.search(value.origin))
        for value in flow.held(variable)
    )


def _is_foreign(flow: Flow, variable: Variable) -> bool:
    """Whether its annotation is a class that is imported from elsewhere and is no model: a runner, an engine."""
    for source in flow.sources.get(variable, ()):
        match source:
            case Source(mode="annotation", expr=ast.Name(id=name) as written, scope=scope) if scope.find(name):
                held = flow.values(written, scope)
                packages = {value.origin.partition(".")[0] for value in held}
                is_imported = all(value.kind is Kind.LIBRARY for value in held) and not packages & NEUTRAL
                if is_imported and name[0].isupper() and not library.is_language_model(name):
                    return True
    return False


def _is_made_up(flow: Flow, variable: Variable) -> bool:
    """An attribute that neither the repository's class nor a base of another package can have set."""
    owner = variable[1]
    return (
        isinstance(owner, Class)
        and not flow.sources.get(variable)
        and all(isinstance(base, Class) for base in flow.bases(owner))
    )


def _is_tested(flow: Flow, variable: Variable) -> bool:
    """Whether nothing is known of what the variable holds, but that tests give it stand-ins of theirs."""
    home = variable[1].outer.file if isinstance(variable[1], Class) else getattr(variable[1], "file", None)
    if home is None or TEST.search(home.source.path):
        return False
    held = [value for value in flow.held(variable) if value.kind is not Kind.OTHER]
    return bool(held) and all(value.kind is Kind.OWN and TEST.search(value.origin) for value in held)


def _value(kind: Kind, node: ast.expr, file: File, confidence: Confidence, fact: str) -> Value:
    place = f"{file.source.path}:{node.lineno}"
    return Value(kind, f"{place}:{node.col_offset}", confidence, (f"{place}: {fact}",))


def _written_as_attention(file: File, flow: Flow) -> Iterator[Seed]:
    """`self` of a function of no class that goes through an attention module's projections: a forward to be put in
    the place of one, in whatever way."""
    if "transformers" not in file.packages or not any(map(file.source.text.__contains__, library.PROJECTIONS)):
        return
    read: dict[Function, set[str]] = defaultdict(set)
    for node in file.of(PROJECTED):
        function = file.scope_of(node).enclosing_function
        if function is not None and isinstance(node, ast.Attribute) and _last_name(node.value) == "self":
            read[function].add(node.attr)
    for function, names in read.items():
        variable: Variable = ("name", function.scope, "self")
        is_forward = function.owner is None and function.positional[:2] == ["self", "hidden_states"]
        if is_forward and len(names) > 1 and _is_open(flow, variable):
            place = f"{file.source.path}:{function.node.lineno}"
            fact = f"{place}: `self` has `{'`, `'.join(sorted(names))}`, as attention modules do"
            value = Value(Kind.ATTENTION, f"{place}:0", Confidence.LIKELY, (fact,))
            flow.patches.setdefault(function, value)
            yield variable, value


def _called_as_models(file: File, flow: Flow) -> Iterator[Seed]:
    """Called with arguments that only a Transformers forward takes, and its output's own fields read."""
    if file.is_lookalike:
        return
    fields = _fields_read(file)
    for node in file.calls_giving(*library.FORWARD_KEYWORDS):
        given = {keyword.arg for keyword in node.keywords if keyword.arg in library.FORWARD_KEYWORDS}
        scope = file.scope_of(node)
        callee = node.func
        if isinstance(callee, ast.Attribute) and callee.attr == "forward":
            callee = callee.value
        variable = flow.variable(callee, scope)
        if variable is None or not (_is_open(flow, variable) or _is_tested(flow, variable)):
            continue
        read = _result_fields(node, file, fields)
        weight = len(given) + any(
            value.kind is Kind.CACHE and value.confidence is Confidence.PROVEN
            for keyword in node.keywords
            if keyword.arg in ("past_key_values", "cache")
            for value in flow.values(keyword.value, scope)
        )
        if not weight or not (read or given & library.MODEL_ONLY_KEYWORDS):
            continue
        sure = weight >= 2 and bool(read)
        fact = f"`{ast.unparse(callee)}` is called with {', '.join(sorted(map(str, given)))}"
        if read:
            fact += f" and `.{'`, `.'.join(sorted(read))}` of the result is read"
        confidence = Confidence.PROVEN if sure else Confidence.LIKELY
        yield variable, _value(Kind.MODEL, callee, file, confidence, fact)


def _compiled_models(file: File, flow: Flow) -> Iterator[Seed]:
    """Given to `torch.compile`, unknown otherwise, and named a model."""
    for node in file.calls:
        match node:
            case ast.Call(args=[ast.Name(id=name) as given, *_]) if library.MODEL_NAMES.match(name):
                scope = file.scope_of(node)
                called = {value.origin for value in flow.values(node.func, scope) if value.kind is Kind.LIBRARY}
                if "torch.compile" in called and not flow.values(given, scope):
                    fact = "a model is compiled"
                    yield ("call", node, None), _value(Kind.COMPILED, node, file, Confidence.PROVEN, fact)


def _fields_read(file: File) -> dict[tuple[Scope, str], set[str]]:
    read: dict[tuple[Scope, str], set[str]] = defaultdict(set)
    for node in file.of(FIELDS):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = file.scope_of(node).find(node.value.id)
            if home is not None:
                read[home, node.value.id].add(node.attr)
    return read


def _result_fields(call: ast.Call, file: File, fields: dict[tuple[Scope, str], set[str]]) -> set[str]:
    match file.parent(call):
        case ast.Attribute(attr=attr) if attr in library.OUTPUT_FIELDS:
            return {attr}
        case ast.Assign(targets=[ast.Name(id=name)]):
            home = file.scope_of(call).find(name)
            return fields[home, name] if home is not None else set()
    return set()


def _passed_as_configs(file: File, flow: Flow) -> Iterator[Seed]:
    """Given to a loader of Transformers as the configuration."""
    for node in file.calls:
        match node:
            case ast.Call(func=ast.Attribute(attr="from_config" | "_from_config"), args=[given, *_]):
                pass
            case ast.Call(keywords=keywords) if any(keyword.arg == "config" for keyword in keywords):
                given = next(keyword.value for keyword in keywords if keyword.arg == "config")
            case _:
                continue
        scope = file.scope_of(node)
        names = [value.origin for value in flow.values(node.func, scope) if value.kind is Kind.LIBRARY]
        variable = flow.variable(given, scope)
        if variable is None or flow.held(variable) or not any(name.startswith("transformers.") for name in names):
            continue
        fact = f"`{ast.unparse(given)}` is given to `{ast.unparse(node.func)[:60]}` as the config"
        yield variable, _value(Kind.CONFIG, given, file, Confidence.PROVEN, fact)


def _passed_as_caches(file: File, flow: Flow) -> Iterator[Seed]:
    """Given to a Transformers model as its cache."""
    for node in file.calls_giving(*library.CACHE_KEYWORDS):
        scope = file.scope_of(node)
        model = next((v for v in flow.values(node.func, scope) if v.kind in (Kind.MODEL, Kind.BACKBONE)), None)
        for keyword in node.keywords if model else ():
            variable = flow.variable(keyword.value, scope)
            if keyword.arg in library.CACHE_KEYWORDS and variable is not None and _is_open(flow, variable):
                assert model is not None
                fact = f"`{ast.unparse(keyword.value)}` is given to a model as `{keyword.arg}`"
                yield variable, _value(Kind.CACHE, keyword.value, file, model.confidence, fact)


def _walked_as_models(file: File, flow: Flow) -> Iterator[Seed]:
    """Reached into by paths that only Transformers models have."""
    if file.is_lookalike:
        return
    for base, path, scope in _chains(file):
        two = ".".join(path[:2])
        name = _last_name(base)
        named = bool(library.MODEL_NAMES.match(name))
        is_path = two in library.MODEL_PATHS or path[0] in library.MODEL_PATHS
        if not is_path and not (named and path[0] in library.NAMED_MODEL_PATHS):
            continue
        variable = flow.variable(base, scope)
        if variable is None or not _is_open(flow, variable):
            continue
        if is_path:
            fact = f"`{name}.{two}` is a path of Transformers models"
        elif not flow.held(variable) and not _is_made_up(flow, variable):
            fact = f"`{name}` has `.{path[0]}`, and its name says model"
        else:
            continue
        yield variable, _value(Kind.MODEL, base, file, Confidence.LIKELY, fact)


def _chains(file: File) -> Iterator[tuple[ast.expr, list[str], Scope]]:
    """Each attribute path that begins as those of models do, with the expression that it starts from."""
    for node in file.of(STEPS):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            path = [node.attr]
            above = file.parent(node)
            while isinstance(above, ast.Attribute):
                path.append(above.attr)
                above = file.parent(above)
            if len(path) <= 12:
                yield node.value, path, file.scope_of(node)


def _used_as_caches(file: File, flow: Flow) -> Iterator[Seed]:
    """Asked what only a cache is asked, or named and taken apart like one."""
    if file.is_lookalike:
        return
    others = _names_of_other_stores(file, flow.own_cache_members)
    for node in file.of(QUESTIONS, ast.Subscript, ast.For, ast.comprehension):
        names, attr = library.CACHE_NAMES, ""
        match node:
            case ast.Attribute(value=base, attr=attr) if attr in library.CACHE_PATHS or attr == "crop":
                if attr in flow.own_cache_attributes:
                    names, attr = library.PAST_NAMES, ""
            case ast.Subscript(value=ast.Subscript(value=base)):
                pass
            case ast.Subscript(value=base) | ast.Attribute(value=ast.Subscript(value=base), attr="shape" | "size"):
                names = library.PAST_NAMES
            case ast.For(iter=iterable) | ast.comprehension(iter=iterable):
                if (taken := _taken_apart(node, iterable, file)) is None:
                    continue
                base = taken
            case _:
                continue
        name = _last_name(base)
        if name in others or not (names.match(name) or attr in library.CACHE_PATHS):
            continue
        variable = flow.variable(base, file.scope_of(node))
        if variable is None or flow.held(variable) or _is_part(variable, flow):
            continue
        if not library.PAST_NAMES.match(name) and _is_own_list(variable, flow):
            continue
        if names.match(name):
            fact = f"`{name}` is named and used like a cache"
            yield variable, _value(Kind.CACHE, base, file, Confidence.LIKELY, fact)
        elif attr in library.CACHE_PATHS:
            fact = f"`{name}.{attr}` is a cache's"
            yield variable, _value(Kind.CACHE, base, file, Confidence.LIKELY, fact)


def _taken_apart(loop: ast.AST, iterable: ast.expr, file: File) -> ast.expr | None:
    """What a loop goes over, if it is named like a cache, and what it gives is taken for a pair."""
    each = loop.target if isinstance(loop, ast.For | ast.comprehension) else None
    match iterable, each:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]), ast.Tuple(elts=[_, counted]):
            iterable, each = inner, counted
    if not library.CACHE_NAMES.match(_last_name(iterable)):
        return None
    return iterable if unpacks_pair(each, loop, file) else None


def _last_name(expr: ast.expr) -> str:
    return expr.attr if isinstance(expr, ast.Attribute) else expr.id if isinstance(expr, ast.Name) else ""


def _is_part(variable: Variable, flow: Flow) -> bool:
    """Whether it is one of many, what a cache has for a layer, or what a cache of the repository keeps in itself."""
    kind, owner, _ = variable
    if kind == "attribute" and owner in flow.own_caches:
        return True
    return any(source.mode.startswith("iterate") for source in flow.sources.get(variable, ()))


def _is_own_list(variable: Variable, flow: Flow) -> bool:
    """Whether it is made as a list whose items are no pairs, as those of a cache are."""
    for source in flow.sources.get(variable, ()):
        match source.expr:
            case ast.List(elts=[ast.expr() as first, *_]) | ast.ListComp(elt=first):
                return source.mode == "value" and not isinstance(first, ast.Tuple | ast.List | ast.ListComp)
    return False


def _names_of_other_stores(file: File, own_members: frozenset[str]) -> set[str]:
    """Names that are indexed with strings, or whose elements have what only the repository's own caches have."""
    found = set()
    for node in file.of(ast.Subscript, Named(ast.Attribute, own_members | {"items"})):
        match node:
            case ast.Subscript(value=base, slice=ast.Constant(value=str()) | ast.JoinedStr()):
                pass
            case ast.Subscript(value=base, slice=key) if _last_name(key).endswith("name"):
                pass
            case ast.Attribute(value=ast.Subscript(value=base), attr=attr) if attr in own_members:
                base = base.value if isinstance(base, ast.Subscript) else base
            case ast.Attribute(value=base, attr="items") if isinstance(file.parent(node), ast.Call):
                pass
            case _:
                continue
        found.add(_last_name(base))
    return found


def _named_models(file: File, flow: Flow) -> Iterator[Seed]:
    """Parameters of which nothing is known but that their name says model."""
    if file.is_lookalike:
        return
    for function in file.functions:
        args = function.node.args
        for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
            variable: Variable = ("name", function.scope, arg.arg)
            if library.MODEL_NAMES.match(arg.arg) and not flow.held(variable):
                place = f"{file.source.path}:{arg.lineno}"
                fact = (f"{place}: the parameter is called `{arg.arg}`",)
                yield variable, Value(Kind.MODEL, f"{place}:{arg.col_offset}", Confidence.GUESS, fact)
