"""One file's names: scopes, functions, classes, calls, and every place that gives a name a value."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, cast

from ddaudit.auditor.facts.library import LOOKALIKES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.sources.source import SourceFile

ScopeNode: TypeAlias = (
    ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ListComp | ast.SetComp
    | ast.DictComp | ast.GeneratorExp
)  # fmt: skip
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Methods of a module that give it a member by name.
REGISTERS = frozenset({"register_buffer", "register_parameter", "register_module", "add_module"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(eq=False, slots=True)
class Scope:
    """Where names live. Identity is what counts."""

    node: ScopeNode
    parent: Scope | None
    file: File
    names: dict[str, list[ast.AST]] = field(default_factory=lambda: defaultdict(list))
    """Names bound here, each with the nodes that bind it."""
    globals: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)
    function: Function | None = None
    owner: Class | None = None

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def find(self, name: str) -> Scope | None:
        """The scope that a read of `name` here means; None for builtins and star imports."""
        scope: Scope | None = self.file.scope if name in self.globals else self
        first = True
        while scope is not None:
            if name in scope.names and (first or not scope.is_class) and not (first and name in scope.outer):
                return scope
            scope, first = scope.parent, False
        return None

    @property
    def enclosing_function(self) -> Function | None:
        scope: Scope | None = self
        while scope is not None and scope.function is None:
            scope = scope.parent
        return scope.function if scope else None


@dataclass(eq=False, slots=True)
class Function:
    """A function, method or lambda of the repository."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: Class | None = None
    """The class whose body defines it."""
    decorators: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name

    @property
    def positional(self) -> list[str]:
        return [arg.arg for arg in (*self.node.args.posonlyargs, *self.node.args.args)]

    @property
    def takes_self(self) -> bool:
        return self.owner is not None and "staticmethod" not in self.decorators

    @property
    def is_abstract(self) -> bool:
        """Nothing but a docstring, `pass`, `...` or `raise`: what it does stands in subclasses."""
        body = [] if isinstance(self.node, ast.Lambda) else self.node.body
        texts = (item.value for item in body if isinstance(item, ast.Expr))
        return all(isinstance(item, ast.Pass | ast.Raise | ast.Expr) for item in body) and all(
            isinstance(text, ast.Constant) for text in texts
        )

    @property
    def self_name(self) -> str:
        return self.positional[0] if self.takes_self and self.positional else ""


@dataclass(eq=False, slots=True)
class Class:
    """A class of the repository."""

    node: ast.ClassDef
    scope: Scope
    outer: Scope
    methods: dict[str, Function] = field(default_factory=dict)


# A name in a scope, an attribute of a class, what a function returns (whole, or one element), or a call.
Variable: TypeAlias = tuple[str, object, object]


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """One way in which a variable gets a value. Identity is what counts."""

    mode: str
    """`value`, `item`, `iterate`, `iterate-item`, `annotation`, `import`, `function`, `class`, `self`, `call` or
    `install`."""
    scope: Scope
    expr: ast.expr | None = None
    index: int = 0
    target: object = None
    """The Function or Class, the import's `(module, name, level)`, or the owner of an attribute assigned to."""


@dataclass(eq=False)
class File:
    """A parsed file with its names."""

    source: SourceFile
    tree: ast.Module
    scope: Scope = field(init=False)
    nodes: list[ast.AST] = field(default_factory=list)
    """Every node, parents first, in the order of the text."""
    by_type: dict[type[ast.AST], list[ast.AST]] = field(default_factory=lambda: defaultdict(list))
    """The same nodes by their type."""
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)
    """The scope in which each expression is evaluated."""
    functions: list[Function] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    sources: list[tuple[Variable, Source]] = field(default_factory=list)
    stars: list[tuple[str, int]] = field(default_factory=list)
    attributes_set: set[str] = field(default_factory=set)
    """Attributes that the file gives to objects other than its classes' `self`, by assignment or `setattr`."""
    packages: set[str] = field(default_factory=set)
    """Top-level packages imported."""
    modules: set[str] = field(default_factory=set)
    """Modules from which names are imported."""

    def of(self, *types: type[ast.AST]) -> Iterator[ast.AST]:
        """Nodes of these types, one type after the other."""
        return chain.from_iterable(self.by_type[kind] for kind in types)

    @property
    def calls(self) -> list[ast.Call]:
        return cast("list[ast.Call]", self.by_type[ast.Call])

    @property
    def attributes(self) -> list[ast.Attribute]:
        return cast("list[ast.Attribute]", self.by_type[ast.Attribute])

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What the node stands in, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    @property
    def is_lookalike(self) -> bool:
        """Written for a framework whose models only look like Transformers'."""
        return bool(self.packages & LOOKALIKES) and "transformers" not in self.packages


