"""Facts about a repository, and one file's view of them: what rules may ask."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ddaudit.auditor import library
from ddaudit.auditor.compaction import Compaction, find_compactions
from ddaudit.auditor.evidence import add_evidence
from ddaudit.auditor.finding import Edit, Import
from ddaudit.auditor.flow import Flow
from ddaudit.auditor.scopes import Class, File, Function, Scope, index
from ddaudit.auditor.values import Kind, Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddaudit.auditor.finding import Span
    from ddaudit.auditor.source import SourceFile

LEGACY_ATTRIBUTES = frozenset({"key_cache", "value_cache", "to_legacy_cache", "seen_tokens", "_seen_tokens"})


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
    is_tree_masked: bool = False
    """A model verifies with it under a mask of four dimensions."""


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

    @property
    def source(self) -> SourceFile:
        return self.file.source

    @property
    def nodes(self) -> list[ast.AST]:
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
        return self.file.parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self.file.parents.get(node)) is not None:
            yield above
            node = above

    def statement(self, node: ast.AST) -> ast.stmt:
        return next(item for item in (node, *self.ancestors(node)) if isinstance(item, ast.stmt))

    def scope(self, node: ast.AST) -> Scope:
        return self.file.scopes[node]

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

    def is_stock(self, node: ast.AST) -> bool:
        """Whether nothing says that this is an instance of the repository's own class."""
        return self.holds(node, Kind.OWN) is None

    def is_set_by_own_class(self, node: ast.Attribute) -> bool:
        """Whether the class of `self` sets the attribute itself."""
        if not isinstance(node.value, ast.Name) or self.holds(node.value, Kind.OWN) is None:
            return False
        function = self.function(node)
        return (
            function is not None
            and function.self_name == node.value.id
            and any(value.kind in (Kind.OTHER, Kind.OWN) for value in self.values(node))
        )

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
        above = self.parent(node)
        return not isinstance(above, ast.MatchValue)

    def is_bound_before(self, node: ast.expr, site: ast.AST) -> bool:
        """Whether the name or dotted name `node` surely has its value where `site` runs."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name) or (home := self.scope(site).find(node.id)) is None:
            return False
        around = {id(block) for block in self._blocks(site)}
        for binding in home.names[node.id]:
            if isinstance(binding, ast.arg):
                return True
            if home is not self.scope(site):
                # An outer function or the module has run its definitions by then.
                if isinstance(binding, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                    return True
                continue
            statement = self.statement(binding)
            if id(self.block(statement)) in around and statement.lineno < self.statement(site).lineno:
                return True
        return False

    def _blocks(self, node: ast.AST) -> Iterator[list[ast.stmt]]:
        for item in (node, *self.ancestors(node)):
            if isinstance(item, ast.stmt):
                yield self.block(item)

    def is_legacy_branch(self, node: ast.AST) -> bool:
        """In code that a test for an attribute or class of old releases keeps from running on new ones."""
        return any(item in self._legacy_parts for item in (node, *self.ancestors(node)))

    @cached_property
    def _legacy_parts(self) -> set[ast.AST]:
        """Tests for old releases, and what runs only where they hold."""
        parts: set[ast.AST] = set()
        for node in self.nodes:
            if isinstance(node, ast.If | ast.IfExp) and _tests_legacy(node.test):
                negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
                runs = node.orelse if negated else node.body
                parts.add(node.test)
                parts.update(runs if isinstance(runs, list) else [runs])
        return parts


def _tests_legacy(test: ast.expr) -> bool:
    for node in ast.walk(test):
        match node:
            case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value=str(name))]):
                if name in LEGACY_ATTRIBUTES:
                    return True
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id="tuple" | "list")]):
                return True
    return False


def learn(trees: Mapping[str, tuple[SourceFile, ast.Module]]) -> list[FileFacts]:
    """Facts of all files together, one view a file."""
    files = {path: index(source, tree) for path, (source, tree) in trees.items()}
    flow = Flow(files)
    add_evidence(flow)
    facts = Facts(flow, _cache_uses(flow))
    return [FileFacts(file, facts) for file in files.values()]


def _cache_uses(flow: Flow) -> dict[str, CacheUse]:
    uses: dict[str, CacheUse] = defaultdict(CacheUse)
    for file in flow.files.values():
        for node in file.nodes:
            if isinstance(node, ast.Call):
                _note_call(node, file.scopes[node], flow, uses)
            elif isinstance(node, ast.Attribute) and node.attr in ("keys", "values"):
                # `layer.keys[...] = …` and `layer.keys = …`
                above = file.parents[node]
                stored = above if isinstance(above, ast.Subscript) and above.value is node else node
                if isinstance(stored.ctx, ast.Store):
                    for value in flow.values(node.value, file.scopes[node]):
                        if value.kind is Kind.CACHE_LAYER:
                            uses[value.origin].goes_back = True
    return uses


def _note_call(call: ast.Call, scope: Scope, flow: Flow, uses: dict[str, CacheUse]) -> None:
    def caches(expr: ast.expr) -> list[CacheUse]:
        return [uses[value.origin] for value in flow.values(expr, scope) if value.kind is Kind.CACHE]

    callees = flow.values(call.func, scope)
    match call:
        case ast.Call(func=ast.Attribute(value=receiver, attr="crop"), args=[_]):
            for use in caches(receiver):
                use.goes_back = True
        case ast.Call(args=[first, _, *_]) if any(
            value.origin in ("ddaudit.runtime.crop_cache", "ddaudit.runtime.keep_in_cache") for value in callees
        ):
            for use in caches(first):
                use.goes_back = True
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
            for use in caches(keyword.value):
                if owner is not None:
                    use.owners.append(Use(call, callee, scope, owner))
                elif model is not None:
                    use.models.append(Use(call, callee, scope, model))
                    use.is_tree_masked |= masked
