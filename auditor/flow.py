"""What every name of a repository holds: values flow from where they are made to where they are used.

Flow ignores the order of statements: a name holds whatever is assigned to it anywhere in its scope. Each variable
(a name, an attribute of a class, what a function returns, a call) is worked out again when something that it reads
has grown, so the result is the same for any order of files.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ddaudit.auditor import library
from ddaudit.auditor.finding import Confidence
from ddaudit.auditor.scopes import Class, File, Function, Scope, Source, Variable
from ddaudit.auditor.values import Kind, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

BUILTINS = frozenset(dir(builtins))
MAX_DEPTH = 60
MAX_VALUES = 24
MAX_DOTS = 8


class Flow:
    """Values of every variable of the files given."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self.files = files
        self.sources: dict[Variable, list[Source]] = defaultdict(list)
        self._known: set[tuple[Variable, object]] = set()
        self._table: dict[Variable, dict[tuple[Kind, str], Value]] = defaultdict(dict)
        self._readers: dict[Variable, dict[Variable, None]] = defaultdict(dict)
        self._reading: Variable | None = None
        self._queue: deque[Variable] = deque()
        self._queued: set[Variable] = set()
        self._definitions: dict[str, Function | Class | File] = {}
        self._rivals: dict[tuple[str, Scope, str], bool] = {}
        self.managed: set[str] = set()
        """Origins of caches made by `make_cache`, which can go back."""
        self._modules = {self._module_name(path): file for path, file in files.items()}
        for file in files.values():
            for variable, source in file.sources:
                self.sources[variable].append(source)
                self._push(variable)
        self.solve()

    # What rules and later stages ask

    def values(self, expr: ast.expr, scope: Scope) -> tuple[Value, ...]:
        """What `expr` can hold, the surest first."""
        found = {value.key: value for value in self._evaluate(expr, scope)}
        return tuple(sorted(found.values(), key=lambda value: (-value.rank, value.kind.name, value.origin)))

    def held(self, variable: Variable) -> tuple[Value, ...]:
        return tuple(self._table.get(variable, {}).values())

    def definition(self, value: Value) -> Function | Class | File | None:
        return self._definitions.get(value.origin)

    def variable(self, expr: ast.expr, scope: Scope) -> Variable | None:
        """The variable that a plain name or an attribute of `self` reads."""
        match expr:
            case ast.Name(id=name):
                home = scope.find(name)
                return ("name", home, name) if home else None
            case ast.Attribute(value=ast.Name() as base, attr=attr):
                for value in self._evaluate(base, scope):
                    if value.kind is Kind.OWN and isinstance(owner := self._definitions[value.origin], Class):
                        return ("attribute", self._owner_of(owner, attr) or owner, attr)
        return None

    def seed(self, variable: Variable, value: Value) -> None:
        """Let a variable hold a value found by other means; `solve` spreads it."""
        self._grow(variable, [value])

    def solve(self) -> None:
        while self._queue:
            variable = self._queue.popleft()
            self._queued.discard(variable)
            self._reading = variable
            found: list[Value] = []
            for source in tuple(self.sources[variable]):
                found += self._produce(source)
            self._reading = None
            self._grow(variable, found)

    def bases(self, owner: Class) -> Iterator[Class | str]:
        """Base classes, nearest first: the repository's own, or qualified names of others."""
        pending, seen = [owner], {owner}
        while pending:
            current = pending.pop(0)
            for base in current.node.bases:
                for value in self._evaluate(base, current.outer):
                    if value.kind is Kind.LIBRARY:
                        yield value.origin
                        continue
                    known = self._definitions.get(value.origin)
                    if value.kind is Kind.OWN_CLASS and isinstance(known, Class) and known not in seen:
                        seen.add(known)
                        pending.append(known)
                        yield known

    def is_module_class(self, owner: Class) -> bool:
        """Whether instances are neural network modules that the repository itself defines."""
        return any(isinstance(base, str) and library.MODULE_BASE.search(base) for base in self.bases(owner))

    def method(self, owner: Class, name: str) -> Function | None:
        for candidate in (owner, *self.bases(owner)):
            if isinstance(candidate, Class) and name in candidate.methods:
                return candidate.methods[name]
        return None

    def resolve_module(self, name: str, level: int, importer: File) -> File | None:
        """The repository's file that an import means: next to the importer, or below any folder above it."""
        folder = PurePosixPath(importer.source.path).parent
        if level:
            for _ in range(level - 1):
                folder = folder.parent
            return self._modules.get(".".join(filter(None, (_dotted(folder), name))))
        for above in (folder, *folder.parents):
            for prefix in (_dotted(above), ".".join(filter(None, (_dotted(above), "src")))):
                if (file := self._modules.get(".".join(filter(None, (prefix, name))))) is not None:
                    return file
        return None

    # Solving

    def _push(self, variable: Variable) -> None:
        if variable not in self._queued:
            self._queued.add(variable)
            self._queue.append(variable)

    def _grow(self, variable: Variable, found: Iterable[Value]) -> None:
        held = self._table[variable]
        grew = False
        for value in found:
            old = held.get(value.key)
            if old is None:
                # Of too many the first are kept, and one of each kind: no kind that it can hold is ever forgotten.
                is_new = len(held) < MAX_VALUES or all(value.kind is not other.kind for other in held.values())
            else:
                is_new = value.rank > old.rank
            if is_new:
                held[value.key] = value
                grew = True
        if grew:
            for reader in self._readers[variable]:
                self._push(reader)

    def _read(self, variable: Variable) -> list[Value]:
        if self._reading is not None:
            self._readers[variable][self._reading] = None
        return list(self._table[variable].values()) if variable in self._table else []

    def _add_source(self, variable: Variable, source: Source) -> None:
        if (variable, source.expr) not in self._known:
            self._known.add((variable, source.expr))
            self.sources[variable].append(source)
            self._push(variable)

    def _produce(self, source: Source) -> Iterable[Value]:
        match source:
            case Source(mode="value", expr=ast.expr() as expr):
                return self._evaluate(expr, source.scope)
            case Source(mode="item", expr=ast.expr() as expr):
                return self._item(expr, source.index, source.scope)
            case Source(mode="iterate", expr=ast.expr() as expr):
                return self._iterate(expr, source.scope)
            case Source(mode="iterate-item", expr=ast.expr() as expr):
                return self._iterate_item(expr, source.index, source.scope)
            case Source(mode="annotation", expr=ast.expr() as expr):
                return self._annotation(expr, source.scope, expr)
            case Source(mode="import", target=(str() as module, str() as name, int() as level)):
                return self._import(module, name, level, source.scope.file)
            case Source(mode="function", target=Function() as function):
                return [self._defined(Kind.FUNCTION, function, function.node, source.scope.file)]
            case Source(mode="class", target=Class() as owner):
                return [self._defined(Kind.OWN_CLASS, owner, owner.node, source.scope.file)]
            case Source(mode="self", target=Function() as function):
                return self._self(function)
            case Source(mode="call", expr=ast.Call() as call):
                return self._call(call, source.scope)
        return []

    def _defined(self, kind: Kind, target: Function | Class, node: ast.AST, file: File) -> Value:
        origin = self._place(node, file)
        self._definitions[origin] = target
        return Value(kind, origin)

    def _self(self, function: Function) -> list[Value]:
        owner = function.owner
        assert owner is not None
        value = self._defined(Kind.OWN, owner, owner.node, owner.outer.file)
        if "classmethod" in function.decorators:
            return [replace(value, kind=Kind.OWN_CLASS)]
        found = [value]
        for base in self.bases(owner):
            if isinstance(base, str) and library.is_stock_class(base):
                kind = library.instance_kind(base)
                assert kind is not None
                fact = f"`{owner.node.name}` subclasses `{base}`"
                found.append(Value(kind, value.origin, evidence=(self._fact(owner.node, owner.outer.file, fact),)))
        return found

    # Expressions

    def _evaluate(self, expr: ast.expr, scope: Scope, depth: int = 0) -> list[Value]:
        if depth > MAX_DEPTH:
            return []
        depth += 1
        match expr:
            case ast.Name(id=name):
                return self._name(name, scope)
            case ast.Attribute(value=base, attr=attr):
                return [found for value in self._evaluate(base, scope, depth) for found in self._attribute(value, attr)]
            case ast.Call():
                return self._read(("call", expr, None))
            case ast.Subscript(value=base, slice=key):
                return self._subscript(base, key, scope, expr, depth)
            case ast.IfExp(body=left, orelse=right):
                return self._evaluate(left, scope, depth) + self._evaluate(right, scope, depth)
            case ast.BoolOp(values=operands):
                return [value for operand in operands for value in self._evaluate(operand, scope, depth)]
            case ast.NamedExpr(value=inner) | ast.Await(value=inner) | ast.Starred(value=inner):
                return self._evaluate(inner, scope, depth)
            case ast.BinOp(left=left, right=right):
                both = self._evaluate(left, scope, depth) + self._evaluate(right, scope, depth)
                return [value for value in both if value.kind is Kind.TREE_MASK]
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                return [value for value in self._evaluate(inner, scope, depth) if value.kind is Kind.TREE_MASK]
        return []

    def _name(self, name: str, scope: Scope) -> list[Value]:
        home = scope.find(name)
        if home is not None:
            held = self._read(("name", home, name))
            if len(home.names[name]) == 1:
                return held
            return [
                replace(value, confidence=Confidence.LIKELY)
                if value.kind is Kind.LIBRARY and self._has_rival(name, home, value.origin.partition(".")[0])
                else value
                for value in held
            ]
        found = []
        for module, level in scope.file.stars:
            if (file := self.resolve_module(module, level, scope.file)) is not None:
                found += self._read(("name", file.scope, name))
            elif not level and name not in BUILTINS and module.partition(".")[0] == "transformers":
                found.append(Value(Kind.LIBRARY, f"{module}.{name}"))
        return found

    def _has_rival(self, name: str, home: Scope, package: str) -> bool:
        """Whether the name that is imported from a package is also bound to something else, than in a fallback."""
        key = (name, home, package)
        if key not in self._rivals:
            self._rivals[key] = any(_is_rival(node, home.file, package) for node in home.names[name])
        return self._rivals[key]

    def _attribute(self, value: Value, attr: str) -> list[Value]:
        """What `attr` of one value holds."""
        match value.kind:
            case Kind.LIBRARY:
                if value.origin.count(".") < MAX_DOTS:
                    return [replace(value, origin=f"{value.origin}.{attr}")]
            case Kind.MODULE:
                file = self._definitions[value.origin]
                assert isinstance(file, File)
                return self._member(file, attr)
            case Kind.OWN | Kind.OWN_CLASS:
                return self._own_attribute(value, attr)
            case Kind.MODEL | Kind.BACKBONE | Kind.DECODER:
                return self._model_attribute(value, attr)
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

    @staticmethod
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

    def _own_attribute(self, value: Value, attr: str) -> list[Value]:
        owner = self._definitions[value.origin]
        assert isinstance(owner, Class)
        if (method := self.method(owner, attr)) is not None:
            if "property" in method.decorators or "cached_property" in method.decorators:
                return self._read(("return", method, None))
            bound = value.kind is Kind.OWN or "classmethod" in method.decorators
            kind = Kind.METHOD if bound and method.takes_self else Kind.FUNCTION
            return [self._defined(kind, method, method.node, method.scope.file)]
        found = self._read(("attribute", owner, attr))
        for base in self.bases(owner):
            if isinstance(base, Class):
                found += self._read(("attribute", base, attr))
        if not found and attr in library.WRAPPER_NAMES:
            return [value]
        return found

    def _owner_of(self, owner: Class, attr: str) -> Class | None:
        """The class among `owner` and its bases that sets the attribute."""
        for candidate in (owner, *self.bases(owner)):
            if isinstance(candidate, Class) and ("attribute", candidate, attr) in self.sources:
                return candidate
        return None

    def _subscript(self, base: ast.expr, key: ast.expr, scope: Scope, node: ast.expr, depth: int) -> list[Value]:
        keys = key.elts if isinstance(key, ast.Tuple) else [key]
        num_new = sum(isinstance(item, ast.Constant) and item.value is None for item in keys)
        if num_new >= 2:
            fact = f"`{ast.unparse(node)[:60]}` adds {num_new} dimensions"
            return [self._made(Kind.TREE_MASK, node, scope.file, fact)]
        found = []
        for value in self._evaluate(base, scope, depth):
            element = {
                Kind.LAYERS: Kind.LAYER, Kind.HIDDEN_STATES: Kind.TENSOR, Kind.CACHE_LAYERS: Kind.CACHE_LAYER,
                Kind.ATTENTIONS: Kind.TENSOR,
            }.get(value.kind)  # fmt: skip
            if element is not None:
                found.append(value if isinstance(key, ast.Slice) else replace(value, kind=element))
            elif value.kind is Kind.TREE_MASK and all(isinstance(item, ast.Slice) for item in keys):
                found.append(value)
        return found

    # Containers

    def _item(self, expr: ast.expr, i: int, scope: Scope) -> list[Value]:
        """Element `i` of what `expr` holds."""
        match expr:
            case ast.Tuple(elts=elements) | ast.List(elts=elements) if i < len(elements):
                return self._evaluate(elements[i], scope)
            case ast.Call():
                found = []
                for value in self._evaluate(expr.func, scope):
                    target = self._definitions.get(value.origin)
                    if value.kind in (Kind.FUNCTION, Kind.METHOD) and isinstance(target, Function):
                        found += self._read(("return", target, i))
                    elif value.kind is Kind.OWN and isinstance(target, Class):
                        forward = self.method(target, "forward") or self.method(target, "__call__")
                        found += self._read(("return", forward, i)) if forward else []
                return found
            case ast.IfExp(body=left, orelse=right):
                return self._item(left, i, scope) + self._item(right, i, scope)
        return self._elements(self._evaluate(expr, scope))

    def _iterate(self, expr: ast.expr, scope: Scope) -> list[Value]:
        match expr:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return [value for element in elements for value in self._evaluate(element, scope)]
            case ast.Call(func=ast.Name(id="reversed" | "list" | "tuple" | "sorted" | "tqdm"), args=[inner, *_]):
                return self._iterate(inner, scope)
        return self._elements(self._evaluate(expr, scope))

    def _iterate_item(self, expr: ast.expr, i: int, scope: Scope) -> list[Value]:
        match expr:
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]) if i == 1:
                return self._iterate(inner, scope)
            case ast.Call(func=ast.Name(id="zip"), args=inners) if i < len(inners):
                return self._iterate(inners[i], scope)
        return []

    @staticmethod
    def _elements(values: Iterable[Value]) -> list[Value]:
        element = {
            Kind.LAYERS: Kind.LAYER, Kind.HIDDEN_STATES: Kind.TENSOR, Kind.CACHE_LAYERS: Kind.CACHE_LAYER,
            Kind.OTHER: Kind.OTHER,
        }  # fmt: skip
        return [replace(value, kind=element[value.kind]) for value in values if value.kind in element]

    # Calls

    def _call(self, call: ast.Call, scope: Scope) -> list[Value]:
        found: list[Value] = []
        match call.func:
            case ast.Name(id="getattr") if len(call.args) >= 2 and scope.find("getattr") is None:
                match call.args[1]:
                    case ast.Constant(value=str(attr)):
                        found = [
                            item
                            for value in self._evaluate(call.args[0], scope)
                            for item in self._attribute(value, attr)
                        ]
                return found + [value for extra in call.args[2:] for value in self._evaluate(extra, scope)]
            case ast.Attribute(value=base, attr=attr):
                for value in self._evaluate(base, scope):
                    found += self._method_call(value, attr, call, scope)
                if attr == "unsqueeze" and _is_unsqueeze(base):
                    fact = "two dimensions are added by `unsqueeze`"
                    found.append(self._made(Kind.TREE_MASK, call, scope.file, fact))
                if attr in ("unwrap_model", "prepare", "prepare_model") and call.args:
                    found += self._evaluate(call.args[0], scope)
        for value in self._evaluate(call.func, scope):
            found += self._called(value, call, scope)
        return found

    def _method_call(self, value: Value, attr: str, call: ast.Call, scope: Scope) -> list[Value]:
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
                    return [self._made(kind, call, scope.file, "the model's output", value)]
                return [replace(value, kind=kind)] if kind else []
            case Kind.CONFIG | Kind.TEXT_CONFIG if attr == "get_text_config":
                return [replace(value, kind=Kind.TEXT_CONFIG)]
            case Kind.TREE_MASK if attr in library.TENSOR_METHODS_KEEPING_SHAPE:
                return [value]
            case Kind.OWN_CLASS if attr in library.MAKERS:
                owner = self._definitions[value.origin]
                if isinstance(owner, Class) and self.method(owner, attr) is None:
                    return self._instances(value, owner)
        return []

    def _called(self, value: Value, call: ast.Call, scope: Scope) -> list[Value]:
        """What a call of this value returns; arguments flow into the repository's own functions."""
        target = self._definitions.get(value.origin)
        match value.kind:
            case Kind.MODEL | Kind.BACKBONE | Kind.DECODER:
                return [self._made(Kind.OUTPUT, call, scope.file, "the model's output", value)]
            case Kind.FUNCTION | Kind.METHOD if isinstance(target, Function):
                self._pass(call, scope, target, skip=int(value.kind is Kind.METHOD))
                return self._read(("return", target, None))
            case Kind.OWN_CLASS if isinstance(target, Class):
                if (init := self.method(target, "__init__")) is not None:
                    self._pass(call, scope, init, skip=1)
                else:
                    for keyword in call.keywords:
                        if keyword.arg:
                            source = Source("value", scope, keyword.value)
                            self._add_source(("attribute", target, keyword.arg), source)
                return self._instances(value, target)
            case Kind.OWN if isinstance(target, Class):
                forward = self.method(target, "forward") or self.method(target, "__call__")
                if forward is not None:
                    self._pass(call, scope, forward, skip=1)
                    return self._read(("return", forward, None))
            case Kind.LIBRARY:
                return [_no_surer(made, value) for made in self._library_call(value.origin, call, scope)]
        return []

    def _instances(self, value: Value, owner: Class) -> list[Value]:
        made = [replace(value, kind=Kind.OWN)]
        name = owner.node.name
        if library.MODEL_CLASS.search(name) and self.is_module_class(owner):
            # Whoever holds one from outside walks into it as into the stock model that it copies.
            fact = self._fact(owner.node, owner.outer.file, f"`{name}` is a causal language model of the repository")
            made.append(Value(Kind.MODEL, value.origin, Confidence.LIKELY, (fact,)))
        init = next(iter(owner.methods.values()), None)
        return made + (self._self(init)[1:] if init is not None and init.takes_self else [])

    def _pass(self, call: ast.Call, scope: Scope, function: Function, skip: int) -> None:
        """Let the call's arguments flow into the function's parameters."""
        names = function.positional[skip:]
        for name, arg in zip(names, call.args, strict=False):
            if isinstance(arg, ast.Starred):
                break
            self._add_source(("name", function.scope, name), Source("value", scope, arg))
        known = {*names, *(arg.arg for arg in function.node.args.kwonlyargs)}
        for keyword in call.keywords:
            if keyword.arg in known:
                self._add_source(("name", function.scope, keyword.arg), Source("value", scope, keyword.value))

    def _library_call(self, name: str, call: ast.Call, scope: Scope) -> list[Value]:
        owner, _, last = name.rpartition(".")
        if name in library.TRANSPARENT_CALLS:
            position = 1 if name == "typing.cast" else 0
            return self._evaluate(call.args[position], scope) if len(call.args) > position else []
        if library.FOUR_D_MASK_MAKERS.search(name):
            return [self._made(Kind.TREE_MASK, call, scope.file, f"`{last}` returns a mask with four dimensions")]
        if owner == "torch" and last in library.TENSOR_MAKERS and _num_dimensions(call, last) == 4:
            return [self._made(Kind.TREE_MASK, call, scope.file, f"`{name}` makes four dimensions")]
        if name in ("torch.where", "torch.masked_fill"):
            return [v for arg in call.args for v in self._evaluate(arg, scope) if v.kind is Kind.TREE_MASK]
        if name == "ddaudit.runtime.make_cache":
            self.managed.add(self._place(call, scope.file))
            return [self._made(Kind.CACHE, call, scope.file, "`make_cache` makes a cache that can go back")]
        if name.startswith("ddaudit.runtime."):
            kind = {"decoder_layers": Kind.LAYERS, "final_norm": Kind.NORM, "text_config": Kind.TEXT_CONFIG}.get(last)
            return [self._made(kind, call, scope.file, f"`{last}` of the runtime")] if kind else []
        if kind := library.instance_kind(name):
            return [self._made(kind, call, scope.file, f"`{last}` makes a {kind.value}")]
        kind = library.instance_kind(owner)
        if kind is Kind.CACHE or (kind is not None and last in library.MAKERS):
            trusts_code = any(keyword.arg == "trust_remote_code" for keyword in call.keywords)
            if not (kind is Kind.BACKBONE and trusts_code):
                called = ".".join(name.split(".")[-2:])
                return [self._made(kind, call, scope.file, f"`{called}` returns a {kind.value}")]
        return [Value(Kind.OTHER, name)]

    # Imports and annotations

    def _import(self, module: str, name: str, level: int, importer: File) -> list[Value]:
        file = self.resolve_module(module, level, importer)
        if not name:
            return [self._module(file)] if file else [Value(Kind.LIBRARY, module)]
        inner = self.resolve_module(".".join(filter(None, (module, name))), level, importer)
        if file is not None and name in file.scope.names and file is not importer:
            return self._read(("name", file.scope, name))
        if inner is not None:
            return [self._module(inner)]
        if file is not None and file is not importer:
            return self._member(file, name)
        return [Value(Kind.LIBRARY, f"{module}.{name}")] if not level else []

    def _member(self, file: File, name: str) -> list[Value]:
        found = self._read(("name", file.scope, name))
        if not found:
            found = self._name(name, file.scope)
        if not found and PurePosixPath(file.source.path).name == "__init__.py":
            folder = _dotted(PurePosixPath(file.source.path).parent)
            inner = self._modules.get(".".join(filter(None, (folder, name))))
            return [self._module(inner)] if inner else []
        return found

    def _module(self, file: File) -> Value:
        self._definitions[file.source.path] = file
        return Value(Kind.MODULE, file.source.path)

    def _annotation(self, expr: ast.expr, scope: Scope, written: ast.expr, depth: int = 0) -> list[Value]:
        """What a parameter of this annotation holds; `written` is the annotation in the text."""
        if depth > 8:
            return []
        match expr:
            case ast.Constant(value=str(text)):
                try:
                    return self._annotation(ast.parse(text.strip(), mode="eval").body, scope, written, depth + 1)
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    return []
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._annotation(left, scope, written, depth + 1) + self._annotation(
                    right, scope, written, depth + 1
                )
            case ast.Subscript(value=base, slice=inner):
                name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                if name in ("Optional", "Union", "Annotated", "Final", "ClassVar"):
                    items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                    items = items[:1] if name == "Annotated" else items
                    return [value for item in items for value in self._annotation(item, scope, written, depth + 1)]
                return []
        found = []
        for value in self._evaluate(expr, scope):
            if value.kind is Kind.OWN_CLASS and isinstance(owner := self._definitions[value.origin], Class):
                found += self._instances(value, owner)
            elif value.kind is Kind.LIBRARY and (kind := library.instance_kind(value.origin)):
                last = value.origin.rpartition(".")[2]
                made = self._made(kind, written, scope.file, f"the annotation is `{last}`")
                found.append(_no_surer(made, value))
        return found

    # Places

    def _made(self, kind: Kind, node: ast.AST, file: File, fact: str, by: Value | None = None) -> Value:
        evidence = (self._fact(node, file, fact),)
        if by is None:
            return Value(kind, self._place(node, file), evidence=evidence)
        return Value(kind, self._place(node, file), by.confidence, by.evidence[:3] + evidence)

    @staticmethod
    def _place(node: ast.AST, file: File) -> str:
        return f"{file.source.path}:{getattr(node, 'lineno', 1)}:{getattr(node, 'col_offset', 0)}"

    @staticmethod
    def _fact(node: ast.AST, file: File, fact: str) -> str:
        return f"{file.source.path}:{getattr(node, 'lineno', 1)}: {fact}"

    @staticmethod
    def _module_name(path: str) -> str:
        pure = PurePosixPath(path)
        return _dotted(pure.parent if pure.name == "__init__.py" else pure.with_suffix(""))


def _dotted(path: PurePosixPath) -> str:
    return ".".join(part for part in path.parts if part != ".")


def _no_surer(made: Value, by: Value) -> Value:
    """The value, no surer than the one that made it."""
    return made if made.rank <= by.rank else replace(made, confidence=by.confidence)


def _is_rival(binding: ast.AST, file: File, package: str) -> bool:
    """Whether a binding gives a name something else than the package's, where the package can be imported."""
    match binding:
        case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == package:
            return False
        case ast.Import(names=aliases) if any(alias.name.partition(".")[0] == package for alias in aliases):
            return False
    above: ast.AST | None = binding
    statement: ast.stmt | None = None
    while above is not None and not isinstance(above, ast.ExceptHandler):
        statement = above if statement is None and isinstance(above, ast.stmt) else statement
        above = file.parents.get(above)
    is_none = isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant)
    return above is None and not is_none


def _num_dimensions(call: ast.Call, maker: str) -> int:
    """Dimensions of a tensor maker's size argument; 0 where it is not written out."""
    sizes = call.args[:1] if maker == "full" else call.args
    if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
        sizes = sizes[0].elts
    return 0 if any(isinstance(size, ast.Starred) for size in sizes) else len(sizes)


def _is_unsqueeze(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze"
