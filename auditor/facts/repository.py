"""Facts about a repository, and one file's view of them: what rules may ask."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.cache_uses import CacheUse, cache_uses, note_moves
from ddaudit.auditor.facts.compaction import Compaction, find_compactions
from ddaudit.auditor.facts.evidence import TEST, add_evidence
from ddaudit.auditor.facts.exhaustion import EXHAUSTION, said
from ddaudit.auditor.facts.fixtures import pass_fixtures
from ddaudit.auditor.facts.flow import Flow
from ddaudit.auditor.facts.indexing import index
from ddaudit.auditor.facts.legacy import legacy_parts
from ddaudit.auditor.facts.patching import hooked_layer, patched
from ddaudit.auditor.facts.scopes import Class, File, Function, Scope
from ddaudit.auditor.facts.tracing import steps
from ddaudit.auditor.facts.values import Kind, Value, place
from ddaudit.auditor.finding import Edit, Import
from ddaudit.auditor.sources.source import NEWLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddaudit.auditor.finding import Span
    from ddaudit.auditor.sources.source import SourceFile

COPIES = frozenset({"copy", "deepcopy"})


@dataclass(frozen=True)
class Facts:
    """Facts of the whole repository."""

    flow: Flow
    caches: Mapping[str, CacheUse]


@dataclass(frozen=True)
class FileFacts:
    """What a rule may ask about one file."""

    file: File
    facts: Facts
    _values: dict[ast.AST, tuple[Value, ...]] = field(default_factory=dict, compare=False, repr=False)
    _matching: dict[object, dict[tuple[ast.AST, bool], bool]] = field(default_factory=dict, compare=False, repr=False)

    def forget(self) -> None:
        """Let go of what was worked out for this file's own rules: a repository has many files."""
        self._values.clear()
        self._matching.clear()
        self.file.forget()

    @property
    def source(self) -> SourceFile:
        return self.file.source

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return self.file.nodes

    # The text

    def span(self, node: ast.AST) -> Span:
        return self.source.span(*self.offsets(node))

    def offsets(self, node: ast.AST) -> tuple[int, int]:
        """Code-point offsets of a node that has a position."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword | ast.arg | ast.alias | ast.excepthandler)
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.source.offset(node.lineno, node.col_offset)
        return start, self.source.offset(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        start, end = self.offsets(node)
        return self.source.text[start:end]

    def operand(self, node: ast.expr) -> str:
        """Its text where a dot, a subscript or arguments may follow: what was in parentheses stays in them."""
        text = self.text(node)
        is_primary = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
        return text if is_primary and _stands_alone(text) else f"({text})"

    def argument(self, node: ast.expr) -> str:
        """Its text as one of several arguments of a call."""
        text = self.text(node)
        return f"({text})" if isinstance(node, ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Starred) else text

    def edit(self, node: ast.AST, replacement: str) -> Edit:
        """Replace a node's text."""
        return Edit(*self.offsets(node), replacement)

    def runtime_call(self, name: str, site: ast.AST) -> tuple[str, Import] | None:
        """How `site` can call a function of `ddaudit.runtime`, and the import for it; None where names collide."""
        for written, imported in ((name, Import("ddaudit.runtime", name)), ("runtime", Import("ddaudit", "runtime"))):
            home = self.scope(site).find(written)
            ours = {f"{imported.module}.{imported.name}"}
            held = {value.origin for value in self.facts.flow.held(("name", home, written))} if home else ours
            if held == ours:
                return (written if written == name else f"runtime.{name}"), imported
        return None

    # The tree

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self.file.parent(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        return self.file.above(node)

    def statement(self, node: ast.AST) -> ast.stmt:
        return next(item for item in (node, *self.ancestors(node)) if isinstance(item, ast.stmt))

    def scope(self, node: ast.AST) -> Scope:
        return self.file.scope_of(node)

    def function(self, node: ast.AST) -> Function | None:
        return self.scope(node).enclosing_function

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that holds this one."""
        above = self.parent(statement)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(above, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return [statement]

    def string_around(self, node: ast.AST) -> ast.JoinedStr | None:
        """The outermost f-string in which this stands."""
        return next((above for above in reversed([*self.ancestors(node)]) if isinstance(above, ast.JoinedStr)), None)

    # Values

    def values(self, node: ast.AST) -> tuple[Value, ...]:
        if not isinstance(node, ast.expr):
            return ()
        if node not in self._values:
            self._values[node] = self.facts.flow.values(node, self.scope(node))
        return self._values[node]

    def holds(self, node: ast.AST, *kinds: Kind) -> Value | None:
        """The surest value of one of these kinds."""
        return next((value for value in self.values(node) if value.kind in kinds), None)

    def steps(self, node: ast.AST, value: Value) -> tuple[str, ...]:
        """How the value came to the expression that holds it, in `node` or around it; one `path:line: fact` a step."""
        if value.kind is Kind.LIBRARY or value.origin == place(node, self.file):
            return ()
        for around in (node, *self.ancestors(node)):
            for part in ast.walk(around):
                if isinstance(part, ast.Name | ast.Attribute) and any(
                    held.origin == value.origin for held in self.values(part)
                ):
                    return steps(self.facts.flow, part, self.scope(part), value)
            if isinstance(around, ast.stmt):
                break
        return ()

    def is_stock(self, node: ast.AST) -> bool:
        """Whether nothing says that this is an instance, or a part of an instance, of the repository's own class."""
        own = self.holds(node, Kind.OWN)
        if own is not None and TEST.search(own.origin) and not TEST.search(self.source.path):
            # A stand-in that tests give to what others give a model.
            return self.holds(node, Kind.MODEL, Kind.BACKBONE) is not None
        if own is None and isinstance(node, ast.Attribute) and node.attr in library.INNER_NAMES:
            own = self.holds(node.value, Kind.OWN)
            owner = self.definition(own) if own is not None else None
            if isinstance(owner, Class) and self.facts.flow.owner_of(owner, node.attr) is not None:
                return True
            bases = self.facts.flow.bases(owner) if isinstance(owner, Class) else ()
            return own is None or any(isinstance(base, str) and library.is_stock_class(base) for base in bases)
        return own is None

    def hooked_layer(self, module: ast.expr) -> Value | None:
        """The output of the decoder layer that `module` is, or is written like."""
        return hooked_layer(self.facts.flow, module, self.scope(module))

    def patched(self, target: ast.Attribute) -> list[Value]:
        """Whose method is replaced by an assignment to `target`."""
        return patched(self.facts.flow, target, self.scope(target))

    def is_set_by_own_class(self, node: ast.Attribute) -> bool:
        """Whether the class of `self` sets the attribute itself."""
        owner = self._class_of_self(node.value)
        return owner is not None and (
            any(value.kind in (Kind.OTHER, Kind.OWN) for value in self.values(node))
            or self.facts.flow.owner_of(owner, node.attr) is not None
        )

    def defines(self, base: ast.expr, name: str) -> bool:
        """Whether a class of the repository that `base` may be an instance of has the method itself."""
        owners = (self.definition(value) for value in self.values(base))
        return any(isinstance(owner, Class) and self.facts.flow.method(owner, name) is not None for owner in owners)

    def is_built_by_own_class(self, node: ast.expr) -> bool:
        """Whether this is a part that a module of the repository makes for itself: `self.body = GPT2Model(config)`."""
        owner = self._class_of_self(node.value) if isinstance(node, ast.Attribute) else None
        if owner is None or not isinstance(node, ast.Attribute) or not self.facts.flow.is_module_class(owner):
            return False
        sources = self.facts.flow.sources.get(("attribute", owner, node.attr), ())
        makers = [source.expr.func for source in sources if isinstance(source.expr, ast.Call)]
        return bool(makers) and all(
            any(library.is_stock_class(value.origin) for value in self.values(maker)) for maker in makers
        )

    def is_patched_self(self, node: ast.expr) -> bool:
        """Whether this is `self` in a function that takes the place of a method of one family's class.

        What such a function reads there is what the method that it copies reads.
        """
        function = self.function(node)
        if function is None or function.owner is not None or not isinstance(node, ast.Name) or node.id != "self":
            return False
        values = self.values(node)
        is_copy = function in self.facts.flow.copies and any(_is_family(value.origin) for value in values)
        return is_copy or any(value.kind is Kind.LAYER for value in values)

    def _class_of_self(self, node: ast.expr) -> Class | None:
        """The class in one of whose methods `node` is the instance."""
        function = self.function(node)
        if function is None or not isinstance(node, ast.Name) or function.self_name != node.id:
            return None
        return function.owner if self.holds(node, Kind.OWN) is not None else None

    def qualified_names(self, node: ast.AST) -> set[str]:
        """Names of other packages that this expression can mean."""
        return {value.origin for value in self.values(node) if value.kind is Kind.LIBRARY}

    def definition(self, value: Value) -> Function | Class | File | None:
        return self.facts.flow.definition(value)

    def cache_use(self, cache: Value) -> CacheUse:
        return self.facts.caches.get(cache.origin, CacheUse())

    def is_managed(self, cache: Value) -> bool:
        return cache.origin in self.facts.flow.managed

    def names_holding(self, kind: Kind, site: ast.AST) -> list[str]:
        """Names of the scope of `site`, or of one around it, that hold a value of this kind."""
        found: list[str] = []
        scope: Scope | None = self.scope(site)
        while scope is not None:
            for name in scope.names:
                held = self.facts.flow.held(("name", scope, name))
                if name not in found and any(value.kind is kind for value in held):
                    found.append(name)
            scope = scope.parent
        return found

    def all_made_from(self, expr: ast.expr) -> list[ast.expr]:
        """Every expression assigned to a plain name in its scope; the expression itself if it is no name."""
        if not isinstance(expr, ast.Name):
            return [expr]
        home = self.scope(expr).find(expr.id)
        made = []
        for binding in home.names[expr.id] if home else ():
            match self.parent(binding):
                case ast.Assign(targets=[_], value=value) | ast.AnnAssign(value=ast.expr() as value):
                    made.append(value)
        return made

    def made_from(self, expr: ast.expr) -> ast.expr | None:
        """The only expression that a plain name is ever given; None where there are others."""
        if not isinstance(expr, ast.Name):
            return expr
        home = self.scope(expr).find(expr.id)
        if home is None or len(home.names[expr.id]) != 1:
            return None
        return next(iter(self.all_made_from(expr)), None)

    def default(self, expr: ast.expr) -> ast.expr | None:
        """The default of the parameter that a plain name is."""
        home = self.scope(expr).find(expr.id) if isinstance(expr, ast.Name) else None
        function = home.function if home is not None else None
        if function is None or not isinstance(expr, ast.Name):
            return None
        args = function.node.args
        positional = [*args.posonlyargs, *args.args]
        defaults = dict(zip([arg.arg for arg in reversed(positional)], reversed(args.defaults), strict=False))
        keyword_only = {
            arg.arg: default for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default
        }
        return {**defaults, **keyword_only}.get(expr.id)

    def constant(self, expr: ast.expr) -> object:
        """The constant that an expression always is; None for none."""
        made = self.made_from(expr)
        return made.value if isinstance(made, ast.Constant) else None

    @staticmethod
    def lineno(node: ast.AST) -> int:
        return getattr(node, "lineno", 0)

    @cached_property
    def compactions(self) -> list[Compaction]:
        return list(find_compactions(self))

    def module_class(self, node: ast.AST) -> Class | None:
        """The neural network module of the repository in whose class this stands."""
        for above in self.ancestors(node):
            owner = self.scope(above).owner
            if isinstance(above, ast.stmt) and owner is not None and self.facts.flow.is_module_class(owner):
                return owner
        return None

    def is_own_config(self, base: ast.expr) -> bool:
        """Whether this is the config that a module of the repository is given to build itself from."""
        if isinstance(base, ast.Attribute) and base.attr == "config" and self.is_patched_self(base.value):
            return True
        owner = next((self.scope(above).owner for above in self.ancestors(base) if self.scope(above).is_class), None)
        if owner is None or not self.facts.flow.is_model_part(owner):
            return False
        match self.made_from(base):
            case ast.Call(func=ast.Name(id=made) | ast.Attribute(attr=made), args=[copied]) if made in COPIES:
                return self.is_own_config(copied)
        match base:
            case ast.Name(id=name):
                home = self.scope(base).find(name)
                return home is not None and any(isinstance(binding, ast.arg) for binding in home.names[name])
            case ast.Attribute(value=ast.Name(id="self"), attr="config"):
                return True
        return False

    def model_for(self, cache: Value, site: ast.AST) -> str | None:
        """Text of the one name in this function for the model that takes the cache, bound before `site`."""
        here = self.function(site)
        uses = [use for use in self.cache_use(cache).models if use.scope.enclosing_function is here]
        names = {self.text(use.callee) for use in uses if self.is_bound_before(use.callee, site)}
        return names.pop() if len(names) == 1 else None

    # What may be edited

    def is_read(self, node: ast.AST) -> bool:
        """Whether the expression is only read: not a target of an assignment, `del`, `with` or a pattern."""
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return False
        # Any part of a pattern: `case a.b.c` reads `a.b`, and takes no call.
        above = self.parent(node)
        while isinstance(above, ast.Attribute):
            above = self.parent(above)
        return not isinstance(above, ast.pattern)

    def is_bound_before(self, node: ast.expr, site: ast.AST) -> bool:
        """Whether the name or dotted name `node` surely has its one value where `site` runs."""
        if isinstance(node, ast.Attribute):
            is_stored = (self.function(site), ast.unparse(node)) in self._stored_attributes
            return not is_stored and self.is_bound_before(node.value, site)
        if not isinstance(node, ast.Name) or (home := self.scope(site).find(node.id)) is None:
            return False
        bindings = home.names[node.id]
        if home is not self.scope(site):
            # An outer function or the module has run its definitions by then.
            return any(
                isinstance(binding, ast.arg | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
                for binding in bindings
            )
        around = {id(block) for block in self._blocks(site)}
        repeats = any(isinstance(above, ast.For | ast.AsyncFor | ast.While) for above in self.ancestors(site))
        is_sure = False
        for binding in bindings:
            if isinstance(binding, ast.arg):
                is_sure = not self._may_be_none(binding)
                continue
            statement = self.statement(binding)
            is_later = statement.lineno >= self.statement(site).lineno
            if is_later and not repeats and isinstance(statement, ast.Delete):
                continue
            if is_later or _unbinds(binding):
                return False
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            is_none = isinstance(value, ast.Constant) and value.value is None
            is_sure = not is_none and (is_sure or id(self.block(statement)) in around)
        return is_sure

    def _may_be_none(self, arg: ast.arg) -> bool:
        args = self.parent(arg)
        assert isinstance(args, ast.arguments)
        positional = [*args.posonlyargs, *args.args]
        defaults = dict(zip(reversed(positional), reversed(args.defaults), strict=False))
        default = {**defaults, **dict(zip(args.kwonlyargs, args.kw_defaults, strict=True))}.get(arg)
        return isinstance(default, ast.Constant) and default.value is None

    @cached_property
    def _stored_attributes(self) -> set[tuple[Function | None, str]]:
        """Dotted names that a function gives a value or takes it away from."""
        return {
            (self.function(node), ast.unparse(node))
            for node in self.file.attributes
            if not isinstance(node.ctx, ast.Load)
        }

    def _blocks(self, node: ast.AST) -> Iterator[list[ast.stmt]]:
        for item in (node, *self.ancestors(node)):
            if isinstance(item, ast.stmt):
                yield self.block(item)

    def is_under(self, node: ast.AST, matches: Callable[[ast.expr, bool], bool]) -> bool:
        """Whether a test around the node matches, as it came out there. Each test is looked at once a way."""
        known = self._matching.setdefault(matches, {})
        here = node
        for above in self.ancestors(node):
            if isinstance(above, ast.If | ast.IfExp):
                other = above.orelse if isinstance(above.orelse, list) else [above.orelse]
                way = (above, here not in other)
                if way not in known:
                    known[way] = matches(self.made_from(above.test) or above.test, way[1])
                if known[way]:
                    return True
            here = above
        return False

    def is_legacy_branch(self, node: ast.AST) -> bool:
        """In code that a test for an attribute or class of old releases keeps from running on new ones."""
        return any(item in self._legacy_parts for item in (node, *self.ancestors(node)))

    @cached_property
    def _legacy_parts(self) -> set[ast.AST]:
        return legacy_parts(self)


def _is_family(name: str) -> bool:
    """A class of one family, and none that all families have for a base."""
    return library.is_stock_class(name) and not name.rpartition(".")[2].startswith("Auto")


def _stands_alone(text: str) -> bool:
    """Whether no line of it ends where only parentheses around it let it go on."""
    if not NEWLINE.search(text):
        return True
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _unbinds(binding: ast.AST) -> bool:
    """`del`, and an `except` clause's name, which is gone where the clause ends."""
    return isinstance(binding, ast.ExceptHandler) or (
        isinstance(binding, ast.Name) and isinstance(binding.ctx, ast.Del)
    )


def learn(trees: Mapping[str, tuple[SourceFile, ast.Module]], failed: dict[str, str] | None = None) -> list[FileFacts]:
    """Facts of all files together, one view a file. Those about which nothing can be said go into `failed`."""
    files: dict[str, File] = {}
    failed = {} if failed is None else failed
    for path, (source, tree) in trees.items():
        try:
            files[path] = index(source, tree)
        except EXHAUSTION as error:
            failed[path] = said(error)
    flow = Flow(files)
    pass_fixtures(flow)
    add_evidence(flow)
    uses = cache_uses(flow)
    views = [FileFacts(file, Facts(flow, uses)) for file in files.values()]
    note_moves(views, uses)
    failed |= flow.failed
    return views
