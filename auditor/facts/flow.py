"""What every name of a repository holds: values flow from where they are made to where they are used.

Flow ignores the order of statements: a name holds whatever is assigned to it anywhere in its scope. Each way in which
a variable (a name, an attribute of a class, what a function returns, a call) gets a value is worked out again when
something that it reads has grown.
"""

from __future__ import annotations

import ast
from collections import defaultdict, deque
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.calls import annotated, call_result
from ddaudit.auditor.facts.exhaustion import EXHAUSTION, said
from ddaudit.auditor.facts.expressions import HOLDING, evaluate, imported, item, iterate, iterate_item
from ddaudit.auditor.facts.modules import Modules
from ddaudit.auditor.facts.patching import install
from ddaudit.auditor.facts.scopes import Class, File, Function, Scope, Source, Variable
from ddaudit.auditor.facts.values import Kind, Value, fact_at, place, replace
from ddaudit.auditor.finding import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_VALUES = 24
MAX_MIXED = 8

# A variable, and one of the ways in which it gets a value.
Step: TypeAlias = tuple[Variable, Source]
_BASES: Variable = ("bases", None, None)
# A step, or the search for the bases of a class.
Reader: TypeAlias = tuple[Variable, Source | Class]


class Flow:
    """Values of every variable of the files given."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self.files = files
        self.sources: dict[Variable, list[Source]] = defaultdict(list)
        self._known: set[tuple[Variable, object]] = set()
        self._table: dict[Variable, dict[tuple[Kind, str], Value]] = defaultdict(dict)
        self._readers: dict[Variable, list[Reader]] = defaultdict(list)
        """Steps to be taken again when the variable holds more; some twice, which costs less than to ask."""
        self._reading: Reader | None = None
        self._bases: dict[Class, tuple[Class | str, ...]] = {}
        self._heirs: dict[Class, dict[Reader, None]] = defaultdict(dict)
        """Who asked for the bases of a class."""
        self._queue: deque[Step] = deque()
        self._queued: set[Step] = set()
        self.definitions: dict[str, Function | Class | File] = {}
        self.patches: dict[Function, Value] = {}
        """Functions that replace a method of Transformers, and whose."""
        self.layer_calls: set[ast.Call] = set()
        """Calls of what can be a decoder layer."""
        self.failed: dict[str, str] = {}
        """Files about which nothing more can be said, and why."""
        self.copies: set[Function] = set()
        """Functions that take the place of a method which one family's class has itself."""
        self._rivals: dict[tuple[str, Scope, str], bool] = {}
        self.kinds: set[Kind] = set()
        """Kinds that any variable holds."""
        self.packages = {package for file in files.values() for package in file.packages}
        self.managed: set[str] = set()
        """Origins of caches made by `make_cache`, which can go back."""
        self._attributes_set = {attr for file in files.values() for attr in file.attributes_set}
        self.modules = Modules(files)
        self._mixed: dict[str, list[Class]] = defaultdict(list)
        """Classes with several bases, by the last name of each."""
        self._subclasses: dict[str, list[Class]] = defaultdict(list)
        """Classes by the last name of each of their bases."""
        for file in files.values():
            for owner in file.classes:
                for base in owner.node.bases:
                    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                    self._subclasses[name].append(owner)
                    if len(owner.node.bases) > 1:
                        self._mixed[name].append(owner)
        for file in files.values():
            for variable, source in file.sources:
                self.sources[variable].append(source)
        for file in files.values():
            for step in file.sources:
                source = step[1]
                if source.mode != "value" or type(source.expr) in HOLDING:
                    self._take(step)
        self.solve()

    # What rules and later stages ask

    def values(self, expr: ast.expr, scope: Scope) -> tuple[Value, ...]:
        """What `expr` can hold, the surest first."""
        held = evaluate(self, expr, scope)
        if len(held) < 2:
            return tuple(held)
        found = {value.key: value for value in held}
        return tuple(sorted(found.values(), key=lambda value: (-value.rank, value.kind.name, value.origin)))

    def held(self, variable: Variable) -> tuple[Value, ...]:
        return tuple(self._table.get(variable, {}).values())

    def definition(self, value: Value) -> Function | Class | File | None:
        return self.definitions.get(value.origin)

    def variable(self, expr: ast.expr, scope: Scope) -> Variable | None:
        """The variable that a plain name or an attribute of `self` reads."""
        match expr:
            case ast.Name(id=name):
                home = scope.find(name)
                return ("name", home, name) if home else None
            case ast.Attribute(value=ast.Name() as base, attr=attr):
                for value in evaluate(self, base, scope):
                    if value.kind is Kind.OWN and isinstance(owner := self.definitions[value.origin], Class):
                        return ("attribute", self.owner_of(owner, attr) or owner, attr)
        return None

    @contextmanager
    def reading(self, file: File) -> Iterator[None]:
        """What reading the file exhausts costs that file alone."""
        try:
            yield
        except EXHAUSTION as error:
            self.failed[file.source.path] = said(error)

    def seed(self, variable: Variable, value: Value) -> None:
        """Let a variable hold a value found by other means; `solve` spreads it."""
        self._grow(variable, [value])

    def is_set_anywhere(self, attr: str) -> bool:
        """Whether the repository gives the attribute to an object of another's class."""
        return attr in self._attributes_set

    @cached_property
    def own_cache_members(self) -> frozenset[str]:
        """Attributes and methods of the repository's classes that are called caches."""
        methods = {name for owner in self.own_caches for name in owner.methods}
        return self.own_cache_attributes | methods

    @cached_property
    def own_cache_attributes(self) -> frozenset[str]:
        """What the repository's classes that are called caches set themselves."""
        owners = self.own_caches
        methods = {name for owner in owners for name in owner.methods}
        fields = {str(key[2]) for key in self.sources if key[0] == "attribute" and key[1] in owners}
        return frozenset(fields - methods)

    @cached_property
    def own_caches(self) -> set[Class]:
        """The repository's classes that are called caches."""
        return {owner for file in self.files.values() for owner in file.classes if "cache" in owner.node.name.lower()}

    def solve(self) -> None:
        while self._queue:
            step = self._queue.popleft()
            self._queued.discard(step)
            self._take(step)

    def _take(self, step: Step) -> None:
        self._reading = step
        try:
            found = self.produce(step[1])
        except EXHAUSTION as error:
            self.failed[step[1].scope.file.source.path] = said(error)
            found = []
        self._reading = None
        if found:
            self._grow(step[0], found)

    def bases(self, owner: Class) -> tuple[Class | str, ...]:
        """Base classes, nearest first: the repository's own, or qualified names of others.

        Asked for at every attribute of `self`, so they are kept, and found again when what they are read from grows.
        """
        if not owner.node.bases:
            return ()
        reading = self._reading
        if reading is not None and reading not in self._heirs[owner]:
            self._heirs[owner][reading] = None
        if owner not in self._bases:
            # A class below itself has no more bases.
            self._bases[owner] = ()
            self._reading = (_BASES, owner)
            try:
                self._bases[owner] = tuple(self._find_bases(owner))
            finally:
                self._reading = reading
        return self._bases[owner]

    def _find_bases(self, owner: Class) -> Iterator[Class | str]:
        pending, seen = [owner], {owner}
        while pending:
            current = pending.pop(0)
            for base in current.node.bases:
                for value in evaluate(self, base, current.outer):
                    if value.kind is Kind.LIBRARY:
                        yield value.origin
                        continue
                    known = self.definitions.get(value.origin)
                    if value.kind is Kind.OWN_CLASS and isinstance(known, Class) and known not in seen:
                        seen.add(known)
                        pending.append(known)
                        yield known

    def is_module_class(self, owner: Class) -> bool:
        """Whether instances are neural network modules that the repository itself defines."""
        return any(isinstance(base, str) and library.MODULE_BASE.search(base) for base in self.bases(owner))

    def is_of_transformers(self, owner: Class) -> bool:
        """Whether the class stands on one of Transformers', whose parts a release can move and rename."""
        return any(isinstance(base, str) and base.startswith("transformers.") for base in self.bases(owner))

    def is_model_part(self, owner: Class) -> bool:
        """A neural network module of the repository, or a subclass of a stock model, which has one family's config."""
        bases = (base for base in self.bases(owner) if isinstance(base, str))
        return any(library.MODULE_BASE.search(base) or library.is_stock_class(base) for base in bases)

    def has_rival(self, name: str, home: Scope, package: str) -> bool:
        """Whether the name that is imported from a package is also bound to something else, than in a fallback."""
        key = (name, home, package)
        if key not in self._rivals:
            self._rivals[key] = any(_is_rival(node, home.file, package) for node in home.names[name])
        return self._rivals[key]

    def method(self, owner: Class, name: str) -> Function | None:
        if name in owner.methods:
            return owner.methods[name]
        for candidate in self.bases(owner):
            if isinstance(candidate, Class) and name in candidate.methods:
                return candidate.methods[name]
        return None

    def overrides(self, owner: Class, name: str) -> Iterator[Function]:
        """Methods of this name in direct subclasses, which an abstract one stands for."""
        for subclass in self._subclasses[owner.node.name][:MAX_MIXED]:
            if name in subclass.methods and owner in self.bases(subclass):
                yield subclass.methods[name]

    def is_family_model(self, owner: Class) -> bool:
        """A causal language model of the repository, by its own name or that of a base.

        A plain module that is given a model only wraps it.
        """
        bases = tuple(self.bases(owner))
        names = [base.node.name if isinstance(base, Class) else base for base in (owner, *bases)]
        if library.DRAFTER.search(owner.node.name) or not any(library.is_language_model(name) for name in names):
            return False
        libraries = [base for base in bases if isinstance(base, str)]
        if any(library.is_stock_class(base) or base.endswith("PreTrainedModel") for base in libraries):
            return True
        init = self.method(owner, "__init__")
        wraps = init is not None and any(library.MODEL_NAMES.match(name) for name in init.positional)
        return not wraps and any(library.MODULE_BASE.search(base) for base in libraries)

    def _mixed_into(self, owner: Class) -> Class | None:
        """The causal language model of the repository that a class which is none is a part of."""
        for subclass in self._mixed[owner.node.name][:MAX_MIXED]:
            others = [base for base in self.bases(subclass) if base is not owner]
            if len(others) < len(tuple(self.bases(subclass))) and self.is_family_model(subclass):
                return None if self.is_family_model(owner) else subclass
        return None

    def owner_of(self, owner: Class, attr: str) -> Class | None:
        """The class among `owner` and its bases that sets the attribute."""
        for candidate in (owner, *self.bases(owner)):
            if isinstance(candidate, Class) and ("attribute", candidate, attr) in self.sources:
                return candidate
        return None

    # Solving

    def _again(self, reader: Reader) -> None:
        """What the reader read has grown."""
        target, source = reader
        if isinstance(source, Class):
            self._bases.pop(source, None)
            for heir in self._heirs.pop(source, ()):
                self._again(heir)
        else:
            self._push((target, source))

    def _push(self, step: Step) -> None:
        if step not in self._queued:
            self._queued.add(step)
            self._queue.append(step)

    def _grow(self, variable: Variable, found: Iterable[Value]) -> None:
        held = self._table[variable]
        grew = False
        for value in found:
            old = held.get(value[:2])
            if old is None:
                # Of too many the first are kept, and one of each kind: no kind that it can hold is ever forgotten.
                is_new = len(held) < MAX_VALUES or all(value.kind is not other.kind for other in held.values())
            else:
                is_new = value.confidence is not old.confidence and value.rank > old.rank
            if is_new:
                held[value[:2]] = value
                self.kinds.add(value.kind)
                grew = True
        if grew:
            # Whoever reads it again says so again.
            for reader in self._readers.pop(variable, ()):
                self._again(reader)

    def read(self, variable: Variable) -> list[Value]:
        if self._reading is not None:
            readers = self._readers[variable]
            if not readers or readers[-1] is not self._reading:
                readers.append(self._reading)
        held = self._table.get(variable)
        return [*held.values()] if held else []

    def add_source(self, variable: Variable, source: Source) -> None:
        if (variable, source.expr) not in self._known:
            self._known.add((variable, source.expr))
            self.sources[variable].append(source)
            self._push((variable, source))

    def produce(self, source: Source) -> list[Value]:
        """What one way of getting a value gives now."""
        mode, expr, scope = source.mode, source.expr, source.scope
        # By the mode alone, the frequent ones first: patterns of whole sources take several times longer.
        if expr is not None:
            if mode == "value":
                return evaluate(self, expr, scope)
            if mode == "call":
                return call_result(self, cast("ast.Call", expr), scope)
            if mode == "annotation":
                return annotated(self, expr, scope, expr)
            if mode == "item":
                return item(self, expr, source.index, scope)
            if mode == "iterate":
                return iterate(self, expr, scope)
            if mode == "iterate-item":
                return iterate_item(self, expr, source.index, scope)
        match source:
            case Source(mode="import", target=(str() as module, str() as name, int() as level)):
                return imported(self, module, name, level, scope.file)
            case Source(mode="function", target=Function() as function):
                return [self.defined(Kind.FUNCTION, function, function.node, scope.file)]
            case Source(mode="class", target=Class() as owner):
                return [self.defined(Kind.OWN_CLASS, owner, owner.node, scope.file)]
            case Source(mode="self", target=Function() as function):
                return self.instance(function) + self._own_cache(function)
            case Source(mode="install", expr=ast.expr() as expr, target=ast.Attribute() as target):
                install(self, target, expr, scope)
        return []

    def _own_cache(self, function: Function) -> list[Value]:
        """`self` in a subclass of a Transformers cache; what it sets itself is its own."""
        owner = function.owner
        assert owner is not None
        bases = (base for base in self.bases(owner) if isinstance(base, str))
        base = next((base for base in bases if library.instance_kind(base) is Kind.CACHE), None)
        if base is None or "classmethod" in function.decorators:
            return []
        fact = fact_at(owner.node, owner.outer.file, f"`{owner.node.name}` subclasses `{base}`")
        return [Value(Kind.CACHE, place(owner.node, owner.outer.file), evidence=(fact,))]

    def defined(self, kind: Kind, target: Function | Class, node: ast.AST, file: File) -> Value:
        origin = place(node, file)
        self.definitions[origin] = target
        return Value(kind, origin)

    def instance(self, function: Function) -> list[Value]:
        """What `self` is in a method."""
        owner = function.owner
        assert owner is not None
        value = self.defined(Kind.OWN, owner, owner.node, owner.outer.file)
        if "classmethod" in function.decorators:
            return [replace(value, kind=Kind.OWN_CLASS)]
        found = [value]
        for base in self.bases(owner):
            if not isinstance(base, str):
                continue
            evidence = (fact_at(owner.node, owner.outer.file, f"`{owner.node.name}` subclasses `{base}`"),)
            is_factory = base.rpartition(".")[2].startswith("Auto")
            if library.is_stock_class(base) and not is_factory and (kind := library.instance_kind(base)) is not None:
                found.append(Value(kind, value.origin, evidence=evidence))
            elif library.ATTENTION_CLASS.match(base):
                found.append(Value(Kind.ATTENTION, base, evidence=evidence))
        if (model := self._mixed_into(owner)) is not None:
            fact = f"`{owner.node.name}` is mixed into `{model.node.name}`"
            evidence = (fact_at(owner.node, owner.outer.file, fact),)
            found.append(Value(Kind.MODEL, value.origin, Confidence.LIKELY, evidence))
        return found


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
        above = file.parent(above)
    is_none = isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant)
    return above is None and not is_none