def index(source: SourceFile, tree: ast.Module) -> File:
    """Collect the names of one file in one walk, without recursion: long chains are no deeper than short ones."""
    file = File(source, tree)
    file.scope = Scope(tree, None, file)
    collector = _Collector(file)
    nodes, by_type, scopes, parents = file.nodes, file.by_type, file.scopes, file.parents
    pending: list[tuple[ast.AST, Scope]] = [(tree, file.scope)]
    while pending:
        node, scope = pending.pop()
        kind = type(node)
        nodes.append(node)
        by_type[kind].append(node)
        scopes[node] = scope
        if kind in collector.recorded:
            inner = list(collector.enter(node, scope))
        else:
            inner = [(child, scope) for child in children(node)]
        for child, _ in inner:
            parents[child] = node
        inner.reverse()
        pending += inner
    return file


# Fields that hold no node, or one that says nothing on its own: an operator, a context.
BARE_FIELDS = frozenset(
    {
        "ctx", "op", "ops", "id", "attr", "kind", "type_comment", "level", "simple", "conversion", "is_async",
        "module", "asname", "lineno", "type_ignores",
    }
)  # fmt: skip


_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}


def _node_fields(kind: type[ast.AST]) -> tuple[str, ...]:
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(name for name in kind._fields if name not in BARE_FIELDS)
    return _FIELDS[kind]


def children(node: ast.AST) -> list[ast.AST]:
    """Nodes directly below, in the order of the text, without operators and contexts."""
    found: list[ast.AST] = []
    for name in _node_fields(type(node)):
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


