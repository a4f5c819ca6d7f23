"""Collects the names of one file: its scopes, functions and classes, and every place that gives a name a value."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, TypeAlias

from ddaudit.auditor.facts.scopes import COMPREHENSIONS, Class, File, Function, Scope, Source
from ddaudit.auditor.facts.walking import children, node_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddaudit.auditor.facts.scopes import ScopeNode, Variable
    from ddaudit.auditor.sources.source import SourceFile

    Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    # Children of a node, each with the scope that it is evaluated in.
    Children: TypeAlias = Iterator[tuple[Any, Scope]]

# Methods of a module that give it a member by name.
REGISTERS = frozenset({"register_buffer", "register_parameter", "register_module", "add_module"})


def index(source: SourceFile, tree: ast.Module) -> File:
    """Collect the names of one file in one walk, without recursion: long chains are no deeper than short ones.

    Each node gets its `parent` and `scope` as attributes: its own dictionary has room for them, and two of all nodes
    are a sixth of what a scan takes.
    """
    file = File(source, tree)
    file.scope = Scope(tree, None, file)
    file.scopes.append(file.scope)
    plans = _Plans(_Collector(file))
    root: Any = tree
    root.scope = file.scope
    pending: list[Any] = [root]
    while pending:
        node = pending.pop()
        note, record, opener, fields = plans[node.__class__]
        note(node)
        scope = node.scope
        if record is not None:
            record(node, scope)
        if opener is not None:
            inner = list(opener(node, scope))
            for child, its_scope in inner:
                child.parent, child.scope = node, its_scope
            pending += [child for child, _ in reversed(inner)]
            continue
        # As in `children`, last first, without a list of them: most of this walk's time.
        for name in fields:
            value = getattr(node, name, None)
            if value.__class__ is list:
                for child in reversed(value):
                    if child is not None:
                        child.parent, child.scope = node, scope
                        pending.append(child)
            elif isinstance(value, ast.AST):
                value.parent, value.scope = node, scope  # type: ignore[attr-defined]
                pending.append(value)
    return file


class _Plans(dict[type[ast.AST], tuple[Any, Any, Any, tuple[str, ...]]]):
    """What to do with a node of each type: note it, record what it gives values, open its scope, or go on below."""

    def __init__(self, collector: _Collector) -> None:
        super().__init__()
        self.collector = collector

    def __missing__(self, kind: type[ast.AST]) -> tuple[Any, Any, Any, tuple[str, ...]]:
        collector = self.collector
        note = collector.file.by_type[kind].append
        fields = tuple(reversed(node_fields(kind)))
        plan = self[kind] = (note, collector.records.get(kind), collector.openers.get(kind), fields)
        return plan


class _Collector:
    """Writes down, in a file's facts, what each node binds, opens or hands on."""

    def __init__(self, file: File) -> None:
        self.file = file
        # What opens a scope; what is recorded in the scope that it stands in.
        self.openers: dict[type[ast.AST], Callable[[Any, Scope], Children]] = {
            ast.FunctionDef: self._function, ast.AsyncFunctionDef: self._function, ast.Lambda: self._function,
            ast.ClassDef: self._class, ast.ListComp: self._comprehension, ast.SetComp: self._comprehension,
            ast.DictComp: self._comprehension, ast.GeneratorExp: self._comprehension,
        }  # fmt: skip
        self.records: dict[type[ast.AST], Callable[[Any, Scope], None]] = {
            ast.Call: self._call, ast.Assign: self._assignment, ast.AnnAssign: self._annotated,
            ast.AugAssign: self._augmented, ast.NamedExpr: self._walrus, ast.For: self._loop, ast.AsyncFor: self._loop,
            ast.comprehension: self._loop, ast.withitem: self._with, ast.ExceptHandler: self._name,
            ast.MatchAs: self._name, ast.MatchStar: self._name, ast.Global: self._global, ast.Nonlocal: self._nonlocal,
            ast.Return: self._return, ast.Yield: self._return, ast.Import: self._import,
            ast.ImportFrom: self._import_from,
        }  # fmt: skip

    def _open(self, node: ScopeNode, parent: Scope) -> Scope:
        scope = Scope(node, parent, self.file)
        self.file.scopes.append(scope)
        return scope

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope) -> Children:
        inner = self._open(node, scope)
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

    def _class(self, node: ast.ClassDef, scope: Scope) -> Children:
        inner = self._open(node, scope)
        owner = Class(node, inner, scope)
        inner.owner = owner
        self.file.classes.append(owner)
        self._bind(scope, node.name, node, Source("class", scope, target=owner))
        for child in children(node):
            yield child, inner if isinstance(child, ast.stmt) else scope

    def _comprehension(self, node: Comprehension, scope: Scope) -> Children:
        inner = self._open(node, scope)
        for child in children(node):
            yield child, inner

    def _call(self, node: ast.Call, scope: Scope) -> None:
        match node:
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                self.file.attributes_set.add(name)
            case ast.Call(func=ast.Attribute(attr=attr), args=[ast.Constant(value=str(name)), *_]) if attr in REGISTERS:
                self.file.attributes_set.add(name)
        for keyword in node.keywords:
            self.file.giving[keyword.arg].append(len(self.file.calls) - 1)
        self._add(("call", node, None), Source("call", scope, node))

    def _assignment(self, node: ast.Assign, scope: Scope) -> None:
        for target in node.targets:
            self._assign(target, Source("value", scope, node.value))

    def _annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        self._assign(node.target, Source("annotation", scope, node.annotation))
        if node.value is not None:
            self._assign(node.target, Source("value", scope, node.value))

    def _augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        if isinstance(node.target, ast.Name):
            scope.names[node.target.id].append(node)

    def _walrus(self, node: ast.NamedExpr, scope: Scope) -> None:
        # Inside a comprehension it binds outside it.
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent:
            scope = scope.parent
        self._assign(node.target, Source("value", scope, node.value))

    def _loop(self, node: ast.For | ast.AsyncFor | ast.comprehension, scope: Scope) -> None:
        self._assign(node.target, Source("iterate", scope, node.iter))

    def _with(self, node: ast.withitem, scope: Scope) -> None:
        if node.optional_vars is not None:
            self._assign(node.optional_vars, Source("value", scope, node.context_expr))

    def _name(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar, scope: Scope) -> None:
        if node.name is not None:
            scope.names[node.name].append(node)

    def _global(self, node: ast.Global, scope: Scope) -> None:
        scope.globals |= {*node.names}

    def _nonlocal(self, node: ast.Nonlocal, scope: Scope) -> None:
        scope.outer |= {*node.names}

    def _return(self, node: ast.Return | ast.Yield, scope: Scope) -> None:
        function, value = scope.enclosing_function, node.value
        if function is None or value is None:
            return
        self._add(("return", function, None), Source("value", scope, value))
        if isinstance(value, ast.Tuple):
            for i, item in enumerate(value.elts):
                self._add(("return", function, i), Source("value", scope, item))

    def _import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            self.file.packages.add(alias.name.partition(".")[0])
            name = alias.asname or alias.name.partition(".")[0]
            module = alias.name if alias.asname else name
            self._bind(scope, name, node, Source("import", scope, target=(module, "", 0)))

    def _import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        module, level = node.module or "", node.level
        if not level and module:
            self.file.packages.add(module.partition(".")[0])
            self.file.modules.add(module)
        for alias in node.names:
            if alias.name == "*":
                self.file.stars.append((module, level))
            else:
                origin = (module, alias.name, level)
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
