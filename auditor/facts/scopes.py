"""One file's names: scopes, functions, classes, calls, and every place that gives a name a value."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from ddaudit.auditor.facts.library import LOOKALIKES
from ddaudit.auditor.facts.walking import walk

if TYPE_CHECKING:
    import re
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
    globals: frozenset[str] = frozenset()
    outer: frozenset[str] = frozenset()
    function: Function | None = None
    owner: Class | None = None

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def find(self, name: str) -> Scope | None:
        """The scope that a read of `name` here means; None for builtins and star imports."""
        scope: Scope | None = self.file.scope if name in self.globals else self
        assert scope is not None
        if name in scope.names and name not in scope.outer:
            return scope
        while (scope := scope.parent) is not None:
            if name in scope.names and scope.owner is None:
                return scope
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


class Named(NamedTuple):
    """Nodes of a type by name: attributes by theirs, calls by the last name of what is called, names by themselves,
    keywords by the argument."""

    kind: type[ast.AST]
    names: frozenset[str] | re.Pattern[str]


@dataclass(eq=False)
class File:
    """A parsed file with its names."""

    source: SourceFile
    tree: ast.Module
    scope: Scope = field(init=False)
    by_type: dict[type[ast.AST], list[ast.AST]] = field(default_factory=lambda: defaultdict(list))
    """Every node by its type, parents first, in the order of the text."""
    scopes: list[Scope] = field(default_factory=list)
    """Every scope, the file's own first."""
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
    giving: dict[str | None, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Which of the calls give an argument by keyword; None for what is unpacked."""
    _named: dict[type[ast.AST], dict[str, list[int]]] = field(default_factory=dict)

    @property
    def nodes(self) -> Iterator[ast.AST]:
        """Every node, parents first, in the order of the text."""
        return walk(self.tree)

    def of(self, *wanted: type[ast.AST] | Named) -> Iterator[ast.AST]:
        """Nodes of these types, or of a type and with these names, one type after the other."""
        return chain.from_iterable(
            self._with_name(each) if isinstance(each, Named) else self.by_type[each] for each in wanted
        )

    def forget(self) -> None:
        """Let go of where the names are; they are found again where they are asked for."""
        self._named.clear()

    def _with_name(self, wanted: Named) -> Iterator[ast.AST]:
        """In the order of the text, whatever that of the names."""
        # A file has more plain names than anything else, and mostly none of those.
        names = wanted.names
        if wanted.kind is ast.Name and isinstance(names, frozenset) and not any(map(self._has, names)):
            return iter(())
        nodes, places = self.by_type[wanted.kind], self._places(wanted.kind)
        known = names & places.keys() if isinstance(names, frozenset) else filter(names.match, places)
        found = sorted(chain.from_iterable(places[name] for name in known))
        return (nodes[place] for place in found)

    def _has(self, word: str) -> bool:
        return word in self.source.text

    def _places(self, kind: type[ast.AST]) -> dict[str, list[int]]:
        """Where in `by_type` the nodes of each name are."""
        if kind not in self._named:
            places: dict[str, list[int]] = defaultdict(list)
            for i, node in enumerate(self.by_type[kind]):
                called = node.func if isinstance(node, ast.Call) else node
                if isinstance(called, ast.Attribute):
                    name = called.attr
                elif isinstance(called, ast.Name):
                    name = called.id
                else:
                    name = (called.arg or "") if isinstance(called, ast.keyword) else ""
                places[name].append(i)
            self._named[kind] = places
        return self._named[kind]

    @staticmethod
    def parent(node: ast.AST) -> ast.AST | None:
        """What the node stands in, None for the module and for a node that is of no file."""
        parent: ast.AST | None = getattr(node, "parent", None)
        return parent

    @staticmethod
    def scope_of(node: ast.AST) -> Scope:
        """The scope in which an expression is evaluated."""
        scope: Scope = node.scope  # type: ignore[attr-defined]
        return scope

    @property
    def calls(self) -> list[ast.Call]:
        return cast("list[ast.Call]", self.by_type[ast.Call])

    def calls_giving(self, *names: str) -> list[ast.Call]:
        """Calls with any of these arguments by keyword."""
        places = sorted({place for name in names for place in self.giving.get(name, ())})
        return [self.calls[place] for place in places]

    @property
    def attributes(self) -> list[ast.Attribute]:
        return cast("list[ast.Attribute]", self.by_type[ast.Attribute])

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What the node stands in, innermost first."""
        while (parent := self.parent(node)) is not None:
            yield parent
            node = parent

    @property
    def is_lookalike(self) -> bool:
        """Written for a framework whose models only look like Transformers'."""
        return bool(self.packages & LOOKALIKES) and "transformers" not in self.packages