class _Collector:
    recorded = frozenset(
        {
            ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp,
            ast.GeneratorExp, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor,
            ast.comprehension, ast.withitem, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.Global, ast.Nonlocal,
            ast.Return, ast.Yield, ast.Call, ast.Import, ast.ImportFrom,
        }
    )  # fmt: skip
    """Node types that bind names, open a scope, or hand a value on."""

    def __init__(self, file: File) -> None:
        self.file = file

    def enter(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        """Record what `node` binds; yield its children, each with the scope it is evaluated in."""
        if isinstance(node, FUNCTIONS):
            yield from self._function(node, scope)
            return
        if isinstance(node, ast.ClassDef):
            yield from self._class(node, scope)
            return
        if isinstance(node, COMPREHENSIONS):
            scope = Scope(node, scope, self.file)
        self._record(node, scope)
        for child in children(node):
            yield child, scope

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope
    ) -> Iterator[tuple[ast.AST, Scope]]:
        inner = Scope(node, scope, self.file)
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        names = frozenset(ast.unparse(item).rpartition(".")[2] for item in decorators if _is_path(item))
        function = Function(node, inner, scope.owner if scope.is_class else None, names)
        inner.function = function
        self.file.functions.append(function)
        if isinstance(node, ast.Lambda):
            self._add(("return", function, None), Source("value", inner, node.body))
        else:
            self._bind(scope, node.name, node, Source("function", scope, target=function))
            if function.owner is not None:
                function.owner.methods[node.name] = function
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        for arg in [*every, *filter(None, (args.vararg, args.kwarg))]:
            inner.names[arg.arg].append(arg)
        for arg in every:
            if arg.annotation is not None:
                self._add(("name", inner, arg.arg), Source("annotation", scope, arg.annotation))
        defaults = [None] * (len(args.posonlyargs + args.args) - len(args.defaults)) + list(args.defaults)
        for arg, default in zip(every, [*defaults, *args.kw_defaults], strict=True):
            if default is not None:
                self._add(("name", inner, arg.arg), Source("value", scope, default))
        if function.self_name:
            self._add(("name", inner, function.self_name), Source("self", inner, target=function))
        for child in children(node):
            in_body = isinstance(node, ast.Lambda) and child is node.body
            if not isinstance(node, ast.Lambda):
                in_body = isinstance(child, ast.stmt)
            yield child, inner if in_body else scope

    def _class(self, node: ast.ClassDef, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        inner = Scope(node, scope, self.file)
        owner = Class(node, inner, scope)
        inner.owner = owner
        self.file.classes.append(owner)
        self._bind(scope, node.name, node, Source("class", scope, target=owner))
        for child in children(node):
            yield child, inner if isinstance(child, ast.stmt) else scope

    def _record(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, Source("value", scope, value))
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                self._assign(target, Source("annotation", scope, annotation))
                if value is not None:
                    self._assign(target, Source("value", scope, value))
            case ast.AugAssign(target=ast.Name(id=name)):
                scope.names[name].append(node)
            case ast.NamedExpr(target=target, value=value):
                # A walrus inside a comprehension binds outside it.
                while isinstance(scope.node, COMPREHENSIONS) and scope.parent:
                    scope = scope.parent
                self._assign(target, Source("value", scope, value))
            case ast.For(target=target, iter=iterable) | ast.AsyncFor(target=target, iter=iterable):
                self._assign(target, Source("iterate", scope, iterable))
            case ast.comprehension(target=target, iter=iterable):
                self._assign(target, Source("iterate", scope, iterable))
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._assign(target, Source("value", scope, value))
            case ast.ExceptHandler(name=str(name)) | ast.Name(id=name, ctx=ast.Del()):
                scope.names[name].append(node)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                scope.names[name].append(node)
            case ast.Global(names=names):
                scope.globals.update(names)
            case ast.Nonlocal(names=names):
                scope.outer.update(names)
            case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                if (function := scope.enclosing_function) is not None:
                    self._add(("return", function, None), Source("value", scope, value))
                    if isinstance(value, ast.Tuple):
                        for i, item in enumerate(value.elts):
                            self._add(("return", function, i), Source("value", scope, item))
            case ast.Call():
                match node:
                    case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                        self.file.attributes_set.add(name)
                    case ast.Call(func=ast.Attribute(attr=attr), args=[ast.Constant(value=str(name)), *_]):
                        if attr in REGISTERS:
                            self.file.attributes_set.add(name)
                self._add(("call", node, None), Source("call", scope, node))
            case ast.Import(names=aliases):
                for alias in aliases:
                    self.file.packages.add(alias.name.partition(".")[0])
                    name = alias.asname or alias.name.partition(".")[0]
                    module = alias.name if alias.asname else name
                    self._bind(scope, name, node, Source("import", scope, target=(module, "", 0)))
            case ast.ImportFrom(module=module, names=aliases, level=level):
                if not level and module:
                    self.file.packages.add(module.partition(".")[0])
                    self.file.modules.add(module)
                for alias in aliases:
                    if alias.name == "*":
                        self.file.stars.append((module or "", level))
                    else:
                        origin = (module or "", alias.name, level)
                        self._bind(scope, alias.asname or alias.name, node, Source("import", scope, target=origin))

    def _assign(self, target: ast.expr, source: Source) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(source.scope, name, target, source)
            case ast.Attribute(value=base, attr=attr):
                if (owner := _class_of(base, source.scope)) is not None:
                    self._add(("attribute", owner, attr), source)
                else:
                    self.file.attributes_set.add(attr)
                if source.mode == "value" and (owner is None or attr == "forward"):
                    self._add(("install", target, None), Source("install", source.scope, source.expr, target=target))
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for i, element in enumerate(elements):
                    inner = _zipped(source, i) if isinstance(element, ast.Tuple | ast.List) else None
                    if inner is not None:
                        self._assign(element, Source("iterate", source.scope, inner))
                    elif isinstance(element, ast.Starred):
                        self._assign(element.value, Source("other", source.scope))
                    elif source.mode in ("value", "iterate"):
                        mode = "item" if source.mode == "value" else "iterate-item"
                        self._assign(element, Source(mode, source.scope, source.expr, i))
                    else:
                        self._assign(element, Source("other", source.scope))

    def _bind(self, scope: Scope, name: str, node: ast.AST, source: Source) -> None:
        home = self.file.scope if name in scope.globals else scope
        if name not in scope.outer:
            home.names[name].append(node)
        self._add(("name", home, name), source)
        if scope.owner is not None and scope.is_class:
            self._add(("attribute", scope.owner, name), source)

    def _add(self, variable: Variable, source: Source) -> None:
        self.file.sources.append((variable, source))


def _zipped(source: Source, i: int) -> ast.expr | None:
    """What the element `i` of each turn goes over, in `for n, (a, b) in enumerate(…)` and `for (a, b), c in zip(…)`."""
    match source:
        case Source(mode="iterate", expr=ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_])):
            return inner if i == 1 else None
        case Source(mode="iterate", expr=ast.Call(func=ast.Name(id="zip"), args=inners)) if i < len(inners):
            return inners[i]
    return None


def _class_of(base: ast.expr, scope: Scope) -> Class | None:
    """The class whose instance a method's first argument is, where `base` is that argument."""
    function = scope.enclosing_function
    while isinstance(base, ast.Name) and function is not None:
        if function.self_name == base.id:
            return function.owner
        function = function.scope.parent.enclosing_function if function.scope.parent else None
    return None


def _is_path(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
